"""From parameters, chosen here or by a server, to overrides of declared settings."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from echelon.errors import EchelonError, Fault
from echelon.sweep.space import PLAIN, not_plain

_KEY = re.compile(r"[A-Za-z_][A-Za-z0-9_-]*(\.[A-Za-z_][A-Za-z0-9_-]*)*")
_OURS = ("launch", "run", "track", "rank", "world_size", "master", "mode", "program")
"""Where and how a run happens is for the command line to say: some of these are commands."""
_PATHS = ("trainer.resume", "experiment.entry", "entry")
_PLAIN_WORD = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_SPECIAL = ("null", "true", "false", "nan", "inf")
_MANY = 200


def words(parameters: Mapping[str, Any]) -> list[str]:
    """Overrides KEY=VALUE, or one EchelonError that refuses what is no plain data. That the keys
    are declared is for the composition to say, which knows the nearest names."""
    faults = [fault for key, value in parameters.items() if (fault := _fault(key, value))]
    if len(parameters) > _MANY:
        faults.append(Fault(f"{len(parameters)} parameters are too many", f"give at most {_MANY}"))
    if faults:
        raise EchelonError(*faults)
    return [f"{key}={written(value)}" for key, value in parameters.items()]


def _fault(key: str, value: Any) -> Fault | None:
    shown = key if len(key) <= 60 else key[:57] + "…"
    if not _KEY.fullmatch(key):
        return Fault(f"{shown!r} is no name of a setting", "use dotted names such as trainer.clip")
    if any(part.startswith("_") and part.endswith("_") for part in key.split(".")):
        return Fault(f"the parameter {shown} would name code, not a setting", PLAIN)
    if key.partition(".")[0] in _OURS or key in _PATHS:
        return Fault(
            f"the parameter {shown} is not for a sweep to choose",
            f"give it on the command line: {shown}=VALUE",
        )
    if key == "experiment" and not (isinstance(value, str) and _PLAIN_WORD.fullmatch(value)):
        return Fault(
            "the parameter experiment would name code",
            "give the experiment on the command line: experiment=FILE.py:FUNCTION",
        )
    if why := not_plain(value):
        return Fault(f"the parameter {shown}: {why}", PLAIN)
    return None


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
