"""Runs: how they are called."""

from __future__ import annotations

import pytest

from echelon.config.schema import Config
from echelon.runs.run_folder import assign_name

SHORT = {
    "echelon.recipes.toy:experiment": "toy",
    "echelon.recipes.movielens.experiments:ranking": "movielens_ranking",
    "/home/me/my_file.py:experiment": "my_file",
}
PROGRAMS = {
    ("python", "-u", "train.py", "--lr=1"): "train",
    ("./not_here.sh",): "not_here",
    ("wandb", "agent", "a/b/c"): "wandb",
}


@pytest.mark.parametrize("entry", SHORT)
def test_a_run_is_called_after_its_experiment(entry: str) -> None:
    name = assign_name(Config(experiment={"entry": entry})).run.name
    assert str(name).startswith(f"{SHORT[entry]}-2")


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_run_is_called_after_its_program(program: tuple[str, ...]) -> None:
    name = assign_name(Config(program=list(program))).run.name
    assert str(name).startswith(f"{PROGRAMS[program]}-2")
