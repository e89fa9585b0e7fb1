"""What copies of the state in the memory of other ranks cost a training.

    python benchmarks/peer_copies.py [--rounds 10]

Two processes with one thread each make steps of a few milliseconds: products of matrices, and an
all-reduce of 4 MB over gloo. Each has a state of 1 GB that it copies and exchanges with the other
as the shards of an FSDP run are. A round is a while with a copy every five seconds and a while
without; so each copy costs what it costs every minute, and is seen twelve times as often. What is
lost to a copy is then set against 60 s. The first copies, which allocate memory, are not counted.
"""

from __future__ import annotations

import json
import secrets
import socket
import subprocess
import sys
import time
from datetime import timedelta
from typing import Any

from common import HERE, Result, environment, make_figure, run_benchmark

ROUNDS = 10
STATE_BYTES = 1 << 30
EVERY_S = 60.0
WINDOW_S = 10.0
COPIES = 2
"""In a window."""


def measure(rounds: int = ROUNDS) -> Result:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    env = environment(OMP_NUM_THREADS="1", GLOO_SOCKET_IFNAME="lo", ECHELON_KEY=secrets.token_hex())
    words = [sys.executable, str(HERE / "peer_copies.py"), "rank", str(port), str(rounds)]
    ranks = [
        subprocess.Popen([*words, str(rank)], env=env, stdout=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    outputs = [rank.communicate()[0] for rank in ranks]
    if any(rank.returncode for rank in ranks):
        raise SystemExit("a rank has failed")
    found = json.loads(outputs[0].splitlines()[-1])
    gigabytes = STATE_BYTES / 1e9
    lost = [s / gigabytes for s in found["lost_s"]]
    return {
        "config": {"processes": 2, "state_bytes": STATE_BYTES, "rounds": rounds},
        "figures": [
            make_figure(
                "time of a step with copies of 1 GB per rank every 60 s, × without",
                [EVERY_S / (EVERY_S - s) for s in lost],
                1.01,
            ),
            make_figure(
                "the training waits for a copy, per GB",
                [s / gigabytes for s in found["blocked_s"]],
                unit="s",
            ),
            make_figure(
                "processors at work in the background on a rank, per GB",
                [s / gigabytes for s in found["background_s"]],
                unit="s",
            ),
            make_figure(
                "both as time of processors, of 60 s of one core",
                [100 * s / gigabytes / EVERY_S for s in found["processor_s"]],
                unit="%",
            ),
            make_figure("until the other rank has it, per GB", found["kept_s"], unit="s"),
        ],
    }


def run_rank(port: int, rounds: int, rank: int) -> None:
    """Train and copy in one of the processes, and print what it has measured."""
    import torch
    import torch.distributed as dist

    from echelon.config.schema import ReplicaConfig
    from echelon.parallel.process_group import RankGroup
    from echelon.train.memory_copies import ShardCopies
    from echelon.world.detect import detect
    from echelon.world.sealed_store import SealedStore

    store = dist.TCPStore("127.0.0.1", port, 2, rank == 0, timedelta(seconds=60))
    master = f"127.0.0.1:{port}"
    world = detect({}, rank=rank, world_size=2, master=master, visible_devices=0).world
    group = RankGroup(world, SealedStore(store, None), rank == 0, 60.0)
    group.init_process_group("gloo")
    state = [torch.rand(4 << 20) for _ in range(STATE_BYTES >> 24)]
    inputs, weights = torch.rand(512, 512), torch.rand(512, 512)
    gradients = torch.zeros(1 << 20)
    copies = ShardCopies(group, ReplicaConfig(kind="fsdp"))
    copies.begin_round(group)
    steps, keeping_s = 0, 0.0
    flags: Any = gradients[:2]

    def make_step(asks_copy: bool = False, asks_end: bool = False) -> list[bool]:
        """Return what rank 0 asks for, on both."""
        nonlocal steps
        steps += 1
        for _ in range(4):
            inputs.copy_(torch.tanh(inputs @ weights))
        gradients.fill_(1e-6)
        flags.copy_(torch.tensor([asks_copy, asks_end]) if rank == 0 else torch.zeros(2))
        dist.all_reduce(gradients)
        state[steps % len(state)].add_(gradients.mean())
        return [bool(flag > 0.5) for flag in flags]

    def keep() -> None:
        nonlocal keeping_s
        keeping_s -= time.process_time()
        copies.keep({"step": steps, "samples": steps}, {"model": state}, time.monotonic())
        keeping_s += time.process_time()

    def run_window(copy_count: int) -> tuple[float, float]:
        """Return the seconds of a step, and how long it took until the last copy was kept."""
        first, begun = steps, time.monotonic()
        todo, copied, kept_s = copy_count, begun, 0.0
        while True:
            passed = time.monotonic() - begun
            is_due = todo > 0 and passed >= WINDOW_S / copy_count * (copy_count - todo)
            asks_copy = is_due and not copies.is_exchanging
            if copies.is_exchanging:
                kept_s = time.monotonic() - copied
            is_copied, has_ended = make_step(
                asks_copy, passed > WINDOW_S and not copies.is_exchanging
            )
            if is_copied:
                copied, todo = time.monotonic(), todo - 1
                keep()
            if has_ended:
                return (time.monotonic() - begun) / (steps - first), kept_s

    for _ in range(2):
        run_window(COPIES)  # which allocates memory
    found: dict[str, list[float]] = {
        name: [] for name in ("lost_s", "blocked_s", "background_s", "processor_s", "kept_s")
    }
    for number in range(rounds):
        before, keeping_s = copies.describe(), 0.0
        taken = {}
        for copy_count in (COPIES, 0) if number % 2 else (0, COPIES):
            first = steps
            step_s, kept_s = run_window(copy_count)
            taken[copy_count] = (step_s, steps - first, kept_s)
        after = copies.describe()
        made = after["count"] - before["count"]
        step_s, step_count, kept_s = taken[COPIES]
        found["lost_s"].append((step_s - taken[0][0]) * step_count / made)
        found["blocked_s"].append((after["seconds"] - before["seconds"]) / made)
        background_s = after["background_seconds"] - before["background_seconds"]
        found["background_s"].append(background_s / made)
        found["processor_s"].append((background_s + keeping_s) / made)
        found["kept_s"].append(kept_s)
    copies.leave_round()
    dist.barrier()
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    if sys.argv[1:2] == ["rank"]:
        run_rank(*map(int, sys.argv[2:]))
    else:
        run_benchmark("time steps with and without copies in peers' memory", measure, ROUNDS)
