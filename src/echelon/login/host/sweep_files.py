"""What is read of the folder of a sweep, beside which its trials are runs of their own."""

from __future__ import annotations

import contextlib
from collections.abc import Container
from pathlib import Path
from typing import Any

from echelon.sweep.sweep_folder import SweepFolder


def is_sweep(folder: Path) -> bool:
    """Return whether a folder among the runs is that of a sweep."""
    return SweepFolder(folder).settings_file.exists()


def read_trial_configs(folder: Path, known: Container[str]) -> dict[str, dict[str, Any]]:
    """Return the trials of a sweep that are not known yet, by their names: the configurations as
    they were composed here."""
    runs = [run for run in SweepFolder(folder).find_trial_runs() if run.name not in known]
    found: dict[str, dict[str, Any]] = {}
    for run in runs:
        with contextlib.suppress(OSError, ValueError, RecursionError):  # it is being written
            found[run.name] = run.read_config_json()
    return found
