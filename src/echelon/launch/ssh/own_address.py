"""The address by which the other hosts of launch=ssh reach this one."""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping

from echelon.launch import network_interface


def find_reached_address(nodes: int, env: Mapping[str, str]) -> str:
    """Return the address at which ssh reached this machine.

    If the launcher is on this very machine, it is the address by which others reach it.
    """
    if nodes == 1:
        return "127.0.0.1"
    reached = (env.get("SSH_CONNECTION", "").split() or ["", "", ""])[2].partition("%")[0]
    if not reached or ipaddress.ip_address(reached).is_loopback:
        reached = network_interface.find_default_route_address() or reached or "127.0.0.1"
    return f"[{reached}]" if ":" in reached else reached
