"""The values that files, defaults and a command line give, with the words that gave each.

They are collected here as plain data before anything is checked. `convert_config` then makes a
Config of them, and a fault for each value that does not fit, which begins with the words that a
person typed.
"""

from __future__ import annotations

import copy
import dataclasses
import typing
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from echelon.config.scalar_types import SettingPath, format_path
from echelon.config.schema import Config, flatten
from echelon.config.settings_classes import list_setting_names
from echelon.config.typed_values import ValueConverter, ValueProblem
from echelon.errors import Fault, suggest_nearest

SECTIONS = tuple(field.name for field in dataclasses.fields(Config))
"""The settings of Echelon at the top level; every other name is a setting of the experiment."""


@dataclass(frozen=True)
class ExperimentSettings:
    """What may be set of the experiment, and its entry."""

    entry: str | None
    cls: type | None = None
    """The class that declares the settings; None if any value may be given."""
    names: Collection[str] | None = None
    """Without a class: the settings there are; None if there may be any."""

    def list_names(self) -> list[str]:
        """Return the names of all settings that are known."""
        return list_setting_names(self.cls) if self.cls else sorted(self.names or ())


class GivenValues:
    """Values by their paths, later ones over earlier ones."""

    def __init__(self) -> None:
        self.tree: dict[str, Any] = {}
        """The values as nested plain data."""
        self.added_names: set[str] = set()
        """Settings of the experiment that may be given although nothing declares them."""
        self._labels: dict[SettingPath, str] = {}

    def set_value(self, path: SettingPath, value: Any, label: str = "") -> None:
        """Set one value. `label` are the words that gave it, if any did; a fault begins with them.

        `lr` is short for `experiment.lr`. A mapping changes single values of an earlier one.
        """
        path = expand_path(path)
        self._remove_labels(path)
        if label:
            self._labels[path] = label
        node = self.tree
        for name in path[:-1]:
            if not isinstance(node.get(name), dict):
                node[name] = {}
            node = node[name]
        node[path[-1]] = _merge(node.get(path[-1]), value)

    def remove(self, *path: str) -> None:
        """Forget a value, or all values of a section."""
        node = self.get_value(*path[:-1])
        if isinstance(node, dict):
            node.pop(path[-1], None)
        self._remove_labels(path)

    def _remove_labels(self, path: SettingPath) -> None:
        for old in [p for p in self._labels if p[: len(path)] == path]:
            del self._labels[old]

    def get_value(self, *path: str) -> Any:
        """Return a value that was given, or None."""
        node: Any = self.tree
        for name in path:
            node = node.get(name) if isinstance(node, dict) else None
        return node

    def iter_leaves(self) -> Iterator[tuple[SettingPath, Any]]:
        """Yield every value that is not a mapping, by its path."""
        yield from iter_leaves(self.tree)

    def find_label(self, path: SettingPath) -> tuple[SettingPath, str]:
        """Return the words that gave a value, and the path that they name.

        It may lead to a mapping that contains the value, or into a value that is not a mapping.
        """
        for length in range(len(path), 0, -1):
            if path[:length] in self._labels:
                return path[:length], self._labels[path[:length]]
        inner = (p for p in self._labels if p[: len(path)] == path)
        found = next(inner, path)
        return found, self._labels.get(found, "")


def expand_path(path: SettingPath) -> SettingPath:
    """Return the whole path of a setting: `lr` is short for `experiment.lr`."""
    return path if path[0] in SECTIONS else ("experiment", *path)


def iter_leaves(
    tree: Mapping[Any, Any], prefix: SettingPath = ()
) -> Iterator[tuple[SettingPath, Any]]:
    """Yield every value that is not a mapping, by its path. An empty mapping is a value."""
    for name, value in tree.items():
        if isinstance(value, Mapping) and value:
            yield from iter_leaves(value, (*prefix, str(name)))
        else:
            yield (*prefix, str(name)), value


def _merge(old: Any, new: Any) -> Any:
    """Return the new value; a mapping over a mapping changes single values of it."""
    if not isinstance(new, Mapping):
        return copy.deepcopy(new)
    base = dict(old) if isinstance(old, Mapping) else {}
    return base | {str(key): _merge(base.get(str(key)), value) for key, value in new.items()}


# --- to a configuration ---


def convert_config(
    given: GivenValues,
    settings: ExperimentSettings,
    faults: list[Fault],
    accepts_whole_floats: bool = False,
) -> Config:
    """Return the configuration of the values, and add a fault for each that does not fit.

    A section with a fault has its defaults, so that the checks after this one have values.
    """
    converter = ValueConverter(accepts_whole_floats)
    found: dict[str, Any] = {}
    hints = typing.get_type_hints(Config)
    default = Config()
    for name in SECTIONS:
        if name == "experiment":
            found[name] = _convert_experiment(given, settings, converter)
        elif name in given.tree:
            value = given.tree[name]
            converted = _convert_section(
                hints[name], value, name, getattr(default, name), converter
            )
            found[name] = converted
    faults += [_describe_problem(problem, given, settings) for problem in converter.problems]
    return dataclasses.replace(default, **found)


def _convert_section(
    hint: Any, value: Any, name: str, default: Any, converter: ValueConverter
) -> Any:
    """Return one section; values of it that do not fit are left at their defaults."""
    count = len(converter.problems)
    converted = converter.convert(hint, value, (name,), default)
    wrong = [problem.path for problem in converter.problems[count:]]
    if converted is None and isinstance(value, dict) and (name,) not in wrong:
        fitting = _remove_paths(value, (name,), wrong)
        converted = ValueConverter().convert(hint, fitting, (name,), default)
    return default if converted is None else converted.typed


def _remove_paths(
    values: dict[str, Any], path: SettingPath, wrong: Collection[SettingPath]
) -> dict[str, Any]:
    """Return the values without those at the wrong paths, so that the rest is checked too. Of a
    mapping only what is wrong goes, of a list with a wrong item the list."""
    kept: dict[str, Any] = {}
    for key, value in values.items():
        inner = (*path, key)
        if isinstance(value, dict) and inner not in wrong:
            kept[key] = _remove_paths(value, inner, wrong)
        elif not any(other[: len(inner)] == inner for other in wrong):
            kept[key] = value
    return kept


def _convert_experiment(
    given: GivenValues, settings: ExperimentSettings, converter: ValueConverter
) -> dict[str, Any]:
    """Return the experiment's entry and its settings as plain data."""
    values = dict(given.tree.get("experiment") or {})
    entry = values.pop("entry", settings.entry)
    result = {} if entry is None else {"entry": entry}
    if settings.cls is not None:
        converted = converter.convert(settings.cls, values, ("experiment",))
        return result | (converted.plain if converted is not None else {})
    for name in values:
        known = settings.names is None or name in settings.names or name in given.added_names
        if not known:
            what, do = "there is no such setting", suggest_nearest(name, settings.names or ())
            converter.problems.append(ValueProblem(("experiment", name), "unknown", what, do))
    converted = converter.convert(dict[str, Any], values, ("experiment",))
    return result | (converted.plain if converted is not None else {})


def _describe_problem(
    problem: ValueProblem, given: GivenValues, settings: ExperimentSettings
) -> Fault:
    """Return a problem as a fault that begins with what was typed."""
    if problem.kind in ("missing", "declaration"):
        return Fault(problem.what, problem.do)
    path, label = given.find_label(problem.path)
    is_unknown = problem.kind == "unknown" and path == problem.path
    if not is_unknown and len(path) <= len(problem.path):
        inside = f"{format_path(problem.path)}: " if path != problem.path else ""
        more = _suggest_group(path, given) if problem.kind == "group" else ""
        return Fault(f"{label}: {inside}{problem.what}", f"{problem.do}{more}")
    # `lrr=1` or `lr.a=1`: the name is wrong, and of all names there are, one may be near.
    known = {*flatten(Config().to_dict()), *settings.list_names(), *given.added_names}
    if format_path(path) in known:  # of Adam, but optimizer.class=Sgd
        return Fault(f"{label}: there is no such setting of the class that is chosen", problem.do)
    hint = suggest_nearest(format_path(path), known)
    group = _suggest_group(path, given)
    no_group = f", and no config group {path[-1]!r}" if group else ""
    is_open = settings.cls is None and path[0] == "experiment"
    add = f"; +{label} passes it to the experiment all the same" if is_open and "=" in label else ""
    more = (group or add).removeprefix(";" if hint.endswith("?") else "")
    return Fault(f"{label}: there is no such setting{no_group}", f"{hint}{more}")


def _suggest_group(path: SettingPath, given: GivenValues) -> str:
    """Return how a config group would be made, if what was typed looks like the choice of one:
    model=huge."""
    value = given.get_value(*path)
    is_word = isinstance(value, str) and value.isidentifier()
    if len(path) != 2 or path[0] != "experiment" or not is_word:
        return ""
    return f"; to choose a file by it, write conf/{path[1]}/{value}.yaml beside your experiment"
