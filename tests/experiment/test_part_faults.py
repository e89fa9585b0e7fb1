"""What the check of an experiment's parts says of models that are made parallel already, and of how
batches are made."""

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


@pytest.mark.parametrize(
    ("fields", "parts"),
    [
        ({"collate_fn": 3}, [("collate_fn is of type int", "list of samples")]),
        ({"collate_fn": lambda: 1}, [("collate_fn does not take one argument", "list")]),
        ({"batch_transform": 3}, [("batch_transform is of type int", "(batch) → batch")]),
        (
            {"sampler": torch.utils.data.RandomSampler, "batch_sampler": 5},
            [
                ("sampler is the class RandomSampler", "WeightedRandomSampler"),
                ("batch_sampler is of type int", "DataLoader"),
                ("both a sampler and a batch_sampler", "one of them"),
            ],
        ),
        ({"sampler": iter([1])}, [("sampler is an iterator", "begins anew")]),
        (
            {"sampler": torch.utils.data.DistributedSampler(range(8), 2, 0)},  # type: ignore[arg-type]
            [("the share of one of 2 processes", "leave it out")],
        ),
        ({"loader": [4]}, [("loader is of type list", "a dict")]),
        (
            {"loader": {"num_workers": 2, "batch_size": 8, "prefetch": 3, "timeout": 5}},
            [
                ("loader sets num_workers", "trainer.loader_workers"),
                ("loader sets batch_size", "trainer.batch_size"),
                ("loader has no option 'prefetch'", "prefetch_factor"),
            ],
        ),
    ],
)
def test_how_batches_are_made_is_checked(
    fields: dict[str, Any], parts: list[tuple[str, str]]
) -> None:
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = (torch.ones(8, 4), torch.ones(8, 1))
    faults = list(
        find_part_faults(Experiment(model, optimizer, nn.functional.mse_loss, data, **fields))
    )
    assert len(faults) == len(parts)
    for fault, (what, do) in zip(faults, parts, strict=True):
        assert what in fault.what
        assert do in fault.do
