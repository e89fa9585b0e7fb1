"""The reason of an operating system error, worded to end a sentence."""

from __future__ import annotations


def format_os_error_reason(error: BaseException) -> str:
    """Return the reason alone: ``permission denied``, without the number and the path.

    Callers name the path themselves: ``f"{path} cannot be read: {format_os_error_reason(error)}"``.
    Exceptions without a ``strerror`` (a decoding error, a timeout of a library) are described by
    their own text, or by their class if they have none. The result begins in lower case unless
    its first word is an abbreviation such as RPC.
    """
    # Some libraries have another exception where the text belongs.
    reason = str(getattr(error, "strerror", None) or error)
    if not reason:
        return type(error).__name__
    return reason if reason[1:2].isupper() else reason[:1].lower() + reason[1:]
