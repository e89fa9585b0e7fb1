"""One real step of training on every device and one all-reduce across them, in processes that may
die: the parent, `smoke_test`, imports no torch."""

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
from echelon.hosts.messages import MARK, send_message, split_message

LIMIT_S = 120.0
_CPU_RANKS = 2
_ALL_REDUCE_NUMBERS = 1 << 20
"""All-reduced."""


class SmokeTestResult(NamedTuple):
    """How far one process came."""

    device: str
    loss: tuple[float, float] | None
    """Before and after a step."""
    step_s: float
    is_sum_right: bool | None
    """None: it did not come to the all-reduce."""
    backend: str
    reduce_s: float
    trouble: str


def run_smoke_test(
    devices: int, env: Mapping[str, str], limit_s: float = LIMIT_S
) -> list[SmokeTestResult]:
    """One rank on each device; without one, two on the CPU."""
    names = [f"cuda:{i}" for i in range(devices)] or ["cpu"] * _CPU_RANKS
    with tempfile.TemporaryDirectory(prefix="echelon-doctor-") as folder:
        processes = [_start_rank(rank, names, Path(folder), env) for rank in range(len(names))]
        deadline = time.monotonic() + limit_s
        try:
            while any(p.poll() is None for p, _ in processes) and time.monotonic() < deadline:
                if any(p.poll() for p, _ in processes):  # the others only wait for it
                    deadline = min(deadline, time.monotonic() + 1.0)
                time.sleep(0.05)
        finally:
            late = [p.poll() is None for p, _ in processes]
            for process, _ in processes:
                process.kill()
                process.wait()
        return [
            _read_result(name, process.returncode, output, limit_s if is_late else None)
            for name, (process, output), is_late in zip(names, processes, late, strict=True)
        ]


def _start_rank(
    rank: int, names: list[str], folder: Path, env: Mapping[str, str]
) -> tuple[subprocess.Popen[bytes], IO[bytes]]:
    """Output goes to a file: a pipe that nobody reads would stop a talkative one."""
    words = [
        sys.executable,
        "-m",
        "echelon.doctor.smoke_test",
        str(rank),
        str(len(names)),
        names[rank],
    ]
    output = (folder / f"rank-{rank}").open("w+b")
    here = {"OMP_NUM_THREADS": "1"} | ({} if names[0] != "cpu" else {"GLOO_SOCKET_IFNAME": "lo"})
    process = subprocess.Popen(
        [*words, str(folder / "store")],
        env=here | dict(env),
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.STDOUT,
    )
    return process, output


def _read_result(
    device: str, code: int, output: IO[bytes], late_s: float | None
) -> SmokeTestResult:
    with output:
        output.seek(0)
        text = output.read().decode(errors="replace")
    fields: dict[str, Any] = {}
    lines = text.split("\n")  # splitlines() would take the mark for an end of line
    for line in lines:
        fields |= split_message(line)[1] or {}
    rest = "\n".join(line for line in lines if not line.startswith(MARK))
    trouble = "" if code == 0 else describe_exit(code, rest)
    if late_s is not None:
        trouble = f"waited for the others, or hung: {describe_exit(0, rest)}"
    loss = fields.get("loss")
    return SmokeTestResult(
        device,
        (loss[0], loss[1]) if loss else None,
        fields.get("step_s", 0.0),
        fields.get("right"),
        fields.get("backend", ""),
        fields.get("reduce_s", 0.0),
        trouble,
    )


# --- in each process ---


def _report(**fields: Any) -> None:
    send_message(fields)


def _run_rank(rank: int, size: int, device: str, store: str) -> None:
    import torch.distributed as dist

    began = time.monotonic()
    _report(loss=_train_one_step(device), step_s=round(time.monotonic() - began, 3))
    backend = "gloo" if device == "cpu" else "nccl"
    dist.init_process_group(backend, init_method=f"file://{store}", rank=rank, world_size=size)
    _report(backend=backend)
    began = time.monotonic()
    _report(right=_is_sum_right(rank, size, device), reduce_s=round(time.monotonic() - began, 3))
    sys.stdout.flush()
    os._exit(0)  # a group's destructor may hang


def _train_one_step(device: str) -> tuple[float, float]:
    """The loss before and after, of a line through points that lie on one."""
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


def _is_sum_right(rank: int, size: int, device: str) -> bool:
    import torch
    import torch.distributed as dist

    if device != "cpu":
        torch.cuda.set_device(device)
    numbers = torch.full((_ALL_REDUCE_NUMBERS,), float(rank + 1), device=device)
    dist.all_reduce(numbers)
    return bool((numbers == size * (size + 1) / 2).all())


if __name__ == "__main__":
    _run_rank(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4])
