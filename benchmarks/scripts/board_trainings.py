"""Trainings that a board looks at: so many processes, each with a run of its own.

    python board_trainings.py ROOT COUNT COUNTERS [--paced]

They are forked by one that has imported torch, so that a hundred fit into memory; each trains a toy
in a loop of its own, with a session, and counts its steps in COUNTERS, eight bytes for each of
them. With --paced there is one, which takes a step for each line of its input, logs the loss of it,
and says when.
"""

from __future__ import annotations

import mmap
import os
import struct
import sys
import time
from pathlib import Path

import torch
from torch import nn

import echelon
from echelon.train.script_session import ScriptSession  # before the fork

EPOCHS = 100_000
LOG_STEPS = 5
WIDTH, BATCH = 256, 256
assert ScriptSession


def train(root: Path, number: int, counters: mmap.mmap, is_paced: bool) -> None:
    words = [f"run.name=train-{number:03d}", f"run.dir={root}", "track.progress=none"]
    words += ["trainer.batch_size=256", f"trainer.log_steps={1 if is_paced else LOG_STEPS}"]
    torch.manual_seed(number)
    with echelon.session(*words) as session:
        model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
        session.prepare(model, optimizer)
        x = torch.randn(4 * BATCH, WIDTH)
        batches = session.batches((x, x.sum(1, keepdim=True)), epochs=EPOCHS)
        for step, (inputs, targets) in enumerate(batches, 1):
            if is_paced and not sys.stdin.readline():
                break
            loss = nn.functional.mse_loss(model(inputs), targets)
            session.backward(loss)
            session.step(optimizer)
            said = time.time()
            session.log(loss=loss)
            struct.pack_into("=q", counters, 8 * number, step)
            if is_paced:
                print(step, said, flush=True)


def main() -> None:
    root, count, file = Path(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    is_paced = "--paced" in sys.argv
    torch.set_num_threads(1)
    with file.open("r+b") as opened:
        counters = mmap.mmap(opened.fileno(), 0)
    if is_paced:
        train(root, 0, counters, is_paced)
        return
    for number in range(count):
        if os.fork() == 0:
            try:
                train(root, number, counters, is_paced)
            finally:
                os._exit(1)
    while True:
        os.wait()


if __name__ == "__main__":
    main()
