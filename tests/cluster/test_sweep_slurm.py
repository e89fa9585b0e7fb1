"""A sweep on Slurm: an array of workers, trials on two nodes; who dies gives its trial back."""

from __future__ import annotations

import json
import os
import re
import signal

import pytest
import wandb_server
from command_line import START_S, CommandLine
from command_runner import HERE, until
from wandb_server import SWEEP

from echelon.errors import ExitCode
from echelon.runs.run_folder import Run
from echelon.sweep.sweep_folder import SweepFolder

pytestmark = [pytest.mark.slow, pytest.mark.cluster]

FILE = """\
method: grid
metric: {name: loss}
parameters:
  lr: {values: [0.1, 0.05]}
  eval_samples: {value: 9}
  trainer:
    parameters:
      steps: {value: 60}
      batch_size: {value: 6}
      evaluate: {parameters: {steps: {value: 20}}}
"""
END_S = 300.0
ACCOUNT = {"WANDB_API_KEY": "a" * 40, "WANDB_INIT_TIMEOUT": "300", "WANDB_FINISH_TIMEOUT": "300"}
OPTIONS = ("--parallel", "2", "--lease", "8", "--wait", "--json")


def test_a_worker_that_is_killed_gives_its_trial_back(command_line: CommandLine) -> None:
    """To whoever is there first: the other one, after the lease, or itself, queued again."""
    (command_line.folder / "s.yml").write_text(FILE)
    killed = command_line.folder / "killed"  # no trial is over before somebody was
    command_line.variables = {"ECHELON_TEST_FAULT": "0:20:go", "ECHELON_TEST_AFTER": str(killed)}
    where = f"experiment={HERE / 'toy_experiments.py'}:regression"
    words = ("launch=slurm", "launch.nodes=2", "launch.procs=1", "launch.threads=1", where)
    following = command_line.start("sweep", "s.yml", *words, "trainer.save.steps=5", *OPTIONS)
    sweep = SweepFolder(command_line.folder / "runs" / "s")
    until(
        lambda: _saved(sweep.get_trial_run(0)) and _saved(sweep.get_trial_run(1)),
        START_S,
        "both are at work",
    )
    os.kill(_worker(sweep, 0), signal.SIGKILL)  # the hosts have this machine's process numbers
    killed.touch()
    done = following.wait(END_S)
    assert done.code == ExitCode.OK, done.err
    assert done.left == []
    told = json.loads(done.out[done.out.index("{") :])
    assert [trial["state"] for trial in told["trials"]] == ["finished", "finished"]
    for number in (0, 1):
        run = sweep.get_trial_run(number)
        assert run.read_status_file()["state"] == "finished"
        assert run.read_status_file()["world"] == 2
        assert run.exit_code_file.read_text() == "0\n"
    said = sweep.get_trial_run(0).get_rank_log_file(0).read_text()
    assert re.search(r"resuming run s-0 after step \d+", said), said


def test_a_parent_that_is_killed_finds_its_trial_s_job_again(command_line: CommandLine) -> None:
    """On wandb's server. The job goes on meanwhile; a second one would be another run there."""
    pytest.importorskip("wandb")
    (command_line.folder / "s.yml").write_text(FILE)
    where = f"experiment={HERE / 'toy_experiments.py'}:regression"
    words = ("launch=slurm", "launch.nodes=2", "launch.procs=1", "launch.threads=1", where)
    run = command_line.run(f"{SWEEP}-trial0")
    with wandb_server.serving(address=command_line.address) as server:
        server.sweep.trials = [{"lr": 0.1, "trainer": {"steps": 60, "evaluate": {"steps": 20}}}]
        command_line.variables = {
            "ECHELON_TEST_PAUSE_S": "0.1",
            "WANDB_BASE_URL": server.url,
            **ACCOUNT,
        }
        first = command_line.start("sweep", "s.yml", *words, "--engine", "wandb")
        until(lambda: command_line.step(run.name), START_S, "it is at work")
        job = run.read_job_id()
        first.process.kill()
        first.process.wait()
        done = command_line.type("sweep", "s.yml", *words, "--engine", "wandb", limit_s=END_S)
        served = dict(server.runs)
        assert server.sweep.handed == ["trial0"]
    assert done.code == ExitCode.OK, done.err
    assert done.out.startswith("trial0\tfinished\t")
    assert run.read_job_id() == job
    assert len(run.read_status_file()["starts"]) == 1
    assert [end["exitcode"] for end in served["trial0"].ends] == [0]


def _saved(run: Run) -> bool:
    return run.find_newest_step() > 0


def _worker(sweep: SweepFolder, number: int) -> int:
    """That has a trial."""
    return int(json.loads(sweep.get_lease_file(number).read_text())["process"]["pid"])
