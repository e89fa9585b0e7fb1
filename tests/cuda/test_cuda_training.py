"""On one NVIDIA GPU, with the machine's own Python: `make test-gpu`."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from echelon.data.batches import make_source
from echelon.gpus import count_visible_gpus
from echelon.runs.metrics_file import read_metrics

pytestmark = pytest.mark.gpu

STEPS = ["trainer.log_steps=1", "hidden=16", "samples=640", "eval_samples=64", "trainer.epochs=2"]


def echelon(folder: Path, *words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "echelon", *words],
        cwd=folder,
        env=os.environ | variables,
        capture_output=True,
        text=True,
        timeout=300,
    )


def losses(folder: Path, name: str) -> list[float]:
    return [
        line["loss"]
        for line in read_metrics(folder / "runs" / name / "metrics.jsonl")
        if "lr" in line
    ]


def test_the_curve_is_the_one_of_the_cpu(tmp_path: Path) -> None:
    on_gpu = echelon(tmp_path, "train", "run.name=gpu", *STEPS)
    on_cpu = echelon(tmp_path, "train", "run.name=cpu", *STEPS, CUDA_VISIBLE_DEVICES="")
    assert on_gpu.returncode == on_cpu.returncode == 0, on_gpu.stderr + on_cpu.stderr
    assert "(cuda:0)" in on_gpu.stderr
    assert "(cpu)" in on_cpu.stderr
    assert losses(tmp_path, "gpu") == pytest.approx(losses(tmp_path, "cpu"), rel=1e-3, abs=1e-5)


def test_two_processes_share_the_gpu_only_by_setting(tmp_path: Path) -> None:
    one = [*STEPS, "launch=local", "launch.procs=2"]
    variables = {"CUDA_VISIBLE_DEVICES": "0"}
    refused = echelon(tmp_path, "train", *one, **variables)
    assert refused.returncode == 2
    assert "launch.share_devices=true" in refused.stderr
    allowed = echelon(
        tmp_path, "train", "run.name=two", *one, "launch.share_devices=true", **variables
    )
    assert allowed.returncode == 0, allowed.stderr
    single = echelon(tmp_path, "train", "run.name=one", *STEPS, **variables)
    assert single.returncode == 0, single.stderr
    assert losses(tmp_path, "two") == pytest.approx(losses(tmp_path, "one"), rel=1e-3, abs=1e-5)


def test_stopped_and_resumed_the_curve_goes_on(tmp_path: Path) -> None:
    whole = echelon(tmp_path, "train", "run.name=whole", *STEPS)
    assert whole.returncode == 0, whole.stderr
    command = [sys.executable, "-m", "echelon", "train", "run.name=cut", *STEPS]
    slow = [*command, "trainer.save.steps=1"]
    process = subprocess.Popen(slow, cwd=tmp_path, stderr=subprocess.PIPE, text=True)
    snapshots = tmp_path / "runs" / "cut" / "snapshots"
    deadline = time.monotonic() + 300
    while not list(snapshots.glob("step-*")) and process.poll() is None:
        assert time.monotonic() < deadline
        time.sleep(0.005)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=300)
    if process.returncode != 0:  # it may have been quicker than the signal
        assert process.returncode == 75
        again = subprocess.run(slow, cwd=tmp_path, capture_output=True, text=True, timeout=300)
        assert again.returncode == 0, again.stderr
    assert losses(tmp_path, "cut") == pytest.approx(losses(tmp_path, "whole"), rel=1e-4, abs=1e-6)


def test_a_bad_loss_is_noticed_at_its_own_step(tmp_path: Path) -> None:
    """Losses are read every few steps on a GPU, but the report names the very one."""
    (tmp_path / "bad.py").write_text(
        """
import echelon, torch

class Data(torch.utils.data.Dataset):
    def __len__(self): return 400
    def __getitem__(self, i): return torch.ones(2), torch.ones(1)

def experiment(cfg):
    model = torch.nn.Linear(2, 1)
    calls = [0]
    def loss(output, target):
        calls[0] += model.training  # not in the check of the loss before the first step
        mean = torch.nn.functional.mse_loss(output, target)
        return mean * float("nan") if calls[0] == 21 else mean
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return echelon.Experiment(model, optimizer, loss, Data())
"""
    )
    words = ["experiment=bad.py:experiment", "trainer.batch_size=4", "trainer.log_steps=1000"]
    result = echelon(tmp_path, "train", *words)
    assert result.returncode == 1
    assert "the loss is nan at step 21" in result.stderr


def test_devices_are_counted_as_cuda_does() -> None:
    for visible in (None, "", "0", "0,0", "-1", "7,0", "0,7"):
        variables = {k: v for k, v in os.environ.items() if k != "CUDA_VISIBLE_DEVICES"}
        if visible is not None:
            variables["CUDA_VISIBLE_DEVICES"] = visible
        code = "import torch; print(torch.cuda.device_count() if torch.cuda.is_available() else 0)"
        out = subprocess.run(
            [sys.executable, "-c", code], env=variables, capture_output=True, text=True
        )
        assert count_visible_gpus(variables) == int(out.stdout), visible


def test_tensors_move_to_the_device_when_they_fit() -> None:
    source = make_source((torch.ones(10, 2), torch.ones(10)), "data", 0, torch.device("cuda"))
    assert all(t.is_cuda for t in source.tensors)  # type: ignore[attr-defined]


def test_ddp_over_nccl_with_one_rank(tmp_path: Path) -> None:
    """One GPU has one rank of NCCL; requests and loss travel with its all-reduce."""
    from echelon.config.schema import TrainerConfig
    from echelon.data.batches import Batch
    from echelon.experiment.definition import Experiment
    from echelon.experiment.precision import Precision
    from echelon.parallel.ddp_replica import DDPReplica
    from echelon.parallel.ddp_wrap import wrap_in_ddp
    from echelon.parallel.replica import StepRequests
    from echelon.runs.heartbeat import Heartbeat
    from echelon.world import detect

    if not dist.is_initialized():  # another test of this process may have left its group
        store = dist.FileStore(str(tmp_path / "store"), 1)
        dist.init_process_group("cpu:gloo,cuda:nccl", store=store, rank=0, world_size=1)
    device = torch.device("cuda:0")
    model = torch.nn.Linear(2, 1).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    experiment = Experiment(model, optimizer, torch.nn.functional.mse_loss, None)
    precision = Precision("float32", device)
    replica = DDPReplica(
        experiment, detect({}).world, device, TrainerConfig(), precision, Heartbeat()
    )
    replica.accumulate_steps = 2  # through DDP, which one rank does not need
    replica._ddp = wrap_in_ddp(replica._objective, unused_parameters=False, tables=[])
    data = (torch.ones(4, 2, device=device), torch.ones(4, 1, device=device))
    expected = float(torch.nn.functional.mse_loss(model(data[0]), data[1]))
    replica.step(Batch(data, 4), 4, StepRequests(stop=True))
    [told] = replica.read_results()
    assert told.requests == StepRequests(stop=True)
    assert told.loss == pytest.approx(expected)


def test_explain_names_the_device(tmp_path: Path) -> None:
    told = json.loads(echelon(tmp_path, "explain", "--json").stdout)
    assert told["world"]["devices"] == ["cuda:0"]
