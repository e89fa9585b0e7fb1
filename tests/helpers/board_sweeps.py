"""Sweeps and their trials, without the trainings."""

from __future__ import annotations

from pathlib import Path

import pytest

from echelon.sweep.sweep_folder import SweepFolder, SweepSettings
from echelon.sweep.trial_store import TrialStore

_FILE = """\
method: random
metric: {name: loss, goal: minimize}
run_cap: 12
parameters:
  experiment: {value: toy}
  lr: {min: 0.001, max: 1.0}
  samples: {values: [64, 128]}
"""


def make_sweep(root: Path, name: str = "s") -> TrialStore:
    pytest.importorskip("optuna")
    metric = {"name": "loss", "goal": "minimize", "target": None}
    sweep = SweepFolder(root / name)
    sweep.write_files(SweepSettings([], [], metric, 12), _FILE)
    return TrialStore(sweep, "worker")


def run_trials(store: TrialStore, count: int) -> None:
    for _ in range(count):
        leased = store.take_trial()
        assert not isinstance(leased, bool)
        value = abs(leased.parameters["lr"] - 0.3)
        store.report_history(leased, [value + 1, value])
        store.end_trial(leased, "finished")
