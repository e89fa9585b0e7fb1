"""What the check of an experiment's parts says of models that are made parallel already."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel

from echelon import Experiment
from echelon.experiment.checks import find_part_faults


@pytest.fixture
def _group() -> Iterator[None]:
    """A process group of this process alone, which the wrappers need."""
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    yield
    dist.destroy_process_group()


def shard_first_layer(model: nn.Sequential) -> nn.Module:
    fully_shard(model[0], mesh=dist.device_mesh.init_device_mesh("cpu", (1,)))
    return model


WRAPPERS: dict[str, tuple[Callable[[Any], nn.Module], str]] = {
    "DistributedDataParallel": (DistributedDataParallel, "it is"),
    "FullyShardedDataParallel": (
        lambda model: FullyShardedDataParallel(model, device_id=torch.device("cpu")),
        "it is",
    ),
    "FSDPModule": (shard_first_layer, "its part '0' is"),
}


@pytest.mark.filterwarnings("ignore:FSDP is switching to use `NO_SHARD`:UserWarning")
@pytest.mark.usefixtures("_group")
@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize("is_optimizer_first", [True, False])
def test_a_model_is_not_made_parallel_twice(wrapper: str, is_optimizer_first: bool) -> None:
    wrap, which = WRAPPERS[wrapper]
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    wrapped = wrap(model)
    if not is_optimizer_first:
        optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
    data = (torch.ones(8, 4), torch.ones(8, 1))
    [fault] = find_part_faults(Experiment(wrapped, optimizer, nn.functional.mse_loss, data))
    assert f"{which} wrapped in {wrapper}, and Echelon wraps the whole model itself" in fault.what
    assert "return the plain model" in fault.do
