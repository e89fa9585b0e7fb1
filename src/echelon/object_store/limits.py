"""How long a request may take, and how often it is tried."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from echelon.errors import EchelonError, Fault

CONNECT_TIMEOUT_S = 5.0
DEFAULT_TIMEOUT_S = 30.0
DEFAULT_RETRIES = 5
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.1, 5.0
TIMEOUT_VARIABLE = "ECHELON_STORE_TIMEOUT_S"
RETRIES_VARIABLE = "ECHELON_STORE_RETRIES"
UPLOAD_PART_BYTES = 8 << 20
CONCURRENT_REQUESTS = 16
"""Of one store process, so that a delay of 20 ms does not limit it."""


class StoreLimits(NamedTuple):
    """The limits of one request."""

    timeout_s: float = DEFAULT_TIMEOUT_S
    """Until the answer has come whole. A slow answer is asked for again, as often as `retries`."""
    retries: int = DEFAULT_RETRIES
    """After a timeout, a lost connection, or an answer of 429 or from 500 on."""

    @property
    def total_s(self) -> float:
        """No retry begins later than that after the first try."""
        return self.timeout_s * (self.retries + 1)


def read_limits(environ: Mapping[str, str]) -> StoreLimits:
    """Return the limits that the environment sets. Raises EchelonError."""
    faults = []
    timeout_s, retries = DEFAULT_TIMEOUT_S, DEFAULT_RETRIES
    if text := environ.get(TIMEOUT_VARIABLE, ""):
        try:
            timeout_s = float(text)
            if not 0 < timeout_s < 86400:
                raise ValueError
        except ValueError:
            faults.append(Fault(f"{TIMEOUT_VARIABLE}={text}", "give seconds, such as 30"))
    if text := environ.get(RETRIES_VARIABLE, ""):
        if text.isdecimal():
            retries = int(text)
        else:
            faults.append(Fault(f"{RETRIES_VARIABLE}={text}", "give a whole number, such as 5"))
    if faults:
        raise EchelonError(*faults)
    return StoreLimits(timeout_s, retries)
