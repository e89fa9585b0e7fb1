"""Where the agents of a world meet: a store on node 0 and a fixed list of nodes around it.

torch's dynamic rendezvous elects ranks, guesses which host the address means, and unpickles what
any client writes. Here every node knows its number, so all that is left is to wait for each other
before each attempt.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import json
import os
import socket
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousStoreInfo,
)

from echelon.config.schema import LaunchConfig, find_differences
from echelon.errors import EchelonError, ExitCode, Fault
from echelon.launch.plan import NodeSpec
from echelon.utils.os_errors import format_os_error_reason
from echelon.world.sealed_store import SealedStore

_OPERATION_TIMEOUT_S = 60.0
_POLL_INTERVAL_S = 0.02
_LOG_LEVEL_VARIABLE = "TORCH_CPP_LOG_LEVEL"
_LOG_ERRORS = 2
_KEYS_PER_CHECK = 64


class FixedRendezvous(RendezvousHandler):
    """torch's rendezvous for a list of nodes that is known beforehand: all of them meet before each
    attempt."""

    def __init__(
        self, store: SealedStore, run_id: str, node: NodeSpec, launch: LaunchConfig
    ) -> None:
        self._store = store
        self._run_id = run_id
        self._node = node
        self._timeout_s = launch.join_timeout_s
        self._attempt = -1
        self.raise_if_failed: Callable[[int], None] = lambda attempt: None
        """Called again and again while waiting, with the attempt; raises if waiting is useless."""

    def next_rendezvous(self) -> RendezvousInfo:
        """Wait for all nodes of the next attempt. Raises an EchelonError if one is missing for too
        long, or if two machines have the same node rank."""
        self._attempt += 1
        node = self._node
        arrivals = self._store.open_prefix(f"nodes/{self._attempt}")
        if arrivals.add(str(node.rank), 1) > 1:
            raise EchelonError(
                Fault(
                    f"node {node.rank} has joined twice: two machines have this node rank",
                    f"give the nodes the ranks 0 to {node.node_count - 1} (NODE_RANK)",
                ),
                exit=ExitCode.RENDEZVOUS,
            )
        self._wait_for_all_nodes(arrivals)
        agents: Any = self._store.open_prefix(f"agents/{self._attempt}")
        store_info = RendezvousStoreInfo(self._store.host, self._store.port)
        return RendezvousInfo(agents, node.rank, node.node_count, store_info)

    def _wait_for_all_nodes(self, arrivals: SealedStore) -> None:
        deadline = time.monotonic() + self._timeout_s
        unseen = [str(n) for n in range(self._node.node_count)]
        while not arrivals.check(["complete"]):
            if self._node.rank == 0:
                # One reader, and no counter: thousands would wait for each other to raise it.
                while unseen and arrivals.check(unseen[:_KEYS_PER_CHECK]):
                    del unseen[:_KEYS_PER_CHECK]
                if not unseen:
                    arrivals.set("complete", "1")
                    continue
            self.raise_if_failed(self._attempt)
            if time.monotonic() > deadline:
                count = self._node.node_count
                missing = [str(n) for n in range(count) if not arrivals.check([str(n)])]
                raise EchelonError(
                    Fault(
                        f"after {self._timeout_s:g} s only {count - len(missing)} of {count} nodes "
                        f"are here; missing: node {', '.join(missing)}",
                        "start the missing nodes, or wait longer with "
                        "launch.join_timeout_s=SECONDS",
                    ),
                    exit=ExitCode.RENDEZVOUS,
                )
            time.sleep(_POLL_INTERVAL_S)

    def wait_for_key(self, key: str) -> str:
        """Wait for the value that node 0 puts under a key of the store, and return it.

        `raise_if_failed` ends the wait if node 0 has failed meanwhile.
        """
        deadline = time.monotonic() + _OPERATION_TIMEOUT_S
        while not self._store.check([key]) and time.monotonic() < deadline:
            self.raise_if_failed(0)
            time.sleep(_POLL_INTERVAL_S)
        return str(self._store.get(key).decode())

    def get_backend(self) -> str:
        return "echelon"

    @property
    def use_agent_store(self) -> bool:
        """Always True: workers connect to the store that the agent of node 0 hosts."""
        return True

    def num_nodes_waiting(self) -> int:
        """Always 0: a node that starts again has announced why through the lifeline."""
        return 0

    def get_run_id(self) -> str:
        return self._run_id

    def is_closed(self) -> bool:
        """Always False: the lifeline ends a world, not the rendezvous. So `set_closed` and
        `shutdown`, which torch's agent calls, have nothing to do."""
        return False

    def set_closed(self) -> None:
        pass

    def shutdown(self) -> bool:
        return True


# --- the store ---


def host_or_join_store(node: NodeSpec, timeout_s: float) -> dist.TCPStore:
    """Return the store of the agents: node 0 hosts it, the others connect to it."""
    return host_store(node) if node.rank == 0 else _connect_to_store(node, timeout_s)


def host_store(node: NodeSpec) -> dist.TCPStore:
    """Return a store on node 0's own address, reachable through that interface alone."""
    _silence_store_warnings()
    listener = _bind_listener(node)
    return dist.TCPStore(
        node.master_host,
        listener.getsockname()[1],
        is_master=True,
        wait_for_workers=False,
        timeout=timedelta(seconds=_OPERATION_TIMEOUT_S),
        master_listen_fd=listener.detach(),
    )


def host_standby_store(address: str) -> dist.TCPStore:
    """Return a store at an address of this machine, for the case that this node has to lead."""
    _silence_store_warnings()
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    listener = socket.create_server((address, 0), family=family, backlog=128)
    port = listener.getsockname()[1]
    limit = timedelta(seconds=_OPERATION_TIMEOUT_S)
    return dist.TCPStore(
        address,
        port,
        is_master=True,
        wait_for_workers=False,
        timeout=limit,
        master_listen_fd=listener.detach(),
    )


def _silence_store_warnings() -> None:
    """Have torch log errors alone in this process.

    Its store logs a line for every message that it does not understand, so whoever reaches the port
    could fill the log. torch reads its variable when it is imported, which may be long ago: so the
    level is set where it has put it. A person who has set the variable wants what she has set.
    """
    if os.environ.get(_LOG_LEVEL_VARIABLE, "ERROR") == "ERROR":
        with contextlib.suppress(OSError, ValueError):  # another build of torch
            library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))
            ctypes.c_int.in_dll(library, "FLAGS_caffe2_log_level").value = _LOG_ERRORS


def connect_to_leader(address: str) -> dist.TCPStore:
    """Return a client of the store of a node that has begun to lead, at HOST:PORT."""
    host, _, port = address.rpartition(":")
    limit = timedelta(seconds=_OPERATION_TIMEOUT_S)
    return dist.TCPStore(host, int(port), None, False, limit, False)


def find_listening_address(node: NodeSpec) -> str:
    """Return the address on which node 0 listens.

    It is that of its name. It is every address where that name leads back to this machine alone
    (Debian gives a machine's own name 127.0.1.1), or belongs to a service or a router that forwards
    to this machine.
    """
    try:
        family, _, _, _, socket_address = socket.getaddrinfo(
            node.master_host, 0, type=socket.SOCK_STREAM
        )[0]
    except OSError:
        return node.master_host  # binding reports what is wrong
    address = str(socket_address[0])
    reached = node.node_count + node.spares == 1 or node.master_host in ("localhost", address)
    if address.startswith("127.") and not reached:
        return "0.0.0.0"
    with socket.socket(family) as probe:
        try:
            probe.bind(socket_address)
        except OSError as error:
            if error.errno == errno.EADDRNOTAVAIL:
                return "::" if family == socket.AF_INET6 else "0.0.0.0"
    return address


def _bind_listener(node: NodeSpec) -> socket.socket:
    """Return a socket that listens on node 0's address and port."""
    try:
        family, _, _, _, address = socket.getaddrinfo(
            find_listening_address(node), node.master_port, type=socket.SOCK_STREAM
        )[0]
        listener = socket.socket(family)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(max(128, node.node_count * node.procs))
    except OSError as error:
        raise EchelonError(
            Fault(
                f"node 0 cannot listen at {node.master_host}:{node.master_port}: "
                f"{format_os_error_reason(error)}",
                "give an address of node 0 and a free port: master=HOST:PORT, or MASTER_ADDR and "
                "MASTER_PORT",
            ),
            exit=ExitCode.RENDEZVOUS,
        ) from None
    return listener


def _connect_to_store(node: NodeSpec, timeout_s: float) -> dist.TCPStore:
    """Return a client of node 0's store, once node 0 listens."""
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            socket.create_connection((node.master_host, node.master_port), timeout=5).close()
            break
        except OSError as error:
            if time.monotonic() > deadline:
                raise EchelonError(
                    Fault(
                        f"node {node.rank} found no node 0 at "
                        f"{node.master_host}:{node.master_port} within "
                        f"{timeout_s:g} s ({format_os_error_reason(error)})",
                        "start node 0 there, open the port, or wait longer with "
                        "launch.join_timeout_s=SECONDS",
                    ),
                    exit=ExitCode.RENDEZVOUS,
                ) from None
        time.sleep(_POLL_INTERVAL_S)
    limit = timedelta(seconds=_OPERATION_TIMEOUT_S)
    return dist.TCPStore(node.master_host, node.master_port, None, False, limit, False)


# --- what the nodes must agree on ---


def compare_with_node_0(
    store: SealedStore,
    node: NodeSpec,
    own_facts: Mapping[str, Any],
    wait_for_key: Callable[[str], str],
) -> None:
    """Check that this node has the torch version, the devices and the settings of node 0.

    Every node publishes its facts; one that differs raises an EchelonError that names the
    differences, and so all stop.
    """
    facts = {
        "torch": torch.__version__,
        "host": socket.gethostname(),
        "procs": node.procs,
        **own_facts,
    }
    store.set(f"card/{node.rank}", json.dumps(facts))
    if node.rank == 0:
        return
    node_0_facts = json.loads(wait_for_key("card/0"))
    faults = [
        Fault(
            f"{what} {facts[key]} on {facts['host']} (node {node.rank}), but "
            f"{node_0_facts[key]} on "
            f"{node_0_facts['host']} (node 0)",
            do,
        )
        for key, what, do in (
            ("torch", "torch is", "install the same version on every node"),
            ("devices", "visible devices:", "set launch.procs to what every node has"),
        )
        if facts.get(key) != node_0_facts.get(key)
    ]
    here, there = f"on {facts['host']} (node {node.rank})", f"on {node_0_facts['host']} (node 0)"
    faults += [
        Fault(f"{key}={ours} {here}, but {theirs} {there}", "type the same on every node")
        for key, (ours, theirs) in find_differences(
            facts["settings"], node_0_facts["settings"]
        ).items()
    ]
    if faults:
        raise EchelonError(*faults, exit=ExitCode.RENDEZVOUS)
