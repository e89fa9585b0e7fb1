"""Values of settings, as their annotations declare them: the one place where they are converted.

Values come from a command line, a YAML file, a sweep's file or server, or a run's config.json, and
all of them are plain data: numbers, texts, lists and mappings. `ValueConverter` takes such data and
an annotation. It returns the value in two forms: the object that the experiment receives, and the
plain data that is written into config.json, from which a worker makes the same object.

    lr: float                        lr=1           1.0                  1.0
    sizes: tuple[int, ...] = (1,)    sizes=[2,3]    (2, 3)               [2, 3]
    kind: Kind (an Enum)             kind=ADAM      Kind.ADAM            "ADAM"
    optimizer: Adam | Sgd            optimizer.class=Sgd optimizer.lr=1  {"class": "Sgd", "lr": 1.0}

What does not fit is collected, so that all of it is reported at once. Hydra and OmegaConf are not
imported here: workers do without them.
"""

from __future__ import annotations

import typing
from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from types import NoneType
from typing import Any, Literal, NamedTuple

from echelon.config.scalar_types import (
    ConvertedValue,
    ScalarType,
    SettingPath,
    describe_hint,
    find_choice,
    find_scalar_type,
    format_path,
    format_value,
    is_choice,
    list_choices,
)
from echelon.config.settings_classes import (
    ARRAY_TYPES,
    ARRAYS,
    MAPPING_TYPES,
    SettingsClass,
    SettingsField,
    is_same,
    is_settings_class,
    list_item_hints,
    list_union_members,
    read_settings_class,
)
from echelon.errors import suggest_nearest

NO_DEFAULT: Any = object()
"""In place of a default where there is none; None may be one."""
CLASS_KEY = "class"
"""Chooses the class where an annotation allows several; as a keyword it is the name of no field."""


class ValueProblem(NamedTuple):
    """Why a value was not taken."""

    path: SettingPath
    """The setting, by the names that lead to it."""
    kind: Literal["value", "unknown", "group", "missing", "declaration"]
    """The first three are about what was given, `group` about one value for a group of settings.
    The others are about what was not given, or about the class that declares the settings."""
    what: str
    do: str


class ValueConverter:
    """Converts values by their annotations, and collects what does not fit in `problems`."""

    def __init__(self, accepts_whole_floats: bool = False) -> None:
        """`accepts_whole_floats` takes 8.0 for 8: engines that search produce floats."""
        self.problems: list[ValueProblem] = []
        self._accepts_whole_floats = accepts_whole_floats

    def convert(
        self, hint: Any, given: Any, path: SettingPath, default: Any = NO_DEFAULT
    ) -> ConvertedValue | None:
        """Return the value, or None after adding to `problems`.

        A mapping that is given for a record, or for a mapping, changes single values of the
        `default`. Everything else replaces it.
        """
        members = list_union_members(hint)
        if len(members) > 1:
            return self._convert_union(members, given, path, default)
        [hint] = members
        origin = typing.get_origin(hint) or hint
        if origin in (Any, object):
            return self._convert_any(given, path, default)
        if is_choice(hint):
            if (found := find_choice(hint, given)) is None:
                self._add_choice(given, list_choices(hint), path)
            return found
        if is_settings_class(hint):
            return self._convert_record(read_settings_class(hint), given, path, default)
        if origin in ARRAY_TYPES:
            return self._convert_array(hint, given, path, default)
        if origin in MAPPING_TYPES:
            return self._convert_mapping(hint, given, path, default)
        if (scalar := find_scalar_type(origin)) is not None:
            return self._convert_scalar(scalar, given, path, default)
        self._add_unsupported(hint, path)
        return None

    # --- problems ---

    def _add(self, path: SettingPath, what: str, do: str) -> None:
        self.problems.append(ValueProblem(path, "value", what, do))

    def _add_mismatch(self, hint: Any, path: SettingPath, default: Any) -> None:
        """Add that a value is not of its declared kind."""
        expected = describe_hint(hint)
        usual = "" if default is NO_DEFAULT else f"; the default is {format_value(default)}"
        self._add(path, f"not {expected}", f"give {expected}{usual}")

    def _add_unsupported(self, hint: Any, path: SettingPath) -> None:
        name = getattr(hint, "__name__", None) or str(hint)
        self.problems.append(
            ValueProblem(
                path,
                "declaration",
                f"{format_path(path)} is declared as {name}, which cannot be written as plain data",
                "declare a number, a text, a Literal, an Enum or a dataclass, and make the object "
                "from it in the experiment",
            )
        )

    # --- kinds of values ---

    def _convert_scalar(
        self, scalar: ScalarType, given: Any, path: SettingPath, default: Any
    ) -> ConvertedValue | None:
        whole = isinstance(given, float) and given.is_integer()
        if scalar.cls is int and whole and self._accepts_whole_floats:
            given = int(given)
        try:
            typed = scalar.parse(given)
        except (ValueError, TypeError, ArithmeticError, AttributeError, RuntimeError):
            self._add_mismatch(scalar.cls, path, default)
            if scalar.cls is int and whole:
                write = f"write {format_path(path)}={given:.0f}"
                self.problems[-1] = self.problems[-1]._replace(do=write)
            return None
        return ConvertedValue(scalar.format(typed), typed)

    def _convert_any(self, given: Any, path: SettingPath, default: Any) -> ConvertedValue | None:
        """Take plain data as it is. A mapping changes single values of a default mapping."""
        if isinstance(given, Mapping):
            return self._convert_mapping(dict[str, Any], given, path, default)
        if isinstance(given, (list, tuple)):
            return self._convert_array(type(given), given, path, default)
        if given is None or type(given) in (bool, int, float, str):
            return ConvertedValue(given, given)
        # The default of a setting that is declared as Any; its class says how it is written.
        return self.convert(type(given), given, path)

    def _add_choice(self, given: Any, choices: Iterable[str], path: SettingPath) -> None:
        known = list(choices)
        listed = ", ".join(known[:12]) + (", …" if len(known) > 12 else "")
        self._add(path, f"not one of {listed}", suggest_nearest(format_value(given), known))

    def _convert_array(
        self, hint: Any, given: Any, path: SettingPath, default: Any
    ) -> ConvertedValue | None:
        """Take a list, and make what is declared: a list, a tuple, a set."""
        make = ARRAY_TYPES[typing.get_origin(hint) or hint]
        if not isinstance(given, ARRAYS):
            item = "" if given is None else format_value(given)
            self._add(path, "not a list", f"write '{format_path(path)}=[{item}]'")
            return None
        hints = list_item_hints(hint, len(given))
        if len(hints) != len(given):
            self._add_mismatch(hint, path, default)
            return None
        items = [
            self.convert(item_hint, item, (*path, f"[{i}]"))
            for i, (item_hint, item) in enumerate(zip(hints, given, strict=True))
        ]
        found = [item for item in items if item is not None]
        if len(found) < len(items):
            return None
        if make in (set, frozenset):  # once each, in one order on every rank: hashes differ
            by_text = {repr(item.plain): item for item in found}
            found = [by_text[text] for text in sorted(by_text)]
        try:
            return ConvertedValue([i.plain for i in found], make(i.typed for i in found))
        except TypeError:  # a set of lists
            self._add_unsupported(hint, path)
            return None

    def _convert_mapping(
        self, hint: Any, given: Any, path: SettingPath, default: Any
    ) -> ConvertedValue | None:
        """Take a mapping with any keys; it changes single values of the default."""
        if not isinstance(given, Mapping):
            self._add(path, "not a mapping", f"write '{format_path(path)}={{key: value}}'")
            return None
        key_hint, value_hint = typing.get_args(hint) or (Any, Any)
        base = default if isinstance(default, Mapping) and default is not given else {}
        found: dict[Any, tuple[Any, ConvertedValue]] = {}
        is_whole = True
        for key, value in [*base.items(), *given.items()]:
            inner = (*path, format_value(key))
            name = self.convert(key_hint, key, inner)
            earlier = found[name.plain][1].typed if name and name.plain in found else NO_DEFAULT
            content = self.convert(value_hint, value, inner, earlier)
            if name is None or content is None:
                is_whole = False
            else:
                found[name.plain] = (name.typed, content)
        if not is_whole:
            return None
        make = MAPPING_TYPES[typing.get_origin(hint) or hint]
        return ConvertedValue(
            {format_value(plain): content.plain for plain, (_, content) in found.items()},
            make({key: content.typed for key, content in found.values()}),
        )

    # --- unions ---

    def _convert_union(
        self, members: tuple[Any, ...], given: Any, path: SettingPath, default: Any
    ) -> ConvertedValue | None:
        """Take the member that the value already is, or else the first that it can become.

        A text is the last resort, because everything can become one.
        """
        records = {m: read_settings_class(m) for m in members if is_settings_class(m)}
        if records and isinstance(given, Mapping):
            return self._convert_record_union(members, records, given, path, default)
        found = []
        for member in members:
            trial = ValueConverter(self._accepts_whole_floats)
            value = trial.convert(member, given, path, default)
            if value is not None and is_settings_class(member) and len(records) > 1:
                plain = {CLASS_KEY: records[member].name, **value.plain}
                value = ConvertedValue(plain, value.typed)
            if value is not None:
                found.append((_rank_match(value, given), value))
            elif any(problem.kind == "declaration" for problem in trial.problems):
                self.problems += trial.problems
                return None
        if found:
            return min(found, key=lambda pair: pair[0])[1]
        others = [m for m in members if m is not NoneType]
        if len(others) == 1 and given is not None:  # its own words say more
            return self.convert(others[0], given, path, default)
        self._add_mismatch(typing.Union[members], path, default)  # noqa: UP007  # of a tuple
        if len(records) > 1:
            names = [record.name for record in records.values()]
            nearest = next(iter(get_close_matches(format_value(given), names)), names[0])
            write = f"write {format_path((*path, CLASS_KEY))}={nearest}; known: {', '.join(names)}"
            self.problems[-1] = self.problems[-1]._replace(do=write)
        return None

    def _convert_record_union(
        self,
        members: tuple[Any, ...],
        records: Mapping[Any, SettingsClass],
        given: Mapping[str, Any],
        path: SettingPath,
        default: Any,
    ) -> ConvertedValue | None:
        """Take the class that `class` names, or that of the default, or the first that fits."""
        values = {key: value for key, value in given.items() if key != CLASS_KEY}
        by_name = {record.name: hint for hint, record in records.items()}
        if len(records) == 1 and CLASS_KEY not in given:
            trial = ValueConverter(self._accepts_whole_floats)
            others = [m for m in members if m not in records and m is not NoneType]
            [hint] = records
            value = trial.convert(hint, values, path, default)
            if value is None and others:  # such as a mapping beside a dataclass
                return self.convert(typing.Union[tuple(others)], given, path, default)  # noqa: UP007
            self.problems += trial.problems
            return value
        if CLASS_KEY in given and given[CLASS_KEY] not in by_name:
            self._add_choice(given[CLASS_KEY], by_name, (*path, CLASS_KEY))
            return None
        usual = [r.name for r in records.values() if type(default) is r.cls]
        chosen = [given[CLASS_KEY]] if CLASS_KEY in given else usual or list(by_name)
        trials = []
        for name in chosen:
            trial = ValueConverter(self._accepts_whole_floats)
            value = trial.convert(by_name[name], values, path, default)
            if value is not None:
                return ConvertedValue({CLASS_KEY: name, **value.plain}, value.typed)
            trials.append(trial)
        # Of several that do not fit, the nearest one is explained.
        for problem in min(trials, key=lambda trial: len(trial.problems)).problems:
            owners = [r.name for r in records.values() if problem.path[-1] in r.fields]
            if problem.kind == "unknown" and problem.path[:-1] == path and owners:
                write = f"write {format_path((*path, CLASS_KEY))}={owners[0]} too"
                problem = problem._replace(do=f"it is a setting of {owners[0]}: {write}")
            self.problems.append(problem)
        return None

    # --- records ---

    def _convert_record(
        self, record: SettingsClass, given: Any, path: SettingPath, default: Any
    ) -> ConvertedValue | None:
        """Take the settings that are given, and for the others the default's or the class's own."""
        instance = None
        if record.is_instance(given) and not isinstance(given, dict):
            instance = default = given
            given = {}
        if not isinstance(given, Mapping):
            names = list(record.fields)
            first = f"{format_path(path)}.{names[0]}=VALUE" if names else "nothing"
            what, do = "a group of settings, not one value", f"set one of its own: {first}"
            self.problems.append(ValueProblem(path, "group", what, do))
            return None
        count = len(self.problems)
        for key in given:
            if key not in record.fields:
                what, do = "there is no such setting", suggest_nearest(str(key), record.fields)
                self.problems.append(ValueProblem((*path, str(key)), "unknown", what, do))
        base = record.read_changed_values(default) if record.is_instance(default) else {}
        found = {
            field.name: self._convert_field(record, field, given, path, base)
            for field in record.fields.values()
        }
        if len(self.problems) > count:
            return None
        values = {name: value for name, value in found.items() if value is not None}
        plain = {name: value.plain for name, value in values.items()}
        try:
            typed = record.cls(**{name: value.typed for name, value in values.items()})
        except (ValueError, TypeError, AssertionError) as error:  # its own __post_init__
            reason = str(error) or type(error).__name__
            what, do = f"{record.name} refuses these settings: {reason}", "change what it names"
            self.problems.append(ValueProblem(path, "declaration", what, do))
            return None
        made = record.read_values(typed)
        if instance is not None and not is_same(made, record.read_values(instance)):
            what = f"{record.name} makes other values of its own, so its default has no plain form"
            do = "compute such values in a property, or in a field with init=False"
            self.problems.append(ValueProblem(path, "declaration", what, do))
            return None
        return ConvertedValue(plain, typed)

    def _convert_field(
        self,
        record: SettingsClass,
        field: SettingsField,
        given: Mapping[str, Any],
        path: SettingPath,
        base: Mapping[str, Any],
    ) -> ConvertedValue | None:
        """Return the value of one field; None if it has none."""
        inner = (*path, field.name)
        default = NO_DEFAULT
        if field.name in base:
            default = base[field.name]
        elif field.make_default is not None:
            default = field.make_default()
        usual = None
        if default is not NO_DEFAULT:
            usual = self._convert_default(record, field, default, inner)
            if usual is None:
                return None
        if field.name not in given:
            if usual is None and field.is_required:
                what = f"{format_path(inner)} has no value: {record.name} declares no default"
                do = f"give one: {format_path(inner)}=VALUE"
                self.problems.append(ValueProblem(inner, "missing", what, do))
            return usual
        if given[field.name] is None and default is None:
            return usual
        value = self.convert(field.hint, given[field.name], inner, default)
        # JSON has no tuples. What was not changed is the default itself, whatever its annotation.
        if value and usual and value.plain == usual.plain and not is_same(value.typed, usual.typed):
            return usual
        return value

    def _convert_default(
        self, record: SettingsClass, field: SettingsField, default: Any, path: SettingPath
    ) -> ConvertedValue | None:
        """Return the default of a field in both forms. None stands for itself, declared or not."""
        if default is None:
            return ConvertedValue(None, None)
        trial = ValueConverter()
        value = trial.convert(field.hint, default, path)
        if value is None:
            declared = [p for p in trial.problems if p.kind == "declaration"]
            self.problems += declared or [
                ValueProblem(
                    path,
                    "declaration",
                    f"{record.name}.{field.name} is declared as {describe_hint(field.hint)}, but "
                    f"its default is {default!r}",
                    "make its annotation and its default agree",
                )
            ]
            return None
        is_equal = type(value.typed) is type(default) or is_same(value.typed, default)
        return value if is_equal else ConvertedValue(value.plain, default)


def _rank_match(value: ConvertedValue, given: Any) -> int:
    """Return how far a value of a union is from what was given; the least is taken."""
    is_unchanged = type(value.plain) is type(given) and value.plain == given
    if is_unchanged or type(value.typed) is type(given):
        return 0
    return 2 if type(value.typed) is str else 1
