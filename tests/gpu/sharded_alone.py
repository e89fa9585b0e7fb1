"""Train a small stack whole and sharded, in a world of one rank, and print both curves as JSON.

    python tests/gpu/sharded_alone.py cuda fp16 true

A world of one is no use to a person, but it takes every way through NCCL and the device's memory
that a shard takes, on a machine with one GPU.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import echelon
from echelon.config.schema import Trainer
from echelon.data.batches import Batch, source_of
from echelon.pulse import Pulse
from echelon.train.blocks import blocks_of, recompute
from echelon.train.optimizers import fuse
from echelon.train.pieces import cut
from echelon.train.precision import Precision
from echelon.train.replica import Replica, Wishes
from echelon.train.sharded import ShardedReplica, Spare
from echelon.train.sharding import shard
from echelon.train.staging import Stage
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


def curve(kind: str, device: torch.device, name: str, again: bool) -> tuple[list[float], Any]:
    made = experiment()
    trainer = Trainer(precision=name, clip=1.0, accumulate=2)
    world = World(0, 1, 0, 1, 0, 1, None, "test", (str(device),))
    precision = Precision(name, device)
    blocks = blocks_of(made.model, ["Block"])
    if again:
        recompute(blocks)
    if kind == "whole":
        made.model.to(device)
    precision.use(made)
    fuse(made, device)
    source = source_of(made.train_data, "train_data", 0, device)
    if kind == "whole":
        replica: Any = Replica(made, world, device, trainer, precision, Pulse())
    else:
        shard(made, blocks, device, trainer)
        spare = Spare(source, device)
        replica = ShardedReplica(made, world, device, trainer, precision, Pulse(), spare)
    data = tuple(t.to(device) for t in made.train_data)
    for _ in range(STEPS):
        replica.step(Batch(data, SAMPLES), SAMPLES, Wishes())
    state = {"model": made.model.state_dict(), "optimizer": made.optimizer.state_dict()}
    return [told.loss for told in replica.told()], state


def main(device_name: str, precision: str, again: str) -> None:
    device = torch.device(device_name, 0) if device_name == "cuda" else torch.device(device_name)
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    with tempfile.TemporaryDirectory() as folder:
        store = dist.FileStore(str(Path(folder) / "store"), 1)
        dist.init_process_group(backend, store=store, rank=0, world_size=1)
        whole, _ = curve("whole", device, precision, again == "true")
        shared, state = curve("shared", device, precision, again == "true")
        places = {p.device.type for p in state["model"].values()}
        staged = Stage().copy({"state": cut(state, 0)})
        print(json.dumps({"whole": whole, "shared": shared, "places": list(places)}))
        assert staged["state"]["model"].keys() == state["model"].keys()
        dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
