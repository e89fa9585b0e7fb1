"""Parameters as words: overrides of declared settings, and what people read."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from echelon.config.untrusted import check_values

_PLAIN_WORD = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_RESERVED_WORDS = ("null", "true", "false", "nan", "inf")


def format_overrides(parameters: Mapping[str, Any]) -> list[str]:
    """Overrides KEY=VALUE, or one EchelonError that refuses what a sweep may not set. That the keys
    are declared is for the composition to say, which knows the nearest names."""
    return [f"{key}={format_value(value)}" for key, value in check_values(parameters).items()]


def format_value(value: Any) -> str:
    """As Hydra's grammar reads it back: a text in quotes, so that nothing in it is special."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, (int, float)):
        return repr(value)
    if isinstance(value, str):
        plain = _PLAIN_WORD.fullmatch(value) and value.lower() not in _RESERVED_WORDS
        return value if plain else _quote(value)
    assert isinstance(value, Sequence)
    return f"[{','.join(format_value(item) for item in value)}]"


def _quote(text: str) -> str:
    """In Hydra's grammar a backslash is special only before a quote."""
    slashes = re.sub(r"(\\+)(?='|$)", r"\1\1", text)
    return "'" + slashes.replace("'", "\\'") + "'"


def format_short_value(value: Any) -> str:
    """For people: four digits are enough."""
    return f"{value:.4g}" if isinstance(value, float) else format_value(value)


def format_parameters(values: Mapping[str, Any]) -> str:
    return " ".join(f"{key}={format_short_value(value)}" for key, value in values.items())
