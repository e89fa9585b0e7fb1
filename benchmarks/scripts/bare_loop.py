"""For torchrun: the tutorial's DDP script over ready batches, resuming from torch.save's file."""

from __future__ import annotations

import argparse
import os

import torch
import torch.distributed as dist
from step_marks import Marks
from torch.nn.parallel import DistributedDataParallel
from toy import BATCH, FEATURES, data


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=1)
    parser.add_argument("--save-every", type=int, default=0)
    given = parser.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = torch.nn.Linear(FEATURES, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    step = 0
    if os.path.exists("snapshot.pt"):
        saved = torch.load("snapshot.pt", weights_only=True)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        step = saved["step"]
    ddp = DistributedDataParallel(model)
    x, y = data()
    mine = BATCH // world
    batches = list(zip(x.split(mine), y.split(mine), strict=True))[rank::world]
    marks = Marks()
    while step < given.steps:
        inputs, targets = batches[step % len(batches)]
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(ddp(inputs), targets).backward()
        optimizer.step()
        step += 1
        marks.made_step()
        if given.save_every and step % given.save_every == 0 and rank == 0:
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save({**state, "step": step}, "snapshot.tmp")
            os.replace("snapshot.tmp", "snapshot.pt")
    dist.destroy_process_group()


main()
