"""What a class declares as settings: the fields of a dataclass, a NamedTuple or a TypedDict.

A *settings class*, or record, is one of these three. This module reads them and their annotations;
what becomes of the values is in `typed_values.py`. It imports nothing but the standard library,
because workers use it without Hydra.
"""

from __future__ import annotations

import collections
import collections.abc
import dataclasses
import functools
import types
import typing
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from echelon.errors import EchelonError, Fault

_WRAPPER_NAMES = ("Final", "Required", "NotRequired", "ReadOnly")
"""Annotations around an annotation that say nothing about the value. By name, because Python 3.10
has some of them in typing_extensions only."""
_UNIONS = (typing.Union, types.UnionType)
ARRAYS = (list, tuple, set, frozenset, collections.deque)
"""Classes of several values."""
ARRAY_TYPES: dict[Any, Callable[..., Any]] = {
    **{kind: kind for kind in ARRAYS},
    collections.abc.Set: set,
    collections.abc.MutableSet: set,
    collections.abc.Sequence: list,
    collections.abc.MutableSequence: list,
    collections.abc.Collection: list,
    collections.abc.Iterable: list,
}
"""What is made for each annotation of several values."""
MAPPING_TYPES: dict[Any, Callable[..., Any]] = {
    dict: dict,
    collections.OrderedDict: collections.OrderedDict,
    collections.abc.Mapping: dict,
    collections.abc.MutableMapping: dict,
}
"""What is made for each annotation of values with keys."""


@dataclass(frozen=True)
class SettingsField:
    """One setting that a record declares."""

    name: str
    hint: Any
    """Its annotation, resolved."""
    make_default: Callable[[], Any] | None
    """Returns its default, made anew at each call; None if it has none."""
    is_required: bool


@dataclass(frozen=True)
class SettingsClass:
    """A class that declares settings, and its fields by name."""

    cls: Any
    fields: Mapping[str, SettingsField]

    @property
    def name(self) -> str:
        """The name of the class, as a person wrote it."""
        return str(self.cls.__name__)

    def is_instance(self, value: Any) -> bool:
        """Return whether a value is an object of this class. A TypedDict is a plain dict."""
        return isinstance(value, dict if typing.is_typeddict(self.cls) else self.cls)

    def read_values(self, instance: Any) -> dict[str, Any]:
        """Return the values of an object of this class by the names of its fields."""
        if isinstance(instance, dict):
            return {name: instance[name] for name in self.fields if name in instance}
        # An InitVar is an argument that the object does not keep.
        return {name: getattr(instance, name) for name in self.fields if hasattr(instance, name)}

    def read_changed_values(self, instance: Any) -> dict[str, Any]:
        """Return the values of an object that are not those of a fresh one.

        The others come from the fields' own defaults: a __post_init__ that has changed them would
        change them once more.
        """
        values = self.read_values(instance)
        if any(field.is_required for field in self.fields.values()):
            return values
        fresh = self.read_values(self.cls())
        return {n: v for n, v in values.items() if n not in fresh or not is_same(v, fresh[n])}


def is_settings_class(hint: Any) -> bool:
    """Return whether an annotation is a record, with or without type arguments."""
    cls = typing.get_origin(hint) or hint
    if not isinstance(cls, type):
        return False
    is_named_tuple = issubclass(cls, tuple) and hasattr(cls, "_field_defaults")
    return dataclasses.is_dataclass(cls) or is_named_tuple or typing.is_typeddict(cls)


@functools.cache
def read_settings_class(hint: Any) -> SettingsClass:
    """Return the fields of a record; raises an EchelonError if an annotation cannot be resolved."""
    cls = typing.get_origin(hint) or hint
    try:
        hints = typing.get_type_hints(cls, include_extras=True)
    except (NameError, TypeError, AttributeError, SyntaxError) as error:
        raise EchelonError(
            Fault(
                f"an annotation of {cls.__name__} cannot be resolved: {error}",
                f"import or define it at the top level of the file of {cls.__name__}, "
                "not under TYPE_CHECKING or in a function",
            )
        ) from None
    parameters = dict(zip(getattr(cls, "__parameters__", ()), typing.get_args(hint), strict=False))
    if dataclasses.is_dataclass(cls):
        found = _iter_dataclass_fields(cls, hints)
    elif typing.is_typeddict(cls):
        found = (SettingsField(n, h, None, n in cls.__required_keys__) for n, h in hints.items())
    else:
        found = _iter_named_tuple_fields(cls, hints)
    fields = {
        field.name: dataclasses.replace(field, hint=_substitute(field.hint, parameters))
        for field in found
    }
    return SettingsClass(cls, fields)


def _iter_dataclass_fields(cls: Any, hints: Mapping[str, Any]) -> Iterator[SettingsField]:
    """Yield the fields that the constructor of a dataclass takes, its InitVars among them."""
    for field in cls.__dataclass_fields__.values():  # `fields()` leaves InitVars out
        hint = hints[field.name]
        is_class_variable = typing.ClassVar in (hint, typing.get_origin(hint))
        if is_class_variable or not field.init:
            continue
        make_default: Callable[[], Any] | None = None
        if field.default_factory is not dataclasses.MISSING:
            make_default = field.default_factory
        elif field.default is not dataclasses.MISSING:
            make_default = functools.partial(_return_value, field.default)
        hint = hint.type if isinstance(hint, dataclasses.InitVar) else hint
        yield SettingsField(field.name, hint, make_default, is_required=make_default is None)


def _iter_named_tuple_fields(cls: Any, hints: Mapping[str, Any]) -> Iterator[SettingsField]:
    """Yield the fields of a NamedTuple; collections.namedtuple has no annotations."""
    for name in cls._fields:
        has_default = name in cls._field_defaults
        make = functools.partial(_return_value, cls._field_defaults[name]) if has_default else None
        yield SettingsField(name, hints.get(name, Any), make, is_required=not has_default)


def _return_value(value: Any) -> Any:
    return value


def _substitute(hint: Any, parameters: Mapping[Any, Any]) -> Any:
    """Return an annotation with the type arguments of a generic class in place of its variables."""
    if isinstance(hint, typing.TypeVar):
        return parameters.get(hint, hint)
    own = getattr(hint, "__parameters__", ())
    if not own or isinstance(hint, type) or not parameters:
        return hint
    return hint[tuple(parameters.get(variable, variable) for variable in own)]


def unwrap_hint(hint: Any) -> Any:
    """Return an annotation without Annotated, Final, NewType and other names for it."""
    while True:
        origin = typing.get_origin(hint)
        if origin is typing.Annotated or getattr(origin, "_name", None) in _WRAPPER_NAMES:
            hint = typing.get_args(hint)[0]
        elif isinstance(hint, typing.NewType):
            hint = hint.__supertype__
        elif type(hint).__name__ == "TypeAliasType":  # `type Width = int`, from Python 3.12 on
            hint = hint.__value__
        elif isinstance(hint, typing.TypeVar):
            bounds = hint.__constraints__ or (hint.__bound__ or Any,)
            hint = typing.Union[bounds]  # noqa: UP007  # of a tuple
        else:
            return types.NoneType if hint is None else hint


def list_union_members(hint: Any) -> tuple[Any, ...]:
    """Return the members of a union without their wrappers; of anything else, itself."""
    hint = unwrap_hint(hint)
    if typing.get_origin(hint) not in _UNIONS:
        return (hint,)
    return tuple(m for member in typing.get_args(hint) for m in list_union_members(member))


def list_setting_names(hint: Any, prefix: str = "", seen: tuple[Any, ...] = ()) -> list[str]:
    """Return the dotted names of all settings of a record and of the records in it."""
    names: list[str] = []
    for field in read_settings_class(hint).fields.values():
        members = list_union_members(field.hint)
        records = [m for m in members if is_settings_class(m) and m not in seen]
        inner = [
            name
            for record in records  # a record within itself, such as a tree, is followed once
            for name in list_setting_names(record, f"{prefix}{field.name}.", (*seen, hint, record))
        ]
        names += dict.fromkeys(inner) if inner else [f"{prefix}{field.name}"]
    return names


def list_item_hints(hint: Any, count: int) -> list[Any]:
    """Return the annotation of each of `count` items; of another number if there must be."""
    arguments = typing.get_args(hint)
    if (typing.get_origin(hint) or hint) is not tuple:
        return [arguments[0] if arguments else Any] * count
    if len(arguments) == 2 and arguments[1] is Ellipsis:
        return [arguments[0]] * count
    is_bare = hint is tuple or not (arguments or str(hint).endswith("[()]"))
    return [Any] * count if is_bare else list(arguments)


def is_same(value: Any, other: Any) -> bool:
    """Return whether two values are equal; what cannot be compared, such as tensors, is not."""
    try:
        return bool(value == other)
    except (TypeError, ValueError, RuntimeError):
        return False
