"""`latest`: the run that trained last, as a link in the folder of all runs.

A run has the name from its first step on, a program from its start. So what failed before that
takes it from nobody.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

from echelon.runs.run_folder import Run
from echelon.utils.files import replace_file

LATEST = "latest"


def point_latest_to(run: Run) -> None:
    """Give the name `latest` to this run; a file system without links does without it."""
    with contextlib.suppress(OSError), replace_file(run.folder.with_name(LATEST)) as temporary:
        temporary.symlink_to(run.name)


def record_first_step(run: Run) -> None:
    """Write down that the run has trained, and give it the name `latest`."""
    run.update_status(trained=True)
    point_latest_to(run)


def read_latest_link(root: Path) -> Run | None:
    """Return the run that the link names; None without a link or such a run."""
    link = root.absolute() / LATEST
    return Run(link.resolve()) if link.exists() else None
