"""What a real NVIDIA GPU counts of errors, beside nvidia-smi, and what it costs to look."""

from __future__ import annotations

import os
import shutil
import subprocess
import time

import pytest
import torch

from echelon.gpus.error_counts import GpuErrorCounts
from echelon.gpus.nvml import open_nvml

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(shutil.which("nvidia-smi") is None, reason="there is no nvidia-smi"),
]


def query(about: str, *fields: str) -> list[int | None]:
    """The numbers of the first GPU; None for what it does not report."""
    words = [
        "nvidia-smi",
        "-i",
        "0",
        f"--query-{about}={','.join(fields)}",
        "--format=csv,noheader",
    ]
    done = subprocess.run(words, capture_output=True, text=True, timeout=300)
    cells = [cell.strip() for cell in done.stdout.partition("\n")[0].split(",")]
    if done.returncode or len(cells) != len(fields):
        return [None] * len(fields)
    return [int(cell) if cell.isdecimal() else {"No": 0, "Yes": 1}.get(cell) for cell in cells]


def test_the_counts_are_those_of_nvidia_smi() -> None:
    with open_nvml() as nvml:
        counts = nvml.open_device(0).read_error_counts()
    (errors,) = query("gpu", "ecc.errors.uncorrected.volatile.total")
    rows = ("uncorrectable", "pending", "failure")
    remapped = query("remapped-rows", *(f"remapped_rows.{name}" for name in rows))
    print(f"counts: {counts}, nvidia-smi: {errors}, {remapped}")
    assert counts.get("uncorrected memory errors") == errors
    names = ("rows remapped for uncorrected errors", "pending row remappings")
    assert [counts.get(name) for name in (*names, "failed row remappings")] == remapped


def test_nothing_new_is_found_while_a_healthy_gpu_computes() -> None:
    counts = GpuErrorCounts(os.environ, torch.cuda.device_count())
    assert not counts.is_empty
    numbers = torch.randn(2048, 2048, device="cuda")
    began, looks = time.perf_counter(), 100
    for _ in range(looks):
        numbers = numbers @ numbers / 2048
        assert counts.find_new_errors() == ""
    print(f"{1e3 * (time.perf_counter() - began) / looks:.3f} ms a look")
    torch.cuda.synchronize()
    counts.close()
