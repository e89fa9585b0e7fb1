"""One step of one process: what is clipped, and what a loss may be."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from echelon.config.schema import TrainerConfig
from echelon.data.batches import Batch
from echelon.experiment.definition import Experiment
from echelon.experiment.loss_check import require_scalar
from echelon.experiment.precision import Precision
from echelon.parallel.ddp_replica import DDPReplica
from echelon.parallel.replica import StepRequests
from echelon.runs.heartbeat import Heartbeat
from echelon.world import detect

CPU = torch.device("cpu")
DATA = (torch.arange(32.0).view(8, 4) / 32, torch.ones(8, 1))


def run_two_steps(
    loss: Callable[[Tensor, Tensor], Tensor],
    scaler: torch.amp.GradScaler | None = None,
    clip: float | None = None,
) -> list[float]:
    """Of a head that is trained on a body that is not, though nobody froze it."""
    torch.manual_seed(0)
    body, head = nn.Linear(4, 8), nn.Linear(8, 1)
    optimizer = torch.optim.SGD(head.parameters(), lr=0.1)
    experiment = Experiment(nn.Sequential(body, head), optimizer, loss, DATA, scaler=scaler)
    precision, world = Precision("float32", CPU), detect({}).world
    replica = DDPReplica(experiment, world, CPU, TrainerConfig(clip=clip), precision, Heartbeat())
    for _ in range(2):
        replica.step(Batch(DATA, 8), 8, StepRequests())
    return [told.loss for told in replica.read_results()]


def test_only_what_is_trained_is_clipped() -> None:
    """A scaler leaves the others' gradients as they are, 65,536 times too large."""
    plain = run_two_steps(nn.functional.mse_loss, clip=1.0)
    scaled = run_two_steps(nn.functional.mse_loss, torch.amp.GradScaler("cpu"), clip=1.0)
    assert plain[1] < plain[0]
    assert scaled == pytest.approx(plain)


def test_a_loss_with_one_element_is_a_number() -> None:
    def shaped(output: Tensor, target: Tensor) -> Tensor:
        return nn.functional.mse_loss(output, target).reshape(1, 1)

    assert run_two_steps(shaped) == run_two_steps(nn.functional.mse_loss)


def test_a_loss_in_half_precision_is_weighed_in_whole() -> None:
    half = torch.ones(1, dtype=torch.bfloat16, requires_grad=True)
    assert require_scalar(half).dtype == torch.float32
    double = torch.ones((), dtype=torch.float64, requires_grad=True)
    assert require_scalar(double).dtype == torch.float64


def test_an_evaluated_loss_has_no_gradient() -> None:
    with torch.no_grad():
        assert require_scalar(torch.ones(1)) == 1.0
