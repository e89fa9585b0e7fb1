"""The processes of a world find each other, agree on a configuration, and open torch's process
group.

Before training, data crosses as JSON through torch's key-value store; during training, as tensors
or JSON bytes through the process group. Nothing is pickled. The agent hosts the store where there
is one; otherwise rank 0 does.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import time
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from echelon.config.schema import Config, find_differences, flatten
from echelon.errors import EchelonError, ExitCode, Fault
from echelon.parallel.store import format_ranks, read_failure, wait_for_keys
from echelon.runs.failure import Failure
from echelon.utils.sockets import list_sockets, shut_socket, stop_accepting
from echelon.world import World
from echelon.world.sealed_store import SealedStore

_POLL_S = 0.02
_FAILURE_STAY_S = 6.0
"""How long it stays after a failure for ranks that have not read it; some of them may be dead."""


_SHARE_TIMEOUT_S = 60.0
_CONNECT_TIMEOUT_S = 30.0
_LAZY_CONNECTIONS_VARIABLE = "TORCH_GLOO_LAZY_INIT"
"""With it gloo connects two ranks when they first have something to send."""
_BUCKET_BYTES = 250 << 20
_LENGTH_BYTES = 8
_SHORT_BYTES = 1024


@dataclass(frozen=True)
class RankGroup:
    """The processes of the world, once they have joined. A world of one process has no store."""

    world: World
    store: SealedStore | None
    hosts_store: bool
    timeout_s: float

    # --- at the start: through the store ---

    def set_value(self, key: str, value: str) -> None:
        """Sets a key of the store."""
        assert self.store is not None
        self.store.set(key, value)

    def get_value(self, key: str) -> str:
        """Return the value of a key of the store; the key must be there."""
        assert self.store is not None
        return str(self.store.get(key).decode())

    def wait_for_key(self, key: str) -> None:
        """Waits until rank 0 has set a key, or raises the failure that kept rank 0 from it."""
        assert self.store is not None
        if wait_for_keys(self.store, [key], _SHARE_TIMEOUT_S):
            raise EchelonError(
                Fault(f"rank 0 did not share its {key}", "look at the end of rank 0's output"),
                exit=ExitCode.RENDEZVOUS,
            )

    def share_from_rank0(self, key: str, value: str) -> str:
        """Return rank 0's value on every rank. What other ranks pass is ignored."""
        if self.store is None:
            return value
        if self.world.rank == 0:
            self.set_value(key, value)
            return value
        self.wait_for_key(key)
        return self.get_value(key)

    def exchange(self, key: str, value: str, timeout_s: float) -> list[str]:
        """Return the values of all ranks, in their order, on every rank."""
        if self.store is None:
            return [value]
        self.set_value(f"{key} of {self.world.rank}", value)
        self.wait_for_all(key, timeout_s)
        return [self.get_value(f"{key} of {rank}") for rank in range(self.world.size)]

    def wait_for_all(self, state: str, timeout_s: float) -> None:
        """Waits until every rank has come to this point; `state` says in the error what a missing
        rank is not.

        If a rank fails before, the wait ends with that rank's failure.
        """
        if self.store is None:
            return
        self.store.set(f"{state}/{self.world.rank}", "1")
        missing = self._find_missing_ranks(state, timeout_s)
        if missing:
            raise EchelonError(
                Fault(
                    f"after {timeout_s:g} s rank {format_ranks(missing)} was not {state}",
                    "look at the end of that rank's log",
                ),
                exit=ExitCode.RENDEZVOUS,
            )

    def _find_missing_ranks(self, key: str, timeout_s: float) -> list[int]:
        """Return the ranks that have not set the key in time."""
        assert self.store is not None
        return wait_for_keys(self.store, [f"{key}/{r}" for r in range(self.world.size)], timeout_s)

    def require_equal_configs(self, config: Config) -> None:
        """Raises a fault for every setting that differs from rank 0's.

        Ranks that are started by hand may have been given different overrides. `rank` itself must
        differ.
        """
        if self.store is None:
            return
        first = self.share_from_rank0("config", json.dumps(config.to_dict()))
        own, rank0 = flatten(config.to_dict()), flatten(json.loads(first))
        different = {k: v for k, v in find_differences(own, rank0).items() if k != "rank"}
        if different:
            raise EchelonError(
                *(
                    Fault(
                        f"{key}={a} here, but {key}={b} on rank 0",
                        "give the same overrides on every rank",
                    )
                    for key, (a, b) in different.items()
                ),
                exit=ExitCode.RENDEZVOUS,
            )

    # --- failures ---

    def publish_failure(self, failure: Failure, wait_for_readers: bool = True) -> None:
        """Publishes a failure for the other ranks; the first one published wins.

        The process that hosts the store stays for a while so that the others can read it, unless
        they have left already (`wait_for_readers=False`).
        """
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
        except Exception:  # the store's host has ended; then that is what the others report
            return

    def interrupt_collectives(self) -> None:
        """Ends the collectives that this process and its peers wait in, with an error: the world
        fails, and why has been published."""
        _shut_connections(self.world)

    def wait_for_failure(self, timeout_s: float) -> Failure | None:
        """Return the first failure of the world, waiting for it at most `timeout_s` seconds."""
        if self.store is None:
            return None
        deadline = time.monotonic() + timeout_s
        try:
            while time.monotonic() < deadline:
                if failure := read_failure(self.store):
                    return failure
                time.sleep(_POLL_S)
        except Exception:
            return None
        return None

    # --- during training: through the process group ---

    def init_process_group(self, backend: str, shards: int = 1) -> list[dist.ProcessGroup]:
        """Opens torch's default process group. A world of one process has none.

        Where several replicas of `shards` ranks each hold a sharded model, returns two more groups
        of this rank: the ranks with the same shard of every replica, and those of its replica.
        """
        if self.store is None:
            return []
        timeout = timedelta(seconds=self.timeout_s)
        before = list_sockets()
        # All ranks are here, so connecting takes a moment. A rank that is lost in it would be
        # waited for, as nothing can end that wait.
        connect_timeout = min(timeout, timedelta(seconds=_CONNECT_TIMEOUT_S))
        rank, size = self.world.rank, self.world.size
        dist.init_process_group(
            backend,
            store=dist.PrefixStore(f"{self.store.prefix}group", self.store.torch_store),
            rank=rank,
            world_size=size,
            timeout=connect_timeout,
        )
        first = rank - rank % shards
        members = [range(rank % shards, size, shards), range(first, first + shards)]
        subgroups = [
            dist.new_group(list(ranks), connect_timeout, use_local_synchronization=True)
            for ranks in members
            if 1 < shards < size
        ]
        for group in (None, *subgroups):
            dist.distributed_c10d._set_pg_timeout(timeout, group)
        _GROUP_SOCKETS.clear()
        _GROUP_SOCKETS.update({k: v for k, v in list_sockets().items() if before.get(k) != v})
        # gloo keeps a file open for whoever connects, and aborts when it can open no more.
        if not os.environ.get(_LAZY_CONNECTIONS_VARIABLE):
            stop_accepting(_GROUP_SOCKETS)
        return subgroups

    @staticmethod
    def add_connection(number: int) -> None:
        """Let a connection with this descriptor end with the open process group."""
        _GROUP_SOCKETS[number] = list_sockets().get(number, "")

    @staticmethod
    def interrupt_process_group() -> None:
        """Ends the collectives of the open process group, here and on its other ranks, with an
        error. Other connections of this process, the user's among them, stay open."""
        now = list_sockets()
        for number, inode in list(_GROUP_SOCKETS.items()):
            if now.get(number) == inode:
                shut_socket(number)

    def close_process_group(self) -> None:
        """Closes the process group, so that the process can open another one. Ranks that still
        wait in it are interrupted."""
        if dist.is_initialized():
            self.interrupt_process_group()
            _GROUP_SOCKETS.clear()
            # The destructor waits for threads that may wait for Python's global lock. A group of
            # an earlier round has none at work any more.
            _LEFT_GROUPS.append(list(dist.distributed_c10d._world.pg_map))
            dist.destroy_process_group()
            del _LEFT_GROUPS[:-_MAX_LEFT_GROUPS]

    def barrier_before_exit(self) -> None:
        """Waits until no rank is in a collective any more.

        The process group is not destroyed: its destructor can wait for a thread that waits for
        Python's global lock, and the process is about to end anyway.
        """
        if dist.is_initialized():
            dist.barrier()

    def keep_group_until_exit(self) -> None:
        """Keep the process group while Python ends, for a process that goes on after its training
        and whose exit code is not known yet.

        Python would destroy the group (see `barrier_before_exit`). So one reference too many is
        taken, and the process leaves C's `exit` at its first function, where NCCL's threads would
        otherwise find CUDA gone.
        """
        if dist.is_initialized():
            group = dist.distributed_c10d._get_default_group()
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))
            libc = ctypes.CDLL(None)
            with contextlib.suppress(AttributeError):  # glibc alone has it
                libc.on_exit(libc._exit, None)

    def gather(self, row: Tensor, to_all: bool = False) -> list[Tensor]:
        """Return the CPU tensors of all ranks, of any length, on rank 0, or on all ranks; where
        they are not returned, an empty list.

        What is short, such as a line of metrics, travels with its length in one collective.
        """
        if self.store is None:
            return [row]
        content = row.contiguous().view(torch.uint8)
        head = torch.zeros(_LENGTH_BYTES + _SHORT_BYTES, dtype=torch.uint8)
        head[:_LENGTH_BYTES] = torch.tensor([content.numel()]).view(torch.uint8)
        short = content[:_SHORT_BYTES]
        head[_LENGTH_BYTES : _LENGTH_BYTES + len(short)] = short
        heads = [torch.empty_like(head) for _ in range(self.world.size)]
        dist.all_gather(heads, head)
        sizes = [int(of_rank[:_LENGTH_BYTES].view(torch.int64)) for of_rank in heads]
        rows = [of_rank[_LENGTH_BYTES:] for of_rank in heads]
        is_receiver = to_all or self.world.rank == 0
        if max(sizes) > _SHORT_BYTES:
            padded = torch.zeros(max(sizes), dtype=torch.uint8)
            padded[: len(content)] = content
            rows = [torch.empty_like(padded) for _ in sizes] if is_receiver else []
            if to_all:
                dist.all_gather(rows, padded)
            else:
                dist.gather(padded, rows or None)
        if not is_receiver:
            return []
        return [r[:n].view(row.dtype) for r, n in zip(rows, sizes, strict=True)]

    def gather_json(self, data: Any, to_all: bool = False) -> list[Any]:
        """Return the data of all ranks, in their order, on rank 0, or on all ranks; where it is not
        returned, an empty list."""
        row = torch.frombuffer(bytearray(json.dumps(data).encode()), dtype=torch.uint8)
        return [json.loads(raw.numpy().tobytes()) for raw in self.gather(row, to_all)]

    def is_any_true(self, flag: bool) -> bool:
        """Return on every rank whether the flag is set on any."""
        return bool(self.find_largest(flag))

    def find_largest(self, number: int) -> int:
        """Return on every rank the largest number of all."""
        if self.store is None:
            return number
        largest = torch.tensor([int(number)])
        dist.all_reduce(largest, dist.ReduceOp.MAX)
        return int(largest)

    def broadcast(self, tensor: Tensor, source: int = 0) -> Tensor:
        """Overwrites the tensor with that of rank `source`, and returns it."""
        if self.store is not None:
            dist.broadcast(tensor, src=source)
        return tensor

    def broadcast_json(self, data: Any, source: int = 0) -> Any:
        """Return the data of rank `source` on every rank."""
        if self.store is None:
            return data
        text = json.dumps(data).encode() if self.world.rank == source else b""
        length = self.broadcast(torch.tensor([len(text)]), source)
        raw = torch.zeros(int(length), dtype=torch.uint8)
        if self.world.rank == source:
            raw = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        self.broadcast(raw, source)
        return json.loads(raw.numpy().tobytes())


def broadcast_buffers(buffers: list[Tensor]) -> None:
    """Overwrites the buffers with rank 0's, in few messages of one device and dtype each, as DDP
    does."""
    if buffers and dist.is_initialized():
        whole = dist.distributed_c10d._get_default_group()
        dist._broadcast_coalesced(whole, buffers, _BUCKET_BYTES, 0)


def _shut_connections(world: World) -> None:
    """Shuts this process's TCP connections, except those of the store.

    The other ranks then stop waiting in a collective and ask the store what happened, while it is
    still there. torch has no call for it (2.13): `abort` and `shutdown` of a gloo group leave its
    connections open, and `destroy_process_group` closes them only when nothing refers to the group
    any more, but DDP and FSDP do.
    """
    port = int((world.master or "").rpartition(":")[2])
    for number in list_sockets():
        shut_socket(number, kept_port=port)


_LEFT_GROUPS: list[list[Any]] = []
"""Process groups that were closed a short time ago, by round."""
_MAX_LEFT_GROUPS = 2
_GROUP_SOCKETS: dict[int, str] = {}
"""Of the open process group: descriptor → what the kernel calls the socket."""
