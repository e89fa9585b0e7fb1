"""Parameters as words: overrides of declared settings, and what people read."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from echelon.config.outside import values_of

_PLAIN_WORD = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_SPECIAL = ("null", "true", "false", "nan", "inf")


def words(parameters: Mapping[str, Any]) -> list[str]:
    """Overrides KEY=VALUE, or one EchelonError that refuses what a sweep may not set. That the keys
    are declared is for the composition to say, which knows the nearest names."""
    return [f"{key}={written(value)}" for key, value in values_of(parameters).items()]


def written(value: Any) -> str:
    """As Hydra's grammar reads it back: a text in quotes, so that nothing in it is special."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, (int, float)):
        return repr(value)
    if isinstance(value, str):
        plain = _PLAIN_WORD.fullmatch(value) and value.lower() not in _SPECIAL
        return value if plain else _quoted(value)
    assert isinstance(value, Sequence)
    return f"[{','.join(written(item) for item in value)}]"


def _quoted(text: str) -> str:
    """In Hydra's grammar a backslash is special only before a quote."""
    slashes = re.sub(r"(\\+)(?='|$)", r"\1\1", text)
    return "'" + slashes.replace("'", "\\'") + "'"


def shown(value: Any) -> str:
    """For people: four digits are enough."""
    return f"{value:.4g}" if isinstance(value, float) else written(value)


def listed(values: Mapping[str, Any]) -> str:
    return " ".join(f"{key}={shown(value)}" for key, value in values.items())
