"""`echelon resume` of a training that a submitted command started: it goes back into the queue."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from echelon.cli import run_and_report_faults, run_command
from echelon.config.compose import compose
from echelon.errors import ExitCode
from echelon.launch.slurm import job_array
from echelon.runs.create import create_run
from echelon.runs.run_folder import Run
from echelon.runs.submitted_run import SUBMITTED_RUN_VARIABLE, take_submitted_run


@pytest.fixture
def asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What an sbatch that takes every job as number 8 was asked for, one call a line."""
    commands = {
        "sbatch": f'#!/bin/sh\necho "$@" >> {tmp_path}/asked\necho 8\n',
        "squeue": "#!/bin/sh",
    }
    (tmp_path / "slurm").mkdir()
    for name, text in commands.items():
        (tmp_path / "slurm" / name).write_text(text)
        (tmp_path / "slurm" / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}/slurm:{os.environ['PATH']}")
    monkeypatch.chdir(tmp_path)
    return tmp_path / "asked"


def take_by_training(run: Run, *words: str) -> None:
    """Let a training of the command become its run, and end both."""
    config = compose([f"run.dir={run.folder.parent}", *words])
    variables = {SUBMITTED_RUN_VARIABLE: str(run.folder), "SLURM_JOB_ID": "7"}
    assert take_submitted_run(config, variables) == run
    run.exit_code_file.write_text("1\n")
    run.update_status(state="failed", step=3, job="7")


def type_resume(*words: str) -> int:
    return run_and_report_faults(lambda: run_command(["resume", *words]))


@pytest.fixture
def run(asked: Path, tmp_path: Path) -> Run:
    made = create_run(compose(["run.name=ab", "launch=slurm"], program=["python", "main.py"]))
    made.script_file.write_text("#!/bin/sh\n")
    return made


def test_it_is_queued_again(run: Run, asked: Path, capsys: pytest.CaptureFixture[str]) -> None:
    take_by_training(run)
    assert type_resume("ab") == ExitCode.OK
    assert capsys.readouterr().out.startswith(f"job 8: run ab in {run.folder}\n  follow it  ")
    assert asked.read_text() == f"--parsable --job-name=ab {run.script_file}\n"
    assert run.read_job_id() == "8"
    assert not run.exit_code_file.exists()
    assert run.read_status_file()["state"] == "queued"
    assert run.read_launch_config().program == ["python", "main.py"], "agents read this"


def test_a_task_of_an_array_is_queued_alone(
    asked: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [f"run.dir={tmp_path}/runs", "launch=slurm"]
    configs = [compose([*words, f"run.name=ab-{n}"], program=["true"]) for n in range(3)]
    [array] = job_array.plan_arrays(configs)
    _, runs = job_array.queue_array(array)
    take_by_training(runs[2])
    assert type_resume("ab-2") == ExitCode.OK
    assert asked.read_text().splitlines()[1:] == [
        f"--parsable --job-name=ab-2 --array=2 {tmp_path}/runs/.ab-0.sh"
    ]
    assert runs[2].read_job_id() == "8_2"
    assert runs[1].read_job_id() == "8_1"


@pytest.mark.parametrize(
    ("trained", "typed", "says"),
    [
        ([], ["trainer.epochs=9"], "trainer.epochs=9 cannot be given to it"),
        (["trainer.resume=never"], [], "its trainer.resume=never would not continue the run"),
    ],
)
def test_what_its_command_does_not_say_is_refused(
    run: Run,
    asked: Path,
    capsys: pytest.CaptureFixture[str],
    trained: list[str],
    typed: list[str],
    says: str,
) -> None:
    take_by_training(run, *trained)
    assert type_resume("ab", *typed) == ExitCode.USAGE
    told = capsys.readouterr().err
    assert f"error: run ab is a training of a submitted command, and {says}\n" in told
    assert "add launch=inline" in told
    assert not asked.exists()
