"""The TCP connections of this process, found by the kernel's names: torch gives no access to the
sockets of its store and its process groups."""

from __future__ import annotations

import contextlib
import ctypes
import os
import socket
import struct
from collections.abc import Iterable

_SO_ATTACH_FILTER = 26
"""Of Linux; Python has no name for it."""
_DROP_EVERYTHING = ctypes.create_string_buffer(struct.pack("=HBBI", 0x06, 0, 0, 0))
"""A filter of one instruction: return 0, so many bytes of a packet are kept."""


def list_sockets() -> dict[int, str]:
    """Return this process's sockets: descriptor → what the kernel calls the socket."""
    found = {}
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # closed meanwhile
            target = os.readlink(f"/proc/self/fd/{name}")
            if target.startswith("socket:") and int(name) > 2:
                found[int(name)] = target
    return found


def shut_socket(number: int, kept_port: int | None = None) -> None:
    """Shut a TCP connection, unless one of its ends has the kept port."""
    with contextlib.suppress(OSError), socket.socket(fileno=os.dup(number)) as connection:
        if connection.family not in (socket.AF_INET, socket.AF_INET6):
            return
        ends = (connection.getsockname(), connection.getpeername())
        if kept_port not in [end[1] for end in ends]:
            connection.shutdown(socket.SHUT_RDWR)


def shut_connections_to_port(port: int) -> None:
    """Shut this process's TCP connections to a port of any machine: who waits for an answer from
    there gets an error."""
    for number in list_sockets():
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(number)) as connection:
            is_tcp = connection.family in (socket.AF_INET, socket.AF_INET6)
            if is_tcp and connection.getpeername()[1] == port:
                connection.shutdown(socket.SHUT_RDWR)


def stop_accepting(numbers: Iterable[int]) -> None:
    """Have those of these sockets that listen take no more connections. They stay open: who owns
    them would take an error for a failure of its own. Connections that are open go on."""
    program = struct.pack("@HP", 1, ctypes.addressof(_DROP_EVERYTHING))
    for number in numbers:
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(number)) as listener:
            if listener.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                listener.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, program)
