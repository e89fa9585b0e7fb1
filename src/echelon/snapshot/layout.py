"""What snapshots are called and where they are: the only code that knows ``step-*``.

A run keeps its snapshots in one folder, ``ROOT/step-000000123/`` each, and beside them a relative
symlink ``best`` to one of them. This module reads names alone and imports no torch, so launchers
and views of runs can list snapshots without loading it. Whether a folder really is a snapshot is
decided by `reader.verify_snapshot`.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

MANIFEST_FILE = "manifest.json"
"""Written last: a folder without one is not a snapshot."""
STATE_FILE = "state.json"
STATE_PART = "state"
"""The part with what belongs to a run beside model and optimizer, by name."""
EMA_NAME = "trainer.ema"
"""The name there of the average of the weights."""
EVALUATION_FILE = "evaluation.json"
"""What an evaluation of the snapshot found, where it was made after the snapshot was saved."""
BEST_LINK = "best"
"""A relative symlink to the best of the snapshots beside it, so that it can be opened as a
folder and stays right when the run is moved."""
EXAMPLE_FOLDER = "runs/NAME/snapshots/step-000000100"
"""For messages that ask for a snapshot."""

_STEP_FOLDER = re.compile(r"step-([0-9]{9,18})")


def format_folder_name(step: int) -> str:
    """Return the one name that the snapshot of a step has: ``step-000000123``."""
    return f"step-{step:09d}"


def parse_step(name: str) -> int | None:
    """Return the step in a folder's name, or None if it is not the one name its step would have."""
    match = _STEP_FOLDER.fullmatch(name)
    step = int(match[1]) if match else None
    return step if step is not None and format_folder_name(step) == name else None


def list_snapshots(root: Path, *, ignore_errors: bool = False) -> list[Path]:
    """Return the step folders in ``root``, oldest first. Nothing is verified, so this is cheap.

    A missing ``root`` has none. A ``root`` that cannot be listed raises OSError, because a run that
    starts over in silence because of a permission would be the worst answer; ``ignore_errors`` is
    for callers that only display.
    """
    try:
        names = os.listdir(root)
    except FileNotFoundError:
        return []
    except OSError:
        if ignore_errors:
            return []
        raise
    steps = {name: parse_step(name) for name in names}
    ordered = sorted((step, name) for name, step in steps.items() if step is not None)
    return [root / name for _, name in ordered]


def find_newest_step(root: Path) -> int:
    """Return the step of the newest folder in ``root``, unverified; 0 if there is none."""
    folders = list_snapshots(root, ignore_errors=True)
    return (parse_step(folders[-1].name) or 0) if folders else 0


def find_best(root: Path) -> Path | None:
    """Return the folder that ``ROOT/best`` leads to, unverified; None without one."""
    try:
        name = os.readlink(root / BEST_LINK)
    except OSError:
        return None
    return root / name if parse_step(name) is not None and (root / name).is_dir() else None


def resolve_best(path: Path) -> Path:
    """Return the folder that ``best`` leads to if ``path`` is such a link, otherwise ``path``: a
    snapshot is verified under the name of its step."""
    return (find_best(path.parent) if path.name == BEST_LINK else None) or path


def find_snapshot_path_problem(path: Path) -> str | None:
    """Return why ``path`` cannot be a snapshot, or None if it can be one, by names alone."""
    if (path / MANIFEST_FILE).is_file():
        return None
    return f"it has no {MANIFEST_FILE}" if path.is_dir() else "there is no such folder"
