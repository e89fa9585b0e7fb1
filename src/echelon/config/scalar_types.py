"""Single values: how each type is parsed from plain data, written back, and named for people.

Types outside of builtins are known by their names, so that `decimal` or torch is imported only
where an experiment has imported it already.
"""

from __future__ import annotations

import functools
import operator
import os
import re
import typing
from collections.abc import Callable, Mapping
from enum import Enum, Flag
from pathlib import Path, PurePath
from types import NoneType
from typing import Any, Literal, NamedTuple

from echelon.config.settings_classes import (
    is_settings_class,
    list_union_members,
    read_settings_class,
)

SettingPath = tuple[str, ...]
"""The names that lead to a setting, such as ("experiment", "optimizer", "lr")."""
_TRUE, _FALSE = ("true", "yes", "on", "1", "y"), ("false", "no", "off", "0", "n")


class ConvertedValue(NamedTuple):
    """A value in both of its forms."""

    plain: Any
    """As JSON can write it."""
    typed: Any
    """As the experiment receives it."""


class ScalarType(NamedTuple):
    """A type whose values are written as one number or one text."""

    cls: Any
    name: str
    """What a value is called, with its article."""
    parse: Callable[[Any], Any]
    """From plain data, or from a value of the type; raises a ValueError or its like."""
    format: Callable[[Any], Any]
    """To plain data."""


def find_scalar_type(hint: Any) -> ScalarType | None:
    """Return how values of a type are read and written; None if it is not such a type."""
    if hint is os.PathLike or (isinstance(hint, type) and issubclass(hint, PurePath)):
        cls: Any = Path if hint is os.PathLike else hint
        return ScalarType(hint, "a path", lambda given: cls(_get_text(given, PurePath)), str)
    if hint in _PLAIN_TYPES:
        return _PLAIN_TYPES[hint]
    where = f"{getattr(hint, '__module__', '')}.{getattr(hint, '__qualname__', '')}"
    if where not in _TEXT_TYPES:
        return None
    name, parse, write = _TEXT_TYPES[where]

    def parse_text(given: Any) -> Any:
        return given if isinstance(given, hint) else parse(hint, _get_text(given))

    return ScalarType(hint, name, parse_text, write)


def _get_text(given: Any, also: type = str) -> str:
    """Return a text as it was typed: a command line reads 5 as a number."""
    is_text = isinstance(given, (str, int, float, also)) and not isinstance(given, Enum)
    if not is_text:
        raise ValueError("not a text")
    return format_value(given) if isinstance(given, bool) else str(given)


def _parse_bool(given: Any) -> bool:
    if isinstance(given, (int, float)) and given in (0, 1):
        return bool(given)
    text = given.lower() if isinstance(given, str) else ""
    if text not in _TRUE + _FALSE:
        raise ValueError("not true or false")
    return text in _TRUE


def _parse_int(given: Any) -> int:
    if isinstance(given, bool) or not isinstance(given, (int, str)):
        raise ValueError("not a whole number")
    return int(given)


def _parse_float(given: Any) -> float:
    if isinstance(given, bool) or not isinstance(given, (int, float, str)):
        raise ValueError("not a number")
    return float(given)


def _parse_null(given: Any) -> None:
    if given is not None:
        raise ValueError("not null")


def _parse_timedelta(cls: Any, text: str) -> Any:
    """Read seconds, or what Python writes: 1:30:00, or 2 days, 0:00:00."""
    pattern = r"(?:(-?\d+) days?, )?(\d+):(\d\d):(\d\d(?:\.\d+)?)"
    if found := re.fullmatch(pattern, text):
        days, hours, minutes, seconds = found.groups()
        whole = {"days": int(days or 0), "hours": int(hours), "minutes": int(minutes)}
        return cls(**whole, seconds=float(seconds))
    return cls(seconds=float(text))


def _parse_torch_dtype(cls: Any, text: str) -> Any:
    import torch  # imported already: the annotation is one of its types

    found = getattr(torch, text.removeprefix("torch."), None)
    if not isinstance(found, cls):
        raise ValueError("not a dtype")
    return found


def _parse_iso(cls: Any, text: str) -> Any:
    return cls.fromisoformat(text)


def _call(cls: Any, text: str) -> Any:
    return cls(text)


_PLAIN_TYPES: dict[Any, ScalarType] = {
    bool: ScalarType(bool, "true or false", _parse_bool, bool),
    int: ScalarType(int, "a whole number", _parse_int, int),
    float: ScalarType(float, "a number", _parse_float, float),
    str: ScalarType(str, "a text", _get_text, str),
    NoneType: ScalarType(NoneType, "null", _parse_null, _parse_null),
}
_TEXT_TYPES: dict[str, tuple[str, Callable[[Any, str], Any], Callable[[Any], Any]]] = {
    "builtins.bytes": (
        "a text",
        lambda cls, text: os.fsencode(text),
        os.fsdecode,
    ),
    "builtins.complex": ("a complex number, such as 1+2j", _call, str),
    "decimal.Decimal": ("a decimal number", _call, str),
    "fractions.Fraction": ("a fraction, such as 1/3", _call, str),
    "uuid.UUID": ("a UUID", _call, str),
    "datetime.datetime": ("a time, such as 2026-01-31T12:00", _parse_iso, lambda v: v.isoformat()),
    "datetime.date": ("a date, such as 2026-01-31", _parse_iso, lambda v: v.isoformat()),
    "datetime.time": ("a time of day, such as 12:30", _parse_iso, lambda v: v.isoformat()),
    "datetime.timedelta": ("a duration, such as 1:30:00, or seconds", _parse_timedelta, str),
    "torch.dtype": (
        "a dtype of torch, such as bfloat16",
        _parse_torch_dtype,
        lambda value: str(value).removeprefix("torch."),
    ),
    "torch.device": ("a device of torch, such as cuda:0", _call, str),
}
"""Types by their qualified names: what a value is called, how a text becomes one, and back."""


# --- choices ---


def is_choice(hint: Any) -> bool:
    """Return whether an annotation lists its values: a Literal or an Enum."""
    is_enum = isinstance(hint, type) and issubclass(hint, Enum)
    return is_enum or typing.get_origin(hint) is Literal


def list_choices(hint: Any) -> list[str]:
    """Return the values that a Literal or an Enum lists, as they would be typed."""
    if isinstance(hint, type):
        return list(hint.__members__)  # type: ignore[attr-defined]
    return [format_value(choice) for choice in typing.get_args(hint)]


def find_choice(hint: Any, given: Any) -> ConvertedValue | None:
    """Return the choice that was given; None if there is no such.

    A choice is found by value and type, or else as it is written: a command line does not tell 1
    from "1". A member of an Enum has a name and a value, and the name comes first.
    """
    if isinstance(hint, type):
        member = _find_member(hint, given)
        return None if member is None else ConvertedValue(format_enum(member), member)
    choices = [
        ConvertedValue(c.name if isinstance(c, Enum) else c, c) for c in typing.get_args(hint)
    ]
    for choice in choices:
        is_same_type = type(given) is type(choice.plain)
        if given is choice.typed or (is_same_type and given == choice.plain):
            return choice
    written = (c for c in choices if format_value(c.plain) == format_value(given))
    return next(written, None)


def _find_member(cls: type[Enum], given: Any) -> Enum | None:
    """Return the member of an Enum with this name or value; flags may be joined, as in A|B."""
    if isinstance(given, cls):
        return given
    names = format_value(given).split("|") if issubclass(cls, Flag) else [format_value(given)]
    if all(name in cls.__members__ for name in names):
        return functools.reduce(operator.or_, (cls[name] for name in names))
    return next((m for m in cls if format_value(m.value) == format_value(given)), None)


# --- for people ---


def format_value(value: Any) -> str:
    """Return a value as it would be typed."""
    if isinstance(value, Enum):
        return format_enum(value)
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return str(value)


def format_enum(member: Enum) -> str:
    """Return the name of a member; the names of joined flags as A|B."""
    if member.name is not None and "|" not in member.name:
        return member.name
    return "|".join(str(part.name) for part in type(member) if part.value & member.value)


def format_path(path: SettingPath) -> str:
    """Return a setting as it would be typed; those of the experiment need no prefix."""
    names = path[1:] if path[:1] == ("experiment",) and len(path) > 1 else path
    return ".".join(names).replace(".[", "[")


def describe_hint(hint: Any) -> str:
    """Return what an annotation allows, as a person would say it."""
    members = list_union_members(hint)
    if len(members) > 1:
        return " or ".join(dict.fromkeys(map(describe_hint, members)))
    [hint] = members
    origin = typing.get_origin(hint) or hint
    if is_choice(hint):
        return f"one of {', '.join(list_choices(hint))}"
    if is_settings_class(hint):
        return f"the settings of {read_settings_class(hint).name}"
    if (scalar := find_scalar_type(origin)) is not None:
        return scalar.name
    arguments = typing.get_args(hint)
    if origin is tuple and arguments and arguments[-1] is not Ellipsis:
        return f"a list of {len(arguments)} values"
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return "a mapping"
    return "any value" if origin in (Any, object) else "a list"
