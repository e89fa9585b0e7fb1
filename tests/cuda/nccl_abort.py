"""A process of one rank ends its NCCL communicator while a collective waits, and makes another.

What a survivor of a lost rank would have to do: it prints what it found.
"""

from __future__ import annotations

import json
import sys

import torch
import torch.distributed as dist

_WAIT_CYCLES = 10**10
"""Of the GPU's clock: some seconds."""


def main(folder: str) -> None:
    device = torch.device("cuda:0")
    torch.cuda.set_device(device)
    weights = torch.arange(1024.0, device=device)
    open_group(folder, 0)
    dist.all_reduce(weights.clone())  # makes the communicator
    torch.cuda.synchronize()
    torch.cuda._sleep(_WAIT_CYCLES)  # type: ignore[no-untyped-call]
    waiting = dist.all_reduce(weights.clone(), async_op=True)
    was_waiting = not waiting.is_completed()
    dist.distributed_c10d._abort_process_group()
    torch.cuda.synchronize()
    open_group(folder, 1)
    reduced = weights.clone()
    dist.all_reduce(reduced)
    torch.cuda.synchronize()
    is_right = bool((reduced == torch.arange(1024.0, device=device)).all())
    print(json.dumps({"was_waiting": was_waiting, "is_right": is_right}), flush=True)
    dist.destroy_process_group()


def open_group(folder: str, number: int) -> None:
    store = dist.FileStore(f"{folder}/store-{number}", 1)
    dist.init_process_group("nccl", store=store, rank=0, world_size=1)


if __name__ == "__main__":
    main(sys.argv[1])
