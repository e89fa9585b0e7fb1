"""What keeps a step from being a CUDA graph, as far as it is known without a GPU."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from echelon.config.schema import TrainerConfig
from echelon.cudagraph.capture import find_obstacle, find_step_shortage
from echelon.data.batches import Batch, TensorSource
from echelon.experiment.definition import Experiment
from echelon.experiment.precision import Precision
from echelon.parallel.ddp_replica import DDPReplica
from echelon.parallel.replica import StepRequests
from echelon.runs.heartbeat import Heartbeat
from echelon.world import detect

Given = tuple[Experiment, TensorSource]
CPU, GPU = torch.device("cpu"), torch.device("cuda")
TRAINER = TrainerConfig(batch_size=8)


def make_parts(scaler: torch.amp.GradScaler | None = None, **how: bool) -> Given:
    model, data = nn.Linear(4, 1), (torch.ones(8, 4), torch.ones(8, 1))
    optimizer = torch.optim.Adam(model.parameters(), **how)  # type: ignore[arg-type]
    source = TensorSource(data, CPU)
    source.storage_device = GPU
    return Experiment(model, optimizer, nn.functional.mse_loss, data, scaler=scaler), source


def test_a_scaler_that_the_host_asks() -> None:
    """It fails within the capture, after it has noted that gradients are unscaled."""
    scaler = torch.amp.GradScaler("cpu")
    plain, source = make_parts(scaler, foreach=True)
    reason = find_obstacle(plain, source, GPU, 1, TRAINER)
    assert reason == "the gradient scaler needs the host in every step of Adam, which is not fused"
    fused, source = make_parts(scaler, fused=True)
    fused.optimizer.param_groups[0]["lr"] = torch.tensor(0.1)
    assert find_obstacle(fused, source, GPU, 1, TRAINER) is None


@pytest.mark.parametrize(("world_size", "hindered"), [(1, False), (2, True)])
def test_ranks_that_use_different_parameters(world_size: int, hindered: bool) -> None:
    """They would send each other gradients of different lengths."""
    experiment, source = make_parts(fused=True)
    experiment.optimizer.param_groups[0]["lr"] = torch.tensor(0.1)
    trainer = TrainerConfig(batch_size=8, unused_parameters=True)
    reason = find_obstacle(experiment, source, GPU, world_size, trainer)
    assert (reason is not None) == hindered
    assert find_obstacle(experiment, source, GPU, world_size, TRAINER) is None


def test_data_without_a_whole_batch() -> None:
    """Only whole batches are of a graph's shape: it would never be replayed, without a word."""
    experiment, source = make_parts(fused=True)
    reason = find_obstacle(experiment, source, GPU, 1, TrainerConfig(batch_size=9))
    assert reason == "a batch has 9 samples, but there are only 8"


@pytest.mark.parametrize(("steps", "must"), [(63, False), (3, True)])
def test_steps_that_end_before_a_capture_is_worth_it_or_could_be(steps: int, must: bool) -> None:
    assert find_step_shortage(steps, must) == f"only {steps} steps are left"
    assert find_step_shortage(steps + 1, must) is None


def test_a_step_that_failed_halfway_leaves_nothing_to_the_next() -> None:
    """A capture may fail in its second piece, when the first has left gradients and its loss."""
    experiment, _ = make_parts()
    model, data = experiment.model, experiment.train_data
    precision, world = Precision("float32", CPU), detect({}).world
    replica = DDPReplica(
        experiment, world, CPU, TrainerConfig(accumulate=2), precision, Heartbeat()
    )
    expected = nn.functional.mse_loss(model(data[0]), data[1]).item()
    model.register_forward_pre_hook(_Fails(at=2))
    with pytest.raises(RuntimeError, match="halfway"):
        replica.run_capturable_step(data, 8, 8)
    replica.clear_gradients()
    replica.step(Batch(data, 8), 8, StepRequests())
    [told] = replica.read_results()
    assert told.loss == pytest.approx(expected)


class _Fails:
    def __init__(self, at: int) -> None:
        self.left = at

    def __call__(self, *_: object) -> None:
        self.left -= 1
        if self.left == 0:
            raise RuntimeError("halfway")
