"""How nodes of a further job find the leader of a run and its key: by a file that is its owner's
alone, in the run folder. It is there from the first request for more nodes to the end of the run.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from typing import NamedTuple

from echelon.errors import EchelonError, ExitCode, Fault
from echelon.runs.run_folder import Run
from echelon.utils.files import read_json_object

_WAIT_S = 60.0
"""On a network file system another machine sees a new name late."""
_POLL_S = 0.5


class Invitation(NamedTuple):
    """What a node must know to join."""

    key: str
    master: str
    """HOST:PORT of the leader's store."""
    nodes: int
    """Of the start, spares among them."""


def write_invitation(run: Run, invitation: Invitation) -> None:
    """Invite nodes of further jobs. The file is a new one: nobody else may have made it."""
    remove_invitation(run)
    with contextlib.suppress(OSError):  # the disk may be full; then nobody comes
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
        with os.fdopen(os.open(run.invitation_file, flags, 0o600), "w", encoding="utf-8") as file:
            file.write(json.dumps(invitation._asdict()))


def remove_invitation(run: Run) -> None:
    with contextlib.suppress(OSError):
        run.invitation_file.unlink()


def wait_for_invitation(run: Run) -> Invitation:
    """Return the invitation of a run. Raises EchelonError where there is none."""
    deadline = time.monotonic() + _WAIT_S
    while time.monotonic() < deadline:
        with contextlib.suppress(TypeError):  # it is half written
            if found := read_json_object(run.invitation_file):
                return Invitation(**found)
        time.sleep(_POLL_S)
    raise EchelonError(
        Fault(
            f"run {run.name} takes no further nodes: it is over, or was not scaled",
            "`echelon jobs` shows its state",
        ),
        exit=ExitCode.NOT_FOUND,
    )
