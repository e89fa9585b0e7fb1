"""The network interface that leads to the first node, for NCCL and gloo.

Both guess badly on machines with several interfaces, and then hang.
"""

from __future__ import annotations

import socket
from collections.abc import Mapping

_UNUSED_ADDRESS = "192.0.2.1"
"""An address of nobody (RFC 5737), for the default route."""
INTERFACE_VARIABLES = ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME")


def find_interface_to(host: str) -> str | None:
    """Return the interface that has this machine's address on the route to a host.

    On that host itself it is the interface with the address that the others know. None if there is
    no route.
    """
    import psutil  # not at the top: a login node may have none, and needs none

    address = find_address_towards(host)
    if address is None:
        return None
    for name, addresses in psutil.net_if_addrs().items():
        if any(str(found.address).partition("%")[0] == address for found in addresses):
            return str(name)
    return None


def find_address_towards(host: str) -> str | None:
    """Return this machine's address on the route to a host, which the other machines on that route
    know; None if there is no route."""
    address = find_local_address(host)
    if address is not None and address.startswith("127.") and not _is_loopback_host(host):
        return find_local_address(_UNUSED_ADDRESS)  # Debian gives a machine's own name 127.0.1.1
    return address


def plan_interface_variables(chosen: str | None, env: Mapping[str, str]) -> dict[str, str]:
    """Return the variables as a plan can show them before any node was asked."""
    text = chosen or "(that of each node's route to the first)"
    return {name: chosen or env.get(name, text) for name in INTERFACE_VARIABLES}


def find_default_route_address() -> str | None:
    """This machine's address on its default route; None without one."""
    return find_local_address(_UNUSED_ADDRESS)


def find_local_address(host: str) -> str | None:
    """This machine's address on the route to a host; None without one. Nothing is sent."""
    try:
        family, _, _, _, socket_address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(socket_address)  # asks the routing table; nothing is sent
            return str(probe.getsockname()[0])
    except OSError:
        return None


def _is_loopback_host(host: str) -> bool:
    """Return whether a host name means the machine one is on."""
    return host in ("localhost", "127.0.0.1")
