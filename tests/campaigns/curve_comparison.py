"""Compares the curve of a disturbed run with that of one in peace."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from echelon.runs.metrics_file import read_metrics

_TOLERANCE = 1e-4


def compare_curves(clean: Path, disturbed: Path, code: int) -> dict[str, Any]:
    """Return how many numbers of a run differ, or stand there twice or not at all, and the first
    of them.

    Both are folders with a run `r` and its output, and `code` is how the disturbed one ended.
    """
    wanted, found = _read_numbers(clean), _read_numbers(disturbed)
    differences = [
        f"{key}: {found.get(key)} beside {wanted.get(key)}"
        for key in sorted(wanted.keys() | found.keys())
        if not _is_close(wanted.get(key), found.get(key))
    ]
    if code:
        differences.insert(0, (disturbed / "output").read_text()[-6000:])
    return {"exit": code, "lines": len(wanted), "bad": len(differences), "first": differences[:5]}


def _read_numbers(folder: Path) -> dict[str, float]:
    """Return every number of the metrics by its step and name; one that stands twice is bad."""
    numbers: dict[str, float] = {}
    for line in read_metrics(folder / "runs" / "r" / "metrics.jsonl"):
        for name in ("loss", "eval_loss"):
            if name in line:
                key = f"{name} at {line['step']:06d}"
                numbers[key] = float("nan") if key in numbers else line[name]
    return numbers


def _is_close(a: float | None, b: float | None) -> bool:
    return a is not None and b is not None and abs(a - b) <= _TOLERANCE * max(1e-3, abs(a))
