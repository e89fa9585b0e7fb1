"""A training that says and logs all that the board shows, at a pace that a test gives.

`ECHELON_TEST_PACE=FILE`: it takes as many steps as the number in this file, and waits for a higher
one. Without, each of its steps takes a while.
"""

from __future__ import annotations

import os
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch

import echelon

STEP_S = 0.02
MEDIA_STEPS = 10


@dataclass
class Settings:
    lr: float = 0.05
    hidden: int = 8
    samples: int = 64


def train(cfg: Settings, session: echelon.Session) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, cfg.hidden), torch.nn.Linear(cfg.hidden, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=cfg.lr)
    session.prepare(model, optimizer)
    x = torch.randn(cfg.samples, 4)
    for step, (inputs, targets) in enumerate(session.batches((x, x.sum(1, keepdim=True))), 1):
        _wait_for_pace(step)
        loss = torch.nn.functional.mse_loss(model(inputs), targets)
        session.backward(loss)
        session.step(optimizer)
        session.log(loss=loss)
        print(f"\x1b[32mstep {step}\x1b[0m of \x1b[1;31mthe loop\x1b[0m", flush=True)
        if step % MEDIA_STEPS == 0:
            picture = torch.rand(3, 16, 16)
            session.log(sample=echelon.Image(picture), weights=echelon.Histogram(x * step))
            session.log(prompt=f"a sentence at step {step}")


def _wait_for_pace(step: int) -> None:
    if not (name := os.environ.get("ECHELON_TEST_PACE")):
        time.sleep(STEP_S)
        return
    allowed = 0
    while allowed < step:
        with suppress(OSError, ValueError):
            allowed = int(Path(name).read_text())
        time.sleep(0.01)


if __name__ == "__main__":
    echelon.main(train)
