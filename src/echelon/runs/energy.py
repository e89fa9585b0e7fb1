"""The energy of a run's GPUs, from what the machines of its starts have written down."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from echelon.runs.metrics_file import is_number
from echelon.runs.run_folder import Run
from echelon.utils.files import read_json_object


class EnergyRecord(NamedTuple):
    """What the GPUs of one machine have used in one start."""

    started: float
    updated: float
    """When the counters were read last."""
    joules: float


def read_energy(run: Run) -> Iterator[EnergyRecord]:
    """Yield what was measured; damaged files are left out."""
    for file in sorted(run.energy_folder.glob("*.json")):
        data = read_json_object(file) or {}
        started, updated, joules = (data.get(key) for key in ("started", "updated", "joules"))
        if not is_number(started) or not is_number(updated) or not isinstance(joules, dict):
            continue
        counted = [value for value in joules.values() if is_number(value) and value >= 0]
        if updated >= started:
            yield EnergyRecord(float(started), float(updated), float(sum(counted)))
