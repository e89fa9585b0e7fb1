"""The processes of a world find each other, agree, and open torch's process group.

Everything that crosses goes through torch's key-value store as JSON, or as tensors through the
process group: no pickle. The agent hosts the store where there is one, else rank 0 does.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from echelon.config.schema import Config, find_differences, flatten
from echelon.errors import EchelonError, Exit, Fault
from echelon.runs.failure import Failure
from echelon.utils.os_errors import describe_os_error
from echelon.world import World

_POLL_S = 0.02
_MISSING_RANKS_STAY_S = 1.5
"""How long a store's host stays when ranks are missing, so that those here can ask who."""
_FAILURE_STAY_S = 6.0
"""How long it stays after a failure for those that have not read it; some may be dead."""


_SHARE_TIMEOUT_S = 60.0
_SILENT_WAIT_S = 2.0
"""Who waits longer says what for."""
_FOREVER_S = 365 * 86400.0
_BUCKET_BYTES = 250 << 20


class PeerFailedError(Exception):
    """Another rank failed first; what it said is what this rank says."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.summary)
        self.failure = failure


@dataclass(frozen=True)
class RankGroup:
    """The world's processes, once they have met."""

    world: World
    store: dist.Store | None
    hosts_store: bool
    timeout_s: float

    # --- at the start: through the store ---

    def set_value(self, key: str, value: str) -> None:
        assert self.store is not None
        self.store.set(key, value)

    def get_value(self, key: str) -> str:
        assert self.store is not None
        return str(self.store.get(key).decode())

    def wait_for_key(self, key: str) -> None:
        """Wait for rank 0 to tell something, or for the failure that keeps it from doing so."""
        assert self.store is not None
        if _wait_for_keys(self.store, [key], _SHARE_TIMEOUT_S):
            raise EchelonError(
                Fault(f"rank 0 did not tell its {key}", "look at the end of rank 0's output"),
                exit=Exit.RENDEZVOUS,
            )

    def share_from_rank0(self, key: str, value: str) -> str:
        """Rank 0's on every rank."""
        if self.store is None:
            return value
        if self.world.rank == 0:
            self.set_value(key, value)
            return value
        self.wait_for_key(key)
        return self.get_value(key)

    def wait_for_all(self, state: str, timeout_s: float) -> None:
        """Wait until every rank has come here; a failure of one is the failure of all."""
        if self.store is None:
            return
        self.store.set(f"{state}/{self.world.rank}", "1")
        missing = self._find_missing_ranks(state, timeout_s)
        if missing:
            raise EchelonError(
                Fault(
                    f"after {timeout_s:g} s rank {_join_ranks(missing)} was not {state}",
                    "look at the end of that rank's log",
                ),
                exit=Exit.RENDEZVOUS,
            )

    def _find_missing_ranks(self, key: str, timeout_s: float) -> list[int]:
        """The ranks that have not set the key in time."""
        assert self.store is not None
        return _wait_for_keys(self.store, [f"{key}/{r}" for r in range(self.world.size)], timeout_s)

    def require_equal_configs(self, config: Config) -> None:
        """Ranks started by hand may have been typed differently; `rank` itself must differ."""
        if self.store is None:
            return
        first = self.share_from_rank0("config", json.dumps(config.to_dict()))
        mine, theirs = flatten(config.to_dict()), flatten(json.loads(first))
        different = {k: v for k, v in find_differences(mine, theirs).items() if k != "rank"}
        if different:
            raise EchelonError(
                *(
                    Fault(f"{key}={a} here, but {key}={b} on rank 0", "type the same on every rank")
                    for key, (a, b) in different.items()
                ),
                exit=Exit.RENDEZVOUS,
            )

    # --- failures ---

    def publish_failure(self, failure: Failure, wait_for_readers: bool = True) -> None:
        """The first failure wins. The store's host stays until the others have read it."""
        if self.store is None:
            return
        try:
            self.store.compare_set("failure", "", failure.to_json())
            left_count = self.store.add("left", 1)
            if wait_for_readers and self.hosts_store and self.world.size > 1:
                _shut_connections(self.world)
                deadline = time.monotonic() + _FAILURE_STAY_S
                while left_count < self.world.size and time.monotonic() < deadline:
                    time.sleep(_POLL_S)
                    left_count = self.store.add("left", 0)
        except Exception:  # the store went with its host; then that is what the others report
            return

    def wait_for_failure(self, timeout_s: float) -> Failure | None:
        if self.store is None:
            return None
        deadline = time.monotonic() + timeout_s
        try:
            while time.monotonic() < deadline:
                if failure := _read_failure(self.store):
                    return failure
                time.sleep(_POLL_S)
        except Exception:
            return None
        return None

    # --- during training: through the process group ---

    def init_process_group(self, backend: str) -> None:
        if self.store is None:
            return
        timeout = timedelta(seconds=self.timeout_s)
        dist.init_process_group(
            backend,
            store=dist.PrefixStore("group", self.store),
            rank=self.world.rank,
            world_size=self.world.size,
            timeout=timeout,
        )

    def barrier_before_exit(self) -> None:
        """Nobody leaves while another may still be in a collective.

        The process group is not destroyed: its destructor can wait for a thread that waits for
        Python's lock. The process is about to end.
        """
        if dist.is_initialized():
            dist.barrier()

    def gather(self, row: Tensor) -> list[Tensor]:
        """A CPU tensor of every rank, of any length, on rank 0; elsewhere nothing."""
        if self.store is None:
            return [row]
        lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(self.world.size)]
        dist.all_gather(lengths, torch.tensor([row.numel()]))
        sizes = [int(n) for n in lengths]
        padded = torch.zeros(max(sizes), dtype=row.dtype)
        padded[: row.numel()] = row
        rows = [torch.empty_like(padded) for _ in sizes] if self.world.rank == 0 else None
        dist.gather(padded, rows)
        return [r[:n] for r, n in zip(rows, sizes, strict=True)] if rows else []

    def broadcast(self, tensor: Tensor) -> Tensor:
        """Rank 0's tensor, in place."""
        if self.store is not None:
            dist.broadcast(tensor, src=0)
        return tensor

    def broadcast_json(self, data: Any) -> Any:
        """Rank 0's data on every rank."""
        if self.store is None:
            return data
        text = json.dumps(data).encode() if self.world.rank == 0 else b""
        length = self.broadcast(torch.tensor([len(text)]))
        raw = torch.zeros(int(length), dtype=torch.uint8)
        if self.world.rank == 0:
            raw = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        self.broadcast(raw)
        return json.loads(raw.numpy().tobytes())


def broadcast_buffers(buffers: list[Tensor]) -> None:
    """Rank 0's on every rank, as DDP does it: few messages, each of one device and type."""
    if buffers and dist.is_initialized():
        whole = dist.distributed_c10d._get_default_group()
        dist._broadcast_coalesced(whole, buffers, _BUCKET_BYTES, 0)


def join_world(world: World, config: Config, env: Mapping[str, str]) -> RankGroup:
    """Connect to the store, wait for everybody, make sure that all want the same."""
    # With an agent, the agent watches and names the guilty; this limit is the second net.
    agent_hosts = env.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    hang_s = (config.launch.hang_s or _FOREVER_S) * (10 if agent_hosts else 1)
    if world.size == 1:
        return RankGroup(world, None, False, hang_s)
    timeout_s = config.launch.join_timeout_s
    deadline = time.monotonic() + timeout_s
    hosts_store = world.rank == 0 and not agent_hosts
    store = _connect_store(world, hosts_store, timeout_s)
    attempt = env.get("TORCHELASTIC_RESTART_COUNT", "0")
    store = dist.PrefixStore(f"echelon/{attempt}", store)
    _claim_rank(store, world)
    store.set(f"rank {world.rank}", socket.gethostname())
    remaining_s = max(1.0, deadline - time.monotonic())
    missing = _wait_for_keys(store, [f"rank {r}" for r in range(world.size)], remaining_s)
    if missing:
        _raise_missing_ranks(store, world, missing, timeout_s, hosts_store)
    hosts = [store.get(f"rank {r}").decode() for r in range(world.size)]
    located_world = world if world.settled else world.with_hosts(hosts)
    return RankGroup(located_world, store, hosts_store, hang_s)


def report_to_agent(failure: Failure, env: Mapping[str, str]) -> None:
    """For a rank that has no store in its group: it is alone, or failed before it met anybody."""
    host, port = env["MASTER_ADDR"], int(env["MASTER_PORT"])
    attempt = env.get("TORCHELASTIC_RESTART_COUNT", "0")
    with contextlib.suppress(Exception):  # without its agent there is nobody to tell
        socket.create_connection((host, port), timeout=_SILENT_WAIT_S).close()
        store = dist.TCPStore(host, port, None, False, timedelta(seconds=_FAILURE_STAY_S), False)
        first = dist.PrefixStore(f"echelon/{attempt}", store)
        first.compare_set("failure", "", failure.to_json())


def _connect_store(world: World, hosts_store: bool, timeout_s: float) -> dist.Store:
    assert world.master is not None
    host, _, port_text = world.master.rpartition(":")
    host, port = host.strip("[]"), int(port_text)
    if host in ("localhost", "127.0.0.1", "::1"):
        # gloo would look for the interface of this machine's name, which need not resolve.
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

    # In a thread, because torch waits for ever when something else answers at that port.
    thread = threading.Thread(target=create_store, daemon=True)
    thread.start()
    thread.join(timeout_s)
    store = results[0] if results else TimeoutError("what answers there is no rank 0 of a world")
    if isinstance(store, Exception):
        raise _make_address_error(world, f"{host}:{port + 1}", str(store))
    return store


def _wait_for_host(world: World, host: str, port: int, timeout_s: float) -> None:
    """torch's own client waits too, but fills the screen with its stack while it does."""
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
                    f"({describe_os_error(found)})",
                    "start rank 0 there, give its address with master=HOST:PORT, or wait longer "
                    "with launch.join_timeout_s=SECONDS",
                ),
                exit=Exit.RENDEZVOUS,
            )
        if waited > _SILENT_WAIT_S and not has_reported:
            has_reported = _report_waiting(
                f"rank {world.rank} waits for rank 0 at {world.master}", timeout_s
            )
        time.sleep(_POLL_S)


def _report_waiting(text: str, timeout_s: float) -> bool:
    print(f"{text}, at most {timeout_s:g} s", file=sys.stderr, flush=True)
    return True


def _make_address_error(world: World, other: str, found: str) -> EchelonError:
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
        exit=Exit.RENDEZVOUS,
    )


def _shut_connections(world: World) -> None:
    """Close our side of every connection but the store's: the others stop waiting in a collective
    and ask what happened, while there is a store to ask. gloo has no call for it."""
    port = int((world.master or "").rpartition(":")[2])
    for number in sorted(map(int, os.listdir("/proc/self/fd")))[3:]:
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(number)) as connection:
            ports = [end[1] for end in (connection.getsockname(), connection.getpeername())]
            if connection.family in (socket.AF_INET, socket.AF_INET6) and port not in ports:
                connection.shutdown(socket.SHUT_RDWR)


def _claim_rank(store: dist.Store, world: World) -> None:
    if store.add(f"taken/{world.rank}", 1) > 1:
        raise EchelonError(
            Fault(
                f"rank={world.rank} is taken: another process of this world of {world.size} has it",
                "give every process a rank of its own",
            ),
            exit=Exit.RENDEZVOUS,
        )


def _raise_missing_ranks(
    store: dist.Store, world: World, missing: list[int], timeout_s: float, hosts_store: bool
) -> None:
    here = world.size - len(missing)
    if hosts_store:
        time.sleep(_MISSING_RANKS_STAY_S)  # the others come to the same conclusion and want to ask
    raise EchelonError(
        Fault(
            f"world_size={world.size}, but after {timeout_s:g} s only {here} of {world.size} "
            f"processes are here; missing: rank {_join_ranks(missing)}",
            "start the missing ranks, or wait longer with launch.join_timeout_s=SECONDS",
        ),
        exit=Exit.RENDEZVOUS,
    )


def _wait_for_keys(store: dist.Store, keys: list[str], timeout_s: float) -> list[int]:
    """Positions of the keys that are not there when time is up; a failure ends the wait."""
    started, has_reported = time.monotonic(), False
    patience = _make_backoff()
    while True:
        waited = time.monotonic() - started
        try:
            all_here, failure = store.check(keys), _read_failure(store)
            if not all_here and waited > timeout_s:
                return [i for i, key in enumerate(keys) if not store.check([key])]
        except Exception as error:
            raise EchelonError(
                Fault(
                    f"the process that hosts this world's meeting point went away: {error}",
                    "look at the end of rank 0's output, and start again",
                ),
                exit=Exit.RENDEZVOUS,
            ) from None
        if all_here:  # first: who hosts the store must not leave with it before all have met
            return []
        if failure:
            raise PeerFailedError(failure)
        if waited > _SILENT_WAIT_S and not has_reported:
            missing_keys = [key for key in keys if not store.check([key])]
            has_reported = _report_waiting(
                f"waiting for {', '.join(missing_keys[:8])}", round(timeout_s)
            )
        time.sleep(patience())


def _make_backoff() -> Callable[[], float]:
    """1 ms at first, for worlds that start together; up to 50 ms, to be quiet in long waits."""
    pause = 0.001

    def next_pause() -> float:
        nonlocal pause
        pause = min(0.05, pause * 1.3)
        return pause

    return next_pause


def _read_failure(store: dist.Store) -> Failure | None:
    return Failure.from_json(store.get("failure")) if store.check(["failure"]) else None


def _join_ranks(ranks: list[int]) -> str:
    shown = ", ".join(map(str, ranks[:16]))
    return shown + (f" and {len(ranks) - 16} more" if len(ranks) > 16 else "")
