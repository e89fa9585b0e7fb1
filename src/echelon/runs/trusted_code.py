"""Refusals of run folders that somebody else made, where code would be run from them.

To list, show and plot runs, nobody is refused: only what decides which code runs is checked.
"""

from __future__ import annotations

import os
from pathlib import Path

from echelon.errors import EchelonError, Fault
from echelon.utils.trust import (
    TrustProblem,
    find_owner_trust_problem,
    find_tree_trust_problem,
    find_trust_problem,
)

_REMEDY = "choose another name, or another place with run.dir=PATH"


def require_trusted_folder(folder: Path) -> None:
    """Raise EchelonError if a folder into which code is to be written belongs to somebody else.

    A group may be allowed to write it, as where all members of a lab share their runs: the files
    in it that decide about code are checked one by one.
    """
    _raise_if_found(find_owner_trust_problem(folder))


def require_trusted_file(path: Path, status: os.stat_result | None = None) -> None:
    """Raise EchelonError if somebody else can have written a file that names code.

    ``status`` is that of the opened file, so that what was checked is what is read.
    """
    _raise_if_found(find_trust_problem(path, status))


def require_trusted_code(folder: Path) -> None:
    """Raise EchelonError if somebody else can have written any part of a copy of code."""
    _raise_if_found(find_tree_trust_problem(folder))


def _raise_if_found(problem: TrustProblem | None) -> None:
    if problem:
        raise EchelonError(Fault(problem.what, f"{_REMEDY}, or {problem.do}"))
