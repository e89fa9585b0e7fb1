"""The reason of an error of the operating system, worded to end a sentence."""

from __future__ import annotations

import errno
import socket

import pytest

from echelon.utils.os_errors import format_os_error_reason


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (OSError(errno.EACCES, "Permission denied", "/a/File"), "permission denied"),
        (OSError(errno.EREMOTEIO, "Remote I/O error"), "remote I/O error"),
        (OSError(errno.EIO, "RPC is bad"), "RPC is bad"),
        (socket.gaierror(-2, "Name or service not known"), "name or service not known"),
        (OSError("Too much of /Data"), "too much of /Data"),
        (TimeoutError(), "TimeoutError"),
        (ValueError("no such thing"), "no such thing"),
    ],
)
def test_the_reason_alone_in_lower_case(error: BaseException, reason: str) -> None:
    assert format_os_error_reason(error) == reason
