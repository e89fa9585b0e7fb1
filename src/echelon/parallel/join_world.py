"""A rank joins its world: it connects to the store, claims its rank, and waits for the others."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Mapping
from datetime import timedelta

import torch.distributed as dist

from echelon.config.schema import Config
from echelon.errors import EchelonError, ExitCode, Fault
from echelon.parallel.process_group import RankGroup
from echelon.parallel.store import SILENT_WAIT_S, format_ranks, print_wait_message, wait_for_keys
from echelon.runs.failure import Failure
from echelon.utils.os_errors import format_os_error_reason
from echelon.world import World
from echelon.world.rounds import REPLACEMENT_NUMBER_VARIABLE, get_round_prefix
from echelon.world.sealed_store import SealedStore

_POLL_S = 0.02
_CONNECT_TIMEOUT_S = 6.0
_MISSING_RANKS_STAY_S = 1.5
"""How long the store's host stays when ranks are missing, so that the others can ask which."""
_FOREVER_S = 365 * 86400.0


def join_world(world: World, config: Config, env: Mapping[str, str]) -> RankGroup:
    """Connects to the store, waits for all ranks, and returns the group with every rank's place in
    it."""
    # Where there is an agent, it watches the ranks and finds the one that hangs; the collectives'
    # own timeout is then the second line of defence, ten times as long.
    agent_hosts = env.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    hang_s = (config.launch.hang_s or _FOREVER_S) * (10 if agent_hosts else 1)
    if world.size == 1:
        return RankGroup(world, None, False, hang_s)
    timeout_s = config.launch.join_timeout_s
    deadline = time.monotonic() + timeout_s
    hosts_store = world.rank == 0 and not agent_hosts
    torch_store = _connect_store(world, hosts_store, timeout_s)
    attempt = env.get("TORCHELASTIC_RESTART_COUNT", "0")
    store = SealedStore.open(torch_store, env).open_prefix(get_round_prefix(attempt, 0))
    if REPLACEMENT_NUMBER_VARIABLE in env:  # the others have met long ago
        return RankGroup(world, store, False, hang_s)
    _claim_rank(store, world)
    store.set(f"rank {world.rank}", socket.gethostname())
    remaining_s = max(1.0, deadline - time.monotonic())
    missing = wait_for_keys(store, [f"rank {r}" for r in range(world.size)], remaining_s)
    if missing:
        _raise_missing_ranks(store, world, missing, timeout_s, hosts_store)
    hosts = [store.get(f"rank {r}").decode() for r in range(world.size)]
    located_world = world if world.settled else world.renumber_by_hosts(hosts)
    return RankGroup(located_world, store, hosts_store, hang_s)


def publish_failure_to_agent(failure: Failure, env: Mapping[str, str]) -> None:
    """Publishes a failure in the agent's store, for a rank whose group has no store.

    That is a rank that is alone, or that failed before it joined the world.
    """
    host, port = env["MASTER_ADDR"], int(env["MASTER_PORT"])
    attempt = env.get("TORCHELASTIC_RESTART_COUNT", "0")
    with contextlib.suppress(Exception):  # if the agent is gone, nobody is left to read it
        socket.create_connection((host, port), timeout=SILENT_WAIT_S).close()
        store = dist.TCPStore(host, port, None, False, timedelta(seconds=_CONNECT_TIMEOUT_S), False)
        first = SealedStore.open(store, env).open_prefix(f"echelon/{attempt}")
        first.compare_set("failure", "", failure.to_json())


def _connect_store(world: World, hosts_store: bool, timeout_s: float) -> dist.Store:
    """Connects to the store, or hosts it; raises a fault where the address cannot be used."""
    assert world.master is not None
    host, _, port_text = world.master.rpartition(":")
    host, port = host.strip("[]"), int(port_text)
    if host in ("localhost", "127.0.0.1", "::1"):
        # By default gloo looks up the interface of the machine's host name, which need not resolve.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    if not hosts_store:
        _wait_for_host(world, host, port, timeout_s)
    results: list[dist.Store | Exception] = []

    def create_store() -> None:
        limit = timedelta(seconds=timeout_s)
        try:
            results.append(dist.TCPStore(host, port, None, hosts_store, limit, False))
        except Exception as error:
            results.append(error)

    # In a thread, because torch waits for ever when another service answers at that port.
    thread = threading.Thread(target=create_store, daemon=True)
    thread.start()
    thread.join(timeout_s)
    store = results[0] if results else TimeoutError("what answers there is not rank 0 of a world")
    if isinstance(store, Exception):
        raise _make_address_error(world, f"{host}:{port + 1}", str(store))
    return store


def _wait_for_host(world: World, host: str, port: int, timeout_s: float) -> None:
    """Waits until rank 0 listens. torch's client would wait too, but prints its stack while it
    does."""
    started, has_reported = time.monotonic(), False
    while True:
        try:
            socket.create_connection((host, port), timeout=5).close()
            return
        except OSError as error:
            waited = time.monotonic() - started
            found = error
        if waited > timeout_s:
            raise EchelonError(
                Fault(
                    f"rank {world.rank} found no rank 0 at {world.master} within {timeout_s:g} s "
                    f"({format_os_error_reason(found)})",
                    "start rank 0 there, give its address with master=HOST:PORT, or wait longer "
                    "with launch.join_timeout_s=SECONDS",
                ),
                exit=ExitCode.RENDEZVOUS,
            )
        if waited > SILENT_WAIT_S and not has_reported:
            has_reported = print_wait_message(
                f"rank {world.rank} waits for rank 0 at {world.master}", timeout_s
            )
        time.sleep(_POLL_S)


def _make_address_error(world: World, other: str, found: str) -> EchelonError:
    """Return the error for an address that rank 0 cannot listen on, or where something else
    answers."""
    is_port_taken = "address already in use" in found.lower()
    what = (
        "the port is taken, perhaps by another run's rank 0"
        if is_port_taken
        else found.splitlines()[0]
    )
    return EchelonError(
        Fault(
            f"rank {world.rank} cannot use {world.master} as the meeting point: {what}",
            f"end that run, or give all ranks another port: master={other}"
            if is_port_taken
            else "give an address of rank 0's machine: master=HOST:PORT",
        ),
        exit=ExitCode.RENDEZVOUS,
    )


def _claim_rank(store: SealedStore, world: World) -> None:
    """Raises where another process of the world has the same rank."""
    if store.add(f"taken/{world.rank}", 1) > 1:
        raise EchelonError(
            Fault(
                f"rank={world.rank} is taken: another process of this world of {world.size} has it",
                "give every process a rank of its own",
            ),
            exit=ExitCode.RENDEZVOUS,
        )


def _raise_missing_ranks(
    store: SealedStore, world: World, missing: list[int], timeout_s: float, hosts_store: bool
) -> None:
    """Raises the fault that names the missing ranks."""
    here = world.size - len(missing)
    if hosts_store:
        time.sleep(
            _MISSING_RANKS_STAY_S
        )  # the others time out too, and ask the store who is missing
    raise EchelonError(
        Fault(
            f"world_size={world.size}, but after {timeout_s:g} s only {here} of {world.size} "
            f"processes are here; missing: rank {format_ranks(missing)}",
            "start the missing ranks, or wait longer with launch.join_timeout_s=SECONDS",
        ),
        exit=ExitCode.RENDEZVOUS,
    )
