"""For accelerate launch: the same in Accelerate's words."""

from __future__ import annotations

import argparse

import torch
from accelerate import Accelerator
from step_marks import Marks
from toy import BATCH, FEATURES, data


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=1)
    given = parser.parse_args()
    accelerator = Accelerator(cpu=True)
    torch.manual_seed(0)
    model = torch.nn.Linear(FEATURES, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    model, optimizer = accelerator.prepare(model, optimizer)
    rank, world = accelerator.process_index, accelerator.num_processes
    x, y = data()
    mine = BATCH // world
    batches = list(zip(x.split(mine), y.split(mine), strict=True))[rank::world]
    marks = Marks()
    for step in range(given.steps):
        inputs, targets = batches[step % len(batches)]
        optimizer.zero_grad()
        accelerator.backward(torch.nn.functional.mse_loss(model(inputs), targets))
        optimizer.step()
        marks.made_step()
    accelerator.end_training()


main()
