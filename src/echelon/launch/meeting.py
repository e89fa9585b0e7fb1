"""Where the agents of a world meet: a store on node 0 and a fixed list of nodes around it.

torch's dynamic rendezvous elects ranks, guesses which host the address means, and unpickles what
any client writes. Here every node knows its number, so all that is left is to wait for each other
before each attempt.
"""

from __future__ import annotations

import errno
import json
import socket
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousStoreInfo,
)

from echelon.config.schema import Launch, differences
from echelon.errors import EchelonError, Exit, Fault
from echelon.launch.plan import Node
from echelon.utils.os_errors import describe_os_error

_OPERATION_S = 60.0
_POLL_S = 0.02


class Meeting(RendezvousHandler):
    """All nodes, before each attempt."""

    def __init__(self, store: dist.TCPStore, run_id: str, node: Node, launch: Launch) -> None:
        self._store = store
        self._run_id = run_id
        self._node = node
        self._timeout_s = launch.join_timeout_s
        self._attempt = -1
        self.give_up: Callable[[int], None] = lambda attempt: None
        """Called while waiting; raises when there is no use."""

    def next_rendezvous(self) -> RendezvousInfo:
        self._attempt += 1
        node = self._node
        gathering = dist.PrefixStore(f"nodes/{self._attempt}", self._store)
        if gathering.add(str(node.rank), 1) > 1:
            raise EchelonError(
                Fault(
                    f"node {node.rank} is here twice: two machines have this number",
                    f"give the nodes the numbers 0 to {node.count - 1} (NODE_RANK)",
                ),
                exit=Exit.RENDEZVOUS,
            )
        if gathering.add("count", 1) == node.count:
            gathering.set("complete", "1")
        self._wait(gathering)
        agents = dist.PrefixStore(f"agents/{self._attempt}", self._store)
        where = RendezvousStoreInfo(self._store.host, self._store.port)
        return RendezvousInfo(agents, node.rank, node.count, where)

    def _wait(self, gathering: dist.Store) -> None:
        deadline = time.monotonic() + self._timeout_s
        while not gathering.check(["complete"]):
            self.give_up(self._attempt)
            if time.monotonic() > deadline:
                all_nodes = range(self._node.count)
                missing = [str(n) for n in all_nodes if not gathering.check([str(n)])]
                raise EchelonError(
                    Fault(
                        f"after {self._timeout_s:g} s only {self._node.count - len(missing)} of "
                        f"{self._node.count} nodes are here; missing: node {', '.join(missing)}",
                        "start the missing nodes, or wait longer with "
                        "launch.join_timeout_s=SECONDS",
                    ),
                    exit=Exit.RENDEZVOUS,
                )
            time.sleep(_POLL_S)

    def ask(self, key: str) -> str:
        """What node 0 tells; it is waited for, but not when it has failed meanwhile."""
        deadline = time.monotonic() + _OPERATION_S
        while not self._store.check([key]) and time.monotonic() < deadline:
            self.give_up(0)
            time.sleep(_POLL_S)
        return str(self._store.get(key).decode())

    def get_backend(self) -> str:
        return "echelon"

    @property
    def use_agent_store(self) -> bool:
        return True

    def num_nodes_waiting(self) -> int:
        return 0  # who starts again has told the others why, through the lifeline

    def get_run_id(self) -> str:
        return self._run_id

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        pass

    def shutdown(self) -> bool:
        return True


# --- the store ---


def open_store(node: Node, timeout_s: float) -> dist.TCPStore:
    """Node 0 hosts it, the others find it there."""
    return host_store(node) if node.rank == 0 else _find_store(node, timeout_s)


def host_store(node: Node) -> dist.TCPStore:
    """On node 0's own address, reachable through that interface alone."""
    listener = _bound(node)
    return dist.TCPStore(
        node.host,
        listener.getsockname()[1],
        is_master=True,
        wait_for_workers=False,
        timeout=timedelta(seconds=_OPERATION_S),
        master_listen_fd=listener.detach(),
    )


def listening_address(node: Node) -> str:
    """Node 0's own; all of them where its name leads back to itself alone, as Debian gives
    127.0.1.1, or is that of a service or a router that leads here."""
    try:
        family, _, _, _, where = socket.getaddrinfo(node.host, 0, type=socket.SOCK_STREAM)[0]
    except OSError:
        return node.host  # binding will say what is wrong
    address = str(where[0])
    reached = node.count == 1 or node.host in ("localhost", address)
    if address.startswith("127.") and not reached:
        return "0.0.0.0"
    with socket.socket(family) as probe:
        try:
            probe.bind(where)
        except OSError as error:
            if error.errno == errno.EADDRNOTAVAIL:
                return "::" if family == socket.AF_INET6 else "0.0.0.0"
    return address


def _bound(node: Node) -> socket.socket:
    try:
        family, _, _, _, address = socket.getaddrinfo(
            listening_address(node), node.port, type=socket.SOCK_STREAM
        )[0]
        listener = socket.socket(family)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(max(128, node.count * node.procs))
    except OSError as error:
        raise EchelonError(
            Fault(
                f"node 0 cannot listen at {node.host}:{node.port}: {describe_os_error(error)}",
                "give an address of node 0 and a free port: master=HOST:PORT, or MASTER_ADDR and "
                "MASTER_PORT",
            ),
            exit=Exit.RENDEZVOUS,
        ) from None
    return listener


def _find_store(node: Node, timeout_s: float) -> dist.TCPStore:
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            socket.create_connection((node.host, node.port), timeout=5).close()
            break
        except OSError as error:
            if time.monotonic() > deadline:
                raise EchelonError(
                    Fault(
                        f"node {node.rank} found no node 0 at {node.host}:{node.port} within "
                        f"{timeout_s:g} s ({describe_os_error(error)})",
                        "start node 0 there, open the port, or wait longer with "
                        "launch.join_timeout_s=SECONDS",
                    ),
                    exit=Exit.RENDEZVOUS,
                ) from None
        time.sleep(_POLL_S)
    limit = timedelta(seconds=_OPERATION_S)
    return dist.TCPStore(node.host, node.port, None, False, limit, False)


# --- what the nodes must agree on ---


def compare(
    store: dist.Store, node: Node, mine: Mapping[str, Any], ask: Callable[[str], str]
) -> None:
    """Every node says what it is; one that differs from node 0 says in what, and all stop."""
    card = {"torch": torch.__version__, "host": socket.gethostname(), "procs": node.procs, **mine}
    store.set(f"card/{node.rank}", json.dumps(card))
    if node.rank == 0:
        return
    first = json.loads(ask("card/0"))
    faults = [
        Fault(
            f"{what} {card[key]} on {card['host']} (node {node.rank}), but {first[key]} on "
            f"{first['host']} (node 0)",
            do,
        )
        for key, what, do in (
            ("torch", "torch is", "install the same version on every node"),
            ("devices", "visible devices:", "set launch.procs to what every node has"),
        )
        if card.get(key) != first.get(key)
    ]
    here, there = f"on {card['host']} (node {node.rank})", f"on {first['host']} (node 0)"
    faults += [
        Fault(f"{key}={ours} {here}, but {theirs} {there}", "type the same on every node")
        for key, (ours, theirs) in differences(card["settings"], first["settings"]).items()
    ]
    if faults:
        raise EchelonError(*faults, exit=Exit.RENDEZVOUS)
