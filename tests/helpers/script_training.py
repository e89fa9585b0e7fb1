"""A script with a command line of its own, whose training is a session; and what it may get wrong.

As a program: `python script_training.py --lr 0.05 --once FILE`.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from pathlib import Path

import session_loops
import torch
from torch import nn

import echelon
from echelon.train.stop_signals import STOP_SIGNALS


def train_forked(rank: int, master: str, world_size: int, words: list[str], mistake: str) -> None:
    """One rank, forked by a test: the settings give its place."""
    place = [f"rank={rank}", f"world_size={world_size}", f"master={master}"]
    words = [*words, *(place if world_size > 1 else [])]
    cfg = session_loops.Settings()
    handlers = [signal.getsignal(number) for number in STOP_SIGNALS]
    block = echelon.session(*words, settings={"lr": cfg.lr, "folder": Path("a")})
    if mistake == "no block":
        block.prepare(nn.Linear(1, 1))
    with block as session:
        if mistake == "within":
            with echelon.session(*words):
                raise AssertionError("a session within a session")
        if mistake == "sys.exit":
            sys.exit(3)
        if mistake != "no loop":
            session_loops.regression(cfg, session)
        if mistake == "sys.exit(0)":
            sys.exit(0)
    if mistake == "late":
        session.log(loss=1.0)
    if mistake == "second":
        with echelon.session(*words, "run.name=second") as another:
            session_loops.regression(cfg, another)
    assert [signal.getsignal(number) for number in STOP_SIGNALS] == handlers
    print(f"rank {session.rank} goes on after the block", file=sys.stderr)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--lr", type=float, required=True)
    parser.add_argument("--once", type=Path, required=True)
    args = parser.parse_args()
    cfg = session_loops.Settings(lr=args.lr)
    words = ("trainer.batch_size=5", "trainer.save.steps=1", "trainer.log_steps=1")
    with echelon.session(*words, "track.progress=none", settings={"lr": args.lr}) as session:
        model = session_loops.make_model(cfg)
        optimizer = torch.optim.Adam(model.parameters(), lr=cfg.lr)
        session.prepare(model, optimizer)
        for _, x, y in session.batches(session_loops.make_data(17), epochs=3):
            loss = nn.functional.mse_loss(model(x).squeeze(1), y)
            session.backward(loss)
            session.step(optimizer)
            session.log(loss=loss)
            if session.completed_steps == 6 and session.rank == 1 and not args.once.exists():
                args.once.touch()
                os.kill(os.getpid(), signal.SIGKILL)
    print(f"rank {session.rank} goes on after the block", flush=True)
    sys.exit(int(os.environ.get("ECHELON_TEST_EXIT", "0")))


if __name__ == "__main__":
    main()
