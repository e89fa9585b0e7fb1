"""A replica on several devices, with GPUs: `make test-gpu`. Where there is one only, the CPU is the
second device of what can be tried without a process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from test_cuda_training import losses
from torch import Tensor, nn

from echelon import Experiment
from echelon.errors import EchelonError
from echelon.gpus import count_visible_gpus
from echelon.parallel.model_parallel import SampleBatch, split_model
from echelon.snapshot.state import pack_rng_state, restore_rng_state

pytestmark = pytest.mark.gpu

OWN = """
import torch, echelon
from torch import nn

def experiment(cfg):
    layers = [m for _ in range(4) for m in (nn.Linear(32, 32), nn.Tanh())]
    model = nn.Sequential(*layers, nn.Linear(32, 1))
    x = torch.rand(320, 32, generator=torch.Generator().manual_seed(1))
    data = (x, x.sum(1, keepdim=True))
    return echelon.Experiment(
        model=model,
        optimizer=torch.optim.Adam(model.parameters(), lr=0.01),
        loss=nn.functional.mse_loss,
        train_data=data,
        eval_data=data,
    )

if __name__ == "__main__":
    echelon.main(experiment)
"""
WORDS = ("trainer.log_steps=1", "trainer.clip=0.5")


def train(folder: Path, *words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    (folder / "own.py").write_text(OWN)
    return subprocess.run(
        [sys.executable, "own.py", *WORDS, *words],
        cwd=folder,
        env=os.environ | variables,
        capture_output=True,
        text=True,
        timeout=300,
    )


@pytest.mark.parametrize("launch", [[], ["launch=local"]], ids=["inline", "local"])
def test_two_devices_where_one_is_visible(tmp_path: Path, launch: list[str]) -> None:
    done = train(tmp_path, "replica.devices=2", *launch, CUDA_VISIBLE_DEVICES="0")
    assert done.returncode == 2, done.stderr
    assert "replica.devices=2, but 1 " in done.stderr
    assert "device is visible" in done.stderr
    assert "set replica.devices=1" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.skipif(count_visible_gpus(os.environ) < 2, reason="needs two GPUs")
def test_two_devices_give_the_curve_of_one(tmp_path: Path) -> None:
    one = train(tmp_path, "run.name=one")
    two = train(tmp_path, "run.name=two", "replica.devices=2")
    assert one.returncode == two.returncode == 0, one.stderr + two.stderr
    assert "one process × 2 devices (cuda:0: 0 … " in two.stderr
    assert losses(tmp_path, "two") == pytest.approx(losses(tmp_path, "one"), rel=1e-4)
    again = train(tmp_path, "run.name=two", "trainer.epochs=4")
    assert again.returncode == 0, again.stderr


@pytest.mark.skipif(count_visible_gpus(os.environ) < 4, reason="needs four GPUs")
def test_two_processes_of_two_devices(tmp_path: Path) -> None:
    one = train(tmp_path, "run.name=one")
    two = train(tmp_path, "run.name=two", "replica.devices=2", "launch=local", "launch.procs=2")
    assert one.returncode == two.returncode == 0, one.stderr + two.stderr
    assert losses(tmp_path, "two") == pytest.approx(losses(tmp_path, "one"), rel=1e-3)


# ---- one GPU and the CPU ------------------------------------------------------------------------

GPU, CPU = torch.device("cuda", 0), torch.device("cpu")


def _experiment(model: nn.Module) -> Experiment:
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    return Experiment(model, optimizer, nn.functional.mse_loss, None)


def _curve(devices: tuple[torch.device, torch.device]) -> list[float]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 16), nn.Linear(16, 1))
    experiment = _experiment(model)
    x = torch.rand(32, 8)
    y = x.sum(1, keepdim=True)
    split_model(experiment, ("first", "second"), devices, SampleBatch((x[:2], y[:2]), 16.0))
    assert {p.device for p in model.parameters()} == set(devices)
    assert experiment.predict is not None
    curve = []
    for _ in range(20):
        output, target = experiment.predict(model, (x.to(devices[0]), y.to(devices[0])))
        loss = experiment.loss(output, target)
        assert (output.device, loss.device) == (devices[1], devices[0])
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        experiment.optimizer.step()
        experiment.optimizer.zero_grad()
        curve.append(loss.item())
    return curve


@pytest.mark.parametrize("devices", [(GPU, CPU), (CPU, GPU)], ids=["to the CPU", "from the CPU"])
def test_stages_of_unlike_devices_train_alike(devices: tuple[torch.device, torch.device]) -> None:
    assert _curve(devices) == pytest.approx(_curve((CPU, CPU)), rel=1e-3)


def test_a_forward_that_mixes_stages_is_told_before_the_first_step() -> None:
    class Skips(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

        def forward(self, x: Tensor) -> Tensor:
            return self.layers[3](self.layers[2](x)) + self.layers[0](x)  # type: ignore[no-any-return]

    sample = SampleBatch((torch.zeros(2, 8), torch.zeros(2, 8)), 1.0)
    with pytest.raises(EchelonError) as told:
        split_model(_experiment(Skips()), ("cuda:0", "cuda:1"), (GPU, CPU), sample)
    [fault] = told.value.faults
    assert "the forward of Skips uses tensors of two stages at once" in fault.what
    assert "def experiment(cfg, devices)" in fault.do


def test_random_numbers_of_every_device_are_kept() -> None:
    row = pack_rng_state(GPU, GPU)  # as of two
    first = torch.rand(4, device=GPU)
    restore_rng_state(row, GPU, GPU)
    assert torch.equal(torch.rand(4, device=GPU), first)
    assert len(row) - len(pack_rng_state(GPU)) == torch.cuda.get_rng_state(GPU).numel()
    restore_rng_state(row, GPU)  # on fewer, the first ones
    assert torch.equal(torch.rand(4, device=GPU), first)
