"""What a store answers when it does not do what was asked, as a sentence.

obstore's own texts are long, hold what the server has sent and may change. They are read for the
few facts that matter, and never shown.
"""

from __future__ import annotations

import re
from enum import Enum

from echelon.errors import EchelonError, Fault
from echelon.object_store.limits import RETRIES_VARIABLE, TIMEOUT_VARIABLE, StoreLimits


class StoreProblem(Enum):
    """What went wrong, for callers that go on in one of the cases."""

    NOT_FOUND = "not found"
    NO_BUCKET = "no bucket"
    DENIED = "denied"
    NO_CREDENTIALS = "no credentials"
    CHANGED = "changed"
    """The object is another one than that which was asked for."""
    UNAVAILABLE = "unavailable"
    """The server cannot be reached, answers too slowly, or with an error of its own."""
    LOCAL_DISK = "local disk"
    """The file on this machine that was to be read or written."""
    UNSUPPORTED = "unsupported"
    OTHER = "other"


class ObjectStoreError(EchelonError):
    """A store that did not do what was asked."""

    def __init__(self, problem: StoreProblem, what: str, do: str) -> None:
        super().__init__(Fault(what, do))
        self.problem = problem

    def __reduce__(self) -> tuple[type[ObjectStoreError], tuple[StoreProblem, str, str]]:
        return ObjectStoreError, (self.problem, *self.faults[0])


_STATUS = re.compile(r"status code: (\d{3})")


def explain_store_error(
    error: BaseException, url: str, action: str, limits: StoreLimits
) -> ObjectStoreError:
    """Return an error of obstore as a sentence. `action` is what was being done: `read`."""
    kind, text = type(error).__name__, str(error)
    found = _STATUS.search(text)
    status = int(found[1]) if found else 0
    what = f"{url} cannot be {action}: "
    if "NoSuchBucket" in text:
        return ObjectStoreError(
            StoreProblem.NO_BUCKET, f"{what}there is no such bucket", "check its name"
        )
    if isinstance(error, FileNotFoundError) or kind == "NotFoundError" or status == 404:
        return ObjectStoreError(
            StoreProblem.NOT_FOUND, f"{what}there is no such object", "check the address"
        )
    if kind == "PreconditionError" or status == 412:
        return ObjectStoreError(
            StoreProblem.CHANGED,
            f"{url} changed since it was opened",
            "let its writer finish, and start again",
        )
    if kind in ("PermissionDeniedError", "UnauthenticatedError") or status in (400, 401, 403):
        code = status or (401 if kind == "UnauthenticatedError" else 403)
        return ObjectStoreError(
            StoreProblem.DENIED,
            f"{what}the store answered {code}, access denied",
            "check which credentials the environment gives (AWS_PROFILE, AWS_ACCESS_KEY_ID, "
            "GOOGLE_APPLICATION_CREDENTIALS), that they are of this store and its region, and what "
            "they may do",
        )
    tries = f"{limits.retries + 1} tries" if limits.retries else "one try"
    wait = f"wait and start again, or allow more: {TIMEOUT_VARIABLE}, {RETRIES_VARIABLE}"
    if status >= 429:
        return ObjectStoreError(
            StoreProblem.UNAVAILABLE, f"{what}the store answered {status} after {tries}", wait
        )
    if kind == "NotSupportedError" or "RangeNotSupported" in text or "non-partial" in text:
        return ObjectStoreError(
            StoreProblem.UNSUPPORTED,
            f"{what}the server does not answer requests for parts of a file",
            "give another address, or download it and open the file",
        )
    if "kind: Connect" in text or "dns error" in text:
        return ObjectStoreError(
            StoreProblem.UNAVAILABLE,
            f"{what}the server cannot be reached",
            "check the network, and AWS_ENDPOINT_URL if it is set",
        )
    if any(word in text for word in ("kind: Timeout", "TimedOut", "timed out")):
        limit = f"{limits.timeout_s:g} s"
        return ObjectStoreError(
            StoreProblem.UNAVAILABLE, f"{what}no whole answer within {limit}, in {tries}", wait
        )
    if "HTTP error" in text or "HttpError" in text:
        return ObjectStoreError(
            StoreProblem.UNAVAILABLE, f"{what}the connection was lost, in {tries}", wait
        )
    detail = f"status {status}" if status else kind
    return ObjectStoreError(
        StoreProblem.OTHER,
        f"{what}the store did not do it ({detail})",
        "check the address and the store's settings in the environment",
    )
