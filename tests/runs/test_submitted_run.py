"""Which training becomes the run of the submitted command that started it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from echelon.config.compose import compose
from echelon.config.schema import Config
from echelon.errors import EchelonError
from echelon.runs.create import create_run
from echelon.runs.run_folder import Run
from echelon.runs.submitted_run import (
    SUBMITTED_RUN_VARIABLE,
    place_beside_submitted_run,
    take_submitted_run,
)


@pytest.fixture
def command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """The run of a submitted command, seen from its working folder."""
    words = [f"run.dir={tmp_path}/runs", "run.name=ab", "launch=slurm", "launch.nodes=2"]
    run = create_run(compose(words, program=["python", "main.py"]))
    run.job_id_file.write_text("7\n")
    run.work_folder.mkdir()
    monkeypatch.chdir(run.work_folder)
    return run


def training(run: Run, *words: str) -> Config:
    return place_beside_submitted_run(compose(words), variables(run))


def variables(run: Run, **more: str) -> dict[str, str]:
    return {SUBMITTED_RUN_VARIABLE: str(run.folder), "SLURM_JOB_ID": "7", **more}


def test_the_first_training_becomes_the_run_and_the_second_does_not(command: Run) -> None:
    config = training(command, "lr=0.1")
    assert take_submitted_run(config, variables(command)) == command
    kept = command.read_config()
    assert (kept.run.name, kept.experiment["lr"], kept.launch.kind) == ("ab", 0.1, "inline")
    launch = command.read_launch_config()
    assert (launch.program, launch.launch.nodes) == (["python", "main.py"], 2), "agents read this"
    assert command.read_job_id() == "7"
    assert take_submitted_run(config, variables(command)) is None
    assert command.read_config() == kept
    other = create_run(config)
    assert (other.folder.parent, other.name) != (command.folder.parent, "ab")


def test_a_restarted_job_takes_its_run_again(command: Run) -> None:
    config = training(command, "lr=0.1")
    assert take_submitted_run(config, variables(command)) == command
    again = variables(command, SLURM_RESTART_COUNT="1")
    assert take_submitted_run(training(command, "lr=0.2"), again) is None, "another training"
    anew = training(command, "lr=0.1", "trainer.resume=never")
    assert take_submitted_run(anew, again) is None, "the folder of a running job stays"
    assert take_submitted_run(training(command, "lr=0.1", "trainer.epochs=9"), again) == command
    assert command.read_config().trainer.epochs == 9
    assert command.read_launch_config().program == ["python", "main.py"]


def test_what_has_a_place_of_its_own_keeps_it(command: Run, tmp_path: Path) -> None:
    def taken(*words: str, **more: str) -> Run | None:
        return take_submitted_run(training(command, *words), variables(command, **more))

    named = training(command, "run.name=x")
    assert named.run.dir == str(tmp_path / "runs"), "where a person would look for it"
    assert taken("run.name=x") is None
    assert training(command, "run.dir=elsewhere").run.dir == "elsewhere"
    assert taken("run.dir=elsewhere") is None
    assert taken(WANDB_SWEEP_ID="s") is None, "an agent runs one trial after the other"
    program = replace(training(command), program=["ls"])
    assert take_submitted_run(program, variables(command)) is None
    assert take_submitted_run(compose([]), {}) is None
    assert taken("run.name=ab") == command


def test_a_run_that_goes_on_without_its_command_forgets_it(command: Run) -> None:
    config = training(command, "lr=0.1")
    assert take_submitted_run(config, variables(command)) == command
    create_run(replace(config, run=replace(config.run, name="ab")))
    assert command.read_launch_config().program == []
    with pytest.raises(EchelonError):
        create_run(compose([f"run.dir={command.folder.parent}", "run.name=ab"], program=["ls"]))
