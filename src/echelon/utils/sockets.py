"""The TCP connections of this process, found by the kernel's names: torch gives no access to the
sockets of its store and its process groups."""

from __future__ import annotations

import contextlib
import os
import socket


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
