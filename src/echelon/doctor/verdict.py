"""The result of a check: its state, what was found, and what to do about it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

OK, WARN, FAIL, NONE = "ok", "warn", "fail", "none"
_STATES_BY_SEVERITY = (NONE, OK, WARN, FAIL)


class Verdict(NamedTuple):
    """The result of one check, of a machine or of a node. The fields are keys of ``--json``."""

    check: str
    """The name of the check, for example ``driver``."""
    state: str
    """``ok``; ``warn``: a training runs, but not as well as it could; ``fail``: it does not run;
    ``none``: there is nothing to check here."""
    found: str
    do: str = ""
    """What to do about it, as a command to type where there is one."""


def find_worst_state(verdicts: Iterable[Verdict]) -> str:
    """Return the most severe state of the verdicts; ``ok`` if there are none."""
    return max((v.state for v in verdicts), key=_STATES_BY_SEVERITY.index, default=OK)
