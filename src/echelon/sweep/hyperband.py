"""wandb's `early_terminate`: hyperband, decided trial by trial as they report, as in ASHA."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from echelon.errors import Fault, suggest_nearest
from echelon.sweep.located_yaml import LocatedYaml
from echelon.sweep.search_space import INTEGER_HINT, is_finite_number

_KEY_TYPES = {
    "type": str,
    "min_iter": int,
    "max_iter": int,
    "s": int,
    "eta": float,
    "strict": bool,
}
_MAX_BAND = 1e9
"""No training has as many evaluations."""


@dataclass(frozen=True)
class Hyperband:
    """The bands, counted in evaluations, at which only the best 1/eta of all trials continue."""

    bands: tuple[int, ...]
    eta: float = 3.0
    strict: bool = False
    """Stop trials from the first one on; else from the eta-th that reached a band."""


def find_band(hyperband: Hyperband, evaluations: int) -> int:
    """Return the highest band that a trial has reached; 0 before the first."""
    return max((band for band in hyperband.bands if band <= evaluations), default=0)


def should_stop(hyperband: Hyperband, own_value: float, other_values: Sequence[float]) -> bool:
    """Return whether a trial stops, given the values of all that were ever at its band.

    Less is better. A trial continues while it is one of the best 1/eta. This is asked after every
    evaluation, so a trial may be stopped long after a band, when better ones have come: no trial
    ever waits for others.
    """
    values = sorted([own_value, *other_values])
    if len(values) < hyperband.eta and not hyperband.strict:
        return False
    survivors = max(1, int(len(values) / hyperband.eta))
    return own_value > values[survivors - 1]


def parse_early_terminate(file: LocatedYaml, entry: Any, faults: list[Fault]) -> Hyperband | None:
    """Return what the file says under `early_terminate`; what is wrong is added to `faults`."""
    if entry is None:
        return None
    location = file.locate("early_terminate")
    if not isinstance(entry, dict) or entry.get("type") != "hyperband":
        kind = entry.get("type") if isinstance(entry, dict) else entry
        faults.append(
            Fault(f"{location}: early_terminate of type {kind!r}", "write  type: hyperband")
        )
        return None
    wrong = [fault for key, value in entry.items() if (fault := _check_key(file, key, value))]
    faults.extend(wrong)
    if wrong:
        return None
    bands = _compute_bands(entry)
    if not bands:
        faults.append(
            Fault(
                f"{location}: these settings of hyperband leave no band",
                "give min_iter, or max_iter with s, so that max_iter / eta is 1 or more",
            )
        )
        return None
    return Hyperband(bands, float(entry.get("eta", 3)), bool(entry.get("strict", False)))


def _check_key(file: LocatedYaml, key: str, value: Any) -> Fault | None:
    location = file.locate("early_terminate", key)
    if key not in _KEY_TYPES:
        return Fault(f"{location}: hyperband has no {key!r}", suggest_nearest(key, _KEY_TYPES))
    if _KEY_TYPES[key] is int and (type(value) is not int or value < 1):
        return Fault(f"{location}: {key} is {value!r}", INTEGER_HINT)
    if key == "eta" and (not is_finite_number(value) or value <= 1):
        return Fault(f"{location}: eta is {value!r}", "give a number above 1")
    if key == "strict" and not isinstance(value, bool):
        return Fault(f"{location}: strict is {value!r}", "write true or false")
    return None


def _compute_bands(entry: Mapping[str, Any]) -> tuple[int, ...]:
    """With min_iter: min_iter, min_iter·eta, min_iter·eta² … With max_iter and s: max_iter/eta …
    max_iter/eta^s."""
    eta = float(entry.get("eta", 3))
    if "max_iter" in entry:
        below = (int(entry["max_iter"] / eta**i) for i in range(1, int(entry.get("s", 0)) + 1))
        return tuple(sorted({band for band in below if band >= 1}))
    if "min_iter" not in entry:
        return ()
    bands, band = set[int](), float(entry["min_iter"])
    while band < _MAX_BAND:
        bands.add(int(band))
        band *= eta
    return tuple(sorted(bands))
