"""One rank of preflight's all-reduce: is the sum right, and how fast does it come."""

from __future__ import annotations

import json
import os
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist

from echelon.gpus import count_visible_gpus


def run_all_reduce(numbers: int, limit_s: float) -> dict[str, object]:
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    visible = count_visible_gpus(os.environ) if torch.version.cuda else 0
    device = f"cuda:{int(os.environ['LOCAL_RANK']) % visible}" if visible else "cpu"
    if visible:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if visible else "gloo", timeout=timedelta(seconds=limit_s))
    dist.all_reduce(torch.ones(1, device=device))  # opens the connections
    values = torch.full((numbers,), float(rank + 1), device=device)
    began = time.monotonic()
    dist.all_reduce(values)
    total = float(values[-1])  # waits for the device
    took_s = time.monotonic() - began
    return {
        "right": bool((values == size * (size + 1) / 2).all()),
        "sum": total,
        "s": took_s,
        "device": device,
        "backend": "nccl" if visible else "gloo",
        "torch": torch.__version__,
        "nccl": _read_nccl_version() if visible else None,
    }


def _read_nccl_version() -> str:
    return ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]


if __name__ == "__main__":
    print(json.dumps(run_all_reduce(int(sys.argv[1]), float(sys.argv[2]))), flush=True)
    os._exit(0)  # a group's destructor may hang
