"""What a check says: how it stands, what was found, and what mends it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

OK, WARN, FAIL, NONE = "ok", "warn", "fail", "none"
_STATES_BY_SEVERITY = (NONE, OK, WARN, FAIL)


class Verdict(NamedTuple):
    check: str
    state: str
    """`ok`; `warn`: a training runs, but not as it could; `fail`: it does not run; `none`: nothing
    to check here."""
    found: str
    do: str = ""
    """A command to type where there is one."""


def find_worst_state(verdicts: Iterable[Verdict]) -> str:
    return max((v.state for v in verdicts), key=_STATES_BY_SEVERITY.index, default=OK)
