"""Train a small stack whole and sharded, in a world of one rank, and print both curves as JSON.

    python tests/cuda/fsdp_single_rank.py cuda fp16 true hybrid

A world of one is no use to a person, but it takes every way through NCCL and the device's memory
that a shard takes, on a machine with one GPU. `hybrid` reduces gradients over replicas too, of
which there is one.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import echelon
from echelon.config.schema import TrainerConfig
from echelon.data.batches import Batch, make_source
from echelon.experiment.optimizer_flags import enable_fused_kernels
from echelon.experiment.precision import Precision
from echelon.parallel.ddp_replica import DDPReplica
from echelon.parallel.filler_batch import FillerBatch
from echelon.parallel.fsdp_replica import FSDPReplica
from echelon.parallel.fsdp_wrap import make_mesh, shard_model
from echelon.parallel.layer_blocks import checkpoint_blocks, find_blocks
from echelon.parallel.replica import StepRequests
from echelon.runs.heartbeat import Heartbeat
from echelon.snapshot.shards import extract_own_shard
from echelon.snapshot.staging_buffer import StagingBuffer
from echelon.world import World

STEPS, SAMPLES, WIDTH = 8, 12, 16


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.wide = nn.Linear(WIDTH, 3 * WIDTH)
        self.back = nn.Linear(3 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = x + self.back(nn.functional.gelu(self.wide(self.norm(x))))
        return found


def experiment() -> echelon.Experiment:
    torch.manual_seed(1)
    model = nn.Sequential(*(Block() for _ in range(4)), nn.Linear(WIDTH, 1))
    x = torch.randn(SAMPLES, WIDTH)
    return echelon.Experiment(
        model=model,
        optimizer=torch.optim.AdamW(model.parameters(), lr=0.01),
        loss=nn.functional.mse_loss,
        train_data=(x, x.sum(1, keepdim=True)),
    )


def curve(
    kind: str, device: torch.device, name: str, again: bool, subgroups: Sequence[Any] = ()
) -> tuple[list[float], Any]:
    made = experiment()
    trainer = TrainerConfig(precision=name, clip=1.0, accumulate=2)
    world = World(0, 1, 0, 1, 0, 1, None, "test", (str(device),))
    precision = Precision(name, device)
    blocks = find_blocks(made.model, ["Block"])
    if again:
        checkpoint_blocks(blocks)
    if kind == "whole":
        made.model.to(device)
    precision.configure(made)
    enable_fused_kernels(made.optimizer, made.model, device)
    source = make_source(made.train_data, "train_data", 0, device)
    if kind == "whole":
        replica: Any = DDPReplica(made, world, device, trainer, precision, Heartbeat())
    else:
        shard_model(made, blocks, device, trainer, make_mesh(subgroups, 1, device.type))
        spare = FillerBatch(source, device)
        replica = FSDPReplica(made, world, device, trainer, precision, Heartbeat(), spare)
    data = tuple(t.to(device) for t in made.train_data)
    for _ in range(STEPS):
        replica.step(Batch(data, SAMPLES), SAMPLES, StepRequests())
    state = {"model": made.model.state_dict(), "optimizer": made.optimizer.state_dict()}
    return [result.loss for result in replica.read_results()], state


def main(device_name: str, precision: str, again: str, kind: str) -> None:
    device = torch.device(device_name, 0) if device_name == "cuda" else torch.device(device_name)
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    with tempfile.TemporaryDirectory() as folder:
        store = dist.FileStore(str(Path(folder) / "store"), 1)
        dist.init_process_group(backend, store=store, rank=0, world_size=1)
        subgroups = [dist.new_group([0]) for _ in range(2) if kind == "hybrid"]
        whole, _ = curve("whole", device, precision, again == "true")
        shared, state = curve("shared", device, precision, again == "true", subgroups)
        places = {p.device.type for p in state["model"].values()}
        staged = StagingBuffer().begin_copy({"state": extract_own_shard(state, 0)})()
        print(json.dumps({"whole": whole, "shared": shared, "places": list(places)}))
        assert staged["state"]["model"].keys() == state["model"].keys()
        dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
