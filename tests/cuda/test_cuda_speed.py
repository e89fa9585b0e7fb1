"""The split of a step by events of an NVIDIA GPU, its MFU and memory, and a profile of it."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
import torch
from test_cuda_training import echelon
from torch import nn

from echelon.data.batches import Batch
from echelon.experiment.definition import Experiment
from echelon.monitoring.flops import FlopsCounter, get_peak_flops
from echelon.monitoring.speed import SpeedMonitor, StepTimestamps
from echelon.runs.metrics_file import read_metrics

pytestmark = pytest.mark.gpu

TINY = ["experiment=transformer", "eval_samples=0", "trainer.steps=64", "trainer.log_steps=16"]


def test_lines_have_the_split_and_the_memory(tmp_path: Path) -> None:
    done = echelon(tmp_path, "train", "run.name=a", *TINY, "trainer.capture=never")
    assert done.returncode == 0, done.stderr
    lines = [line for line in read_metrics(tmp_path / "runs/a/metrics.jsonl") if "loss" in line]
    split = [line for line in lines if "compute_ms" in line]
    assert split
    for line in split:
        assert all(line[f"{part}_ms"] > 0 for part in ("data", "compute", "optimizer"))
    assert 0 < lines[0]["memory_gb"] < 1, "of the device, where little is; not of the process"


def test_mfu_by_events_that_nobody_waits_for() -> None:
    class Stepper:
        step_timer: StepTimestamps | None = None

    device, stepper = torch.device("cuda:0"), Stepper()
    model = nn.Linear(256, 256).to(device)
    given = Experiment(model, torch.optim.SGD(model.parameters(), lr=0.1), nn.MSELoss(), None)
    peak = get_peak_flops("NVIDIA H200", "float32")
    assert peak is not None
    flops = FlopsCounter(given, peak)
    speed = SpeedMonitor([device], flops)
    speed._begun -= 60.0  # as if it ran for a minute
    data = torch.ones(64, 256, device=device)
    for batch in speed.sample_batches([Batch((data, data), 64)] * 20, stepper):
        nn.functional.mse_loss(model(batch.data[0]), data).backward()  # type: ignore[index, no-untyped-call]
        if stepper.step_timer is not None:
            stepper.step_timer.record("reduced")
            stepper.step_timer.record("stepped")
    torch.cuda.synchronize()
    line = speed.measure_interval(20, 20 * 64)
    assert flops.flops_per_sample == 2 * 2 * 256 * 256
    assert line["mfu"] == pytest.approx(
        line["samples_per_s"] * flops.flops_per_sample / peak, abs=1e-4
    )
    assert line["compute_ms"] > 0


def test_a_profile_has_kernels(tmp_path: Path) -> None:
    done = echelon(tmp_path, "train", "run.name=a", *TINY, "trainer.profile=3")
    assert done.returncode == 0, done.stderr
    assert "GPU MS" in done.stderr
    [file] = (tmp_path / "runs/a/traces").iterdir()
    with gzip.open(file) as opened:
        events = json.load(opened)["traceEvents"]
    assert any(event.get("cat") == "kernel" for event in events)
