"""What lists do first: runs on clusters are brought up to date, and nothing where there are none.

Every `echelon jobs` comes by here, so what is not needed is not imported.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Sequence
from pathlib import Path

from echelon.errors import EchelonError
from echelon.runs.find import find_runs
from echelon.runs.origin import NOTES_FOLDER, list_changing_copies
from echelon.runs.run_folder import Run


def refresh_listed(root: Path) -> None:
    """Bring all runs of a folder up to date that may have changed, also those whose submission was
    cut short."""
    if (root / NOTES_FOLDER).is_dir():
        from echelon.login.submission import adopt_interrupted

        with contextlib.suppress(EchelonError):  # that it does not answer is said of its runs
            adopt_interrupted(root)
    _refresh(list_changing_copies(root), with_logs=False)


def refresh_named(names: Sequence[str], root: str, with_logs: bool = False) -> None:
    """Bring the runs up to date that are named; what no run is named is found out by others."""
    runs: list[Run] = []
    for name in names:
        with contextlib.suppress(EchelonError):
            runs += find_runs(name, root)
    _refresh([run for run in runs if run.origin_file.exists()], with_logs)


def refresh_sweep(folder: Path) -> None:
    """Bring a sweep and its trials up to date, if it is on a cluster."""
    if Run(folder).origin_file.exists():
        from echelon.login.refresh import refresh_runs

        trials = re.compile(re.escape(folder.name) + r"-\d+")
        changing = list_changing_copies(folder.parent)
        refresh_runs([Run(folder), *(run for run in changing if trials.fullmatch(run.name))])


def _refresh(runs: Sequence[Run], with_logs: bool) -> None:
    if runs:
        from echelon.login.refresh import refresh_runs

        refresh_runs(runs, with_logs)
