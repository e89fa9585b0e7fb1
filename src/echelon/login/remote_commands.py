"""Commands that are carried out on the login node, for runs that are copies here."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

from echelon.errors import ExitCode
from echelon.login.connection import LoginTarget, open_connection
from echelon.login.local_copy import LocalCopy
from echelon.login.refresh import refresh_copies
from echelon.runs.run_folder import Run


def split_by_place(runs: Sequence[Run]) -> tuple[list[Run], list[Run]]:
    """Return the runs of this machine, and those that are copies of runs on a cluster."""
    here = [run for run in runs if not run.origin_file.exists()]
    return here, [run for run in runs if run.origin_file.exists()]


def run_there(runs: Sequence[Run], make_words: Callable[[list[str]], list[str]]) -> int:
    """Run a command of Echelon's on the login nodes of these runs, one ssh call for each node, and
    return the worst exit code.

    `make_words` gets the folders of the runs there, and returns the command. What it prints is
    printed here, and the copies are brought up to date.
    """
    worst: int = ExitCode.OK
    groups: dict[LoginTarget, list[LocalCopy]] = {}
    for run in runs:
        copy = LocalCopy(run)
        groups.setdefault(LoginTarget.from_origin(copy.origin), []).append(copy)
    for target, copies in groups.items():
        with open_connection(target) as connection:
            words = make_words([copy.origin.folder for copy in copies])
            connection.step = f"echelon {words[0]}"
            answer = connection.ask({"do": "command", "words": words})
            sys.stdout.write(str(answer["out"]))
            sys.stderr.write(str(answer["err"]))
            worst = max(worst, int(answer["code"]))
            refresh_copies(connection, copies, with_logs=False)
    return worst
