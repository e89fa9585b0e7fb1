"""One rank of the all-reduce of a preflight: is the sum right, and how long does it take?

A program of its own (``python -m echelon.preflight.all_reduce NUMBERS LIMIT_S``), because torch is
slow to import and may crash. It gets its place in the world from the environment, as torchrun's
workers do, and prints its result as JSON.
"""

from __future__ import annotations

import json
import os
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist

from echelon.doctor.torch_facts import read_nccl_version
from echelon.gpus import count_visible_gpus


def run_all_reduce(number_count: int, limit_s: float) -> dict[str, object]:
    """All-reduce a tensor across all ranks and return whether each element is right."""
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    gpu_count = count_visible_gpus(os.environ) if torch.version.cuda else 0
    device = f"cuda:{int(os.environ['LOCAL_RANK']) % gpu_count}" if gpu_count else "cpu"
    if gpu_count:
        torch.cuda.set_device(device)
    backend = "nccl" if gpu_count else "gloo"
    dist.init_process_group(backend, timeout=timedelta(seconds=limit_s))
    dist.all_reduce(torch.ones(1, device=device))  # opens the connections, which is not timed
    values = torch.full((number_count,), float(rank + 1), device=device)
    began = time.monotonic()
    dist.all_reduce(values)
    total = float(values[-1])  # waits for the device
    took_s = time.monotonic() - began
    return {
        "is_sum_right": bool((values == world_size * (world_size + 1) / 2).all()),
        "sum": total,
        "took_s": took_s,
        "device": device,
        "backend": backend,
        "torch": torch.__version__,
        "nccl": read_nccl_version() if gpu_count else None,
    }


if __name__ == "__main__":
    print(json.dumps(run_all_reduce(int(sys.argv[1]), float(sys.argv[2]))), flush=True)
    os._exit(0)  # the destructor of a process group may hang
