"""Files of somebody else, and this process as somebody else. Only root can have either."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

NOBODY = 65534
STRANGER = 64_123
"""A user without a name."""
STRANGE_GROUP = 64_124
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="files of other users are root's to make")


def give_away(path: Path, user: int = STRANGER) -> None:
    """Let a file, or a folder and everything in it, belong to another user."""
    for each in (path, *path.rglob("*")) if path.is_dir() and not path.is_symlink() else (path,):
        os.lchown(each, user, user)


@contextlib.contextmanager
def act_as(user: int) -> Iterator[None]:
    """Be another user in this process. Import before what is used: Python itself may lie where
    others cannot read it."""
    me = os.geteuid()
    os.seteuid(user)
    try:
        yield
    finally:
        os.seteuid(me)


@contextlib.contextmanager
def make_open_folder() -> Iterator[Path]:
    """A folder that everybody may enter, unlike those of pytest, and only we may write."""
    with tempfile.TemporaryDirectory(prefix="echelon-tests-") as folder:
        Path(folder).chmod(0o755)
        yield Path(folder)
