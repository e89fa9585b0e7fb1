"""One training step on every device and one all-reduce across them.

Each rank is a process of its own (``python -m echelon.doctor.smoke_test``), because a broken CUDA
can kill the process that touches it. The parent, ``run_smoke_test``, does not import torch.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any, NamedTuple

from echelon.doctor.machine_facts import describe_exit
from echelon.hosts.message_protocol import MARK, send_message, split_message

LIMIT_S = 120.0
_CPU_RANKS = 2
_ALL_REDUCE_NUMBERS = 1 << 20
_GRACE_AFTER_FAILURE_S = 1.0


class SmokeTestResult(NamedTuple):
    """How far one rank got."""

    device: str
    loss: tuple[float, float] | None
    """Before and after a training step; None if no step was completed."""
    step_s: float
    is_sum_right: bool | None
    """Whether the all-reduce gave the right sum; None if the rank did not get to it."""
    backend: str
    reduce_s: float
    trouble: str
    """Why the rank failed; empty if it did not."""


def run_smoke_test(
    device_count: int, env: Mapping[str, str], limit_s: float = LIMIT_S
) -> list[SmokeTestResult]:
    """Run one rank on each CUDA device, or two on the CPU if there is none; return their results.

    Ranks that do not end within the limit are killed.
    """
    devices = [f"cuda:{i}" for i in range(device_count)] or ["cpu"] * _CPU_RANKS
    with tempfile.TemporaryDirectory(prefix="echelon-doctor-") as folder:
        ranks = [_start_rank(rank, devices, Path(folder), env) for rank in range(len(devices))]
        deadline = time.monotonic() + limit_s
        try:
            while any(p.poll() is None for p, _ in ranks) and time.monotonic() < deadline:
                if any(p.poll() for p, _ in ranks):  # one has failed; the others wait for it
                    deadline = min(deadline, time.monotonic() + _GRACE_AFTER_FAILURE_S)
                time.sleep(0.05)
        finally:
            late = [p.poll() is None for p, _ in ranks]
            for process, _ in ranks:
                process.kill()
                process.wait()
        return [
            _read_result(device, process.returncode, output, is_late)
            for device, (process, output), is_late in zip(devices, ranks, late, strict=True)
        ]


def _start_rank(
    rank: int, devices: list[str], folder: Path, env: Mapping[str, str]
) -> tuple[subprocess.Popen[bytes], IO[bytes]]:
    """Start a rank; its output goes to a file, because a full pipe that is not read blocks it."""
    module = "echelon.doctor.smoke_test"
    arguments = [str(rank), str(len(devices)), devices[rank], str(folder / "store")]
    output = (folder / f"rank-{rank}").open("w+b")
    variables = {"OMP_NUM_THREADS": "1"}
    if devices[0] == "cpu":
        variables["GLOO_SOCKET_IFNAME"] = "lo"
    process = subprocess.Popen(
        [sys.executable, "-m", module, *arguments],
        env=variables | dict(env),
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.STDOUT,
    )
    return process, output


def _read_result(device: str, code: int, output: IO[bytes], is_late: bool) -> SmokeTestResult:
    with output:
        output.seek(0)
        text = output.read().decode(errors="replace")
    fields: dict[str, Any] = {}
    lines = text.split("\n")  # splitlines() would split at the mark
    for line in lines:
        fields |= split_message(line)[1] or {}
    rest = "\n".join(line for line in lines if not line.startswith(MARK))
    trouble = "" if code == 0 else describe_exit(code, rest)
    if is_late:
        trouble = f"waited for the others, or hung: {describe_exit(0, rest)}"
    loss = fields.get("loss")
    return SmokeTestResult(
        device,
        (loss[0], loss[1]) if loss else None,
        fields.get("step_s", 0.0),
        fields.get("is_sum_right"),
        fields.get("backend", ""),
        fields.get("reduce_s", 0.0),
        trouble,
    )


# --- in each rank ---


def _report(**fields: Any) -> None:
    send_message(fields)


def _run_rank(rank: int, world_size: int, device: str, store: str) -> None:
    """Train a step, then all-reduce; each result is reported as soon as it is there."""
    import torch.distributed as dist

    began = time.monotonic()
    _report(loss=_train_one_step(device), step_s=round(time.monotonic() - began, 3))
    backend = "gloo" if device == "cpu" else "nccl"
    store_url = f"file://{store}"
    dist.init_process_group(backend, init_method=store_url, rank=rank, world_size=world_size)
    _report(backend=backend)
    began = time.monotonic()
    is_right = _run_all_reduce_test(rank, world_size, device)
    _report(is_sum_right=is_right, reduce_s=round(time.monotonic() - began, 3))
    sys.stdout.flush()
    os._exit(0)  # the destructor of a process group may hang


def _train_one_step(device: str) -> tuple[float, float]:
    """Return the loss before and after a step of linear regression, which has to fall."""
    import torch

    torch.manual_seed(0)
    model = torch.nn.Linear(8, 1, device=device)
    x = torch.randn(64, 8, device=device)
    y = x.sum(1, keepdim=True)
    losses = []
    for _ in range(2):
        loss = torch.nn.functional.mse_loss(model(x), y)
        losses.append(float(loss))
        model.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        with torch.no_grad():
            for parameter in model.parameters():
                assert parameter.grad is not None
                parameter.sub_(0.05 * parameter.grad)
    return losses[0], losses[1]


def _run_all_reduce_test(rank: int, world_size: int, device: str) -> bool:
    """All-reduce the numbers 1, 2, …, world size and return whether every element is their sum."""
    import torch
    import torch.distributed as dist

    if device != "cpu":
        torch.cuda.set_device(device)
    numbers = torch.full((_ALL_REDUCE_NUMBERS,), float(rank + 1), device=device)
    dist.all_reduce(numbers)
    return bool((numbers == world_size * (world_size + 1) / 2).all())


if __name__ == "__main__":
    _run_rank(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4])
