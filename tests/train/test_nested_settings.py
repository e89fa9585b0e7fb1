"""Nested and typed settings, from the command line to every rank and back from config.json."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from command_runner import ECHELON, TWO
from worlds import run_forked

FILE = """
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Literal
import os, torch, echelon

class Kind(Enum):
    PLAIN = 1
    DEEP = 2

@dataclass
class Adam:
    lr: float = 0.1
    betas: tuple[float, float] = (0.9, 0.99)

@dataclass
class Sgd:
    lr: float = 0.01

@dataclass
class Settings:
    optimizer: Adam | Sgd = field(default_factory=Sgd)
    kind: Kind = Kind.PLAIN
    reduction: Literal["mean", "sum"] = "mean"
    folder: Path | None = None
    sizes: tuple[int, ...] = (4,)

def experiment(cfg: Settings):
    with open(f"cfg-{os.environ.get('RANK', 'one')}", "w") as file:
        file.write(repr(cfg))
    model = torch.nn.Linear(cfg.sizes[0], 1)
    optimizer = torch.optim.Adam(model.parameters(), cfg.optimizer.lr, cfg.optimizer.betas)
    x = torch.ones(8, cfg.sizes[0])
    data = (x, x.sum(1, keepdim=True))
    return echelon.Experiment(model, optimizer, torch.nn.functional.mse_loss, data)

if __name__ == "__main__":
    echelon.main(experiment)
"""
WORDS = ("optimizer.class=Adam", "optimizer.betas=[0,0.5]", "kind=DEEP", "folder=a/b", "sizes=[3]")
RECEIVED = (
    "Settings(optimizer=Adam(lr=0.1, betas=(0.0, 0.5)), kind=<Kind.DEEP: 2>, reduction='mean', "
    "folder=PosixPath('a/b'), sizes=(3,))"
)


@pytest.mark.slow
def test_every_rank_and_a_resumed_run_receive_the_same_objects(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(FILE)
    words = ("experiment=own.py:experiment", *WORDS, "trainer.batch_size=4", "run.name=a")
    ended = run_forked([*ECHELON, "train", *words, *TWO, "trainer.steps=2"], tmp_path)
    assert ended.code == 0, ended.err
    assert [(tmp_path / f"cfg-{rank}").read_text() for rank in (0, 1)] == [RECEIVED] * 2
    stored = json.loads((tmp_path / "runs" / "a" / "config.json").read_text())["experiment"]
    assert stored["optimizer"] == {"class": "Adam", "lr": 0.1, "betas": [0.0, 0.5]}
    alone = ("launch=inline", "trainer.steps=4")
    ended = run_forked([*ECHELON, "resume", "a", *alone], tmp_path)
    assert ended.code == 0, ended.err
    assert (tmp_path / "cfg-one").read_text() == RECEIVED


@pytest.mark.slow
def test_a_typo_and_a_help_page_of_a_users_own_file(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(FILE)
    own = [ECHELON[0], "own.py"]
    ended = run_forked([*own, "optimizer.lrr=1", "kind=DEPE", "sizes=3"], tmp_path)
    assert ended.code == 2
    assert ended.err.splitlines() == [
        "error: optimizer.lrr=1: there is no such setting",
        "  hint: did you mean 'optimizer.lr'? also like it: optimizer.betas, trainer.mirror",
        "error: kind=DEPE: not one of PLAIN, DEEP",
        "  hint: did you mean 'DEEP'? known: DEEP, PLAIN",
        "error: sizes=3: not a list",
        "  hint: write 'sizes=[3]'",
    ]
    assert not (tmp_path / "runs").exists()
    ended = run_forked([*own, "--help", "optimizer.lr"], tmp_path)
    assert (ended.code, ended.out) == (0, "settings of own.py:experiment:\n  optimizer.lr=0.01\n")
