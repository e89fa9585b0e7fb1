"""A sweep on Slurm: an array of workers, trials on two nodes; who dies gives its trial back."""

from __future__ import annotations

import json
import os
import re
import signal

import pytest
from desk import START_S, Desk
from launching import HERE, until

from echelon.errors import Exit
from echelon.runs import Run
from echelon.sweep.folder import Sweep

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
      save: {parameters: {steps: {value: 5}}}
      evaluate: {parameters: {steps: {value: 20}}}
"""
END_S = 240.0
OPTIONS = ("--parallel", "2", "--lease", "8", "--wait", "--json")


def test_a_worker_that_is_killed_gives_its_trial_back(desk: Desk) -> None:
    """To whoever is there first: the other one, after the lease, or itself, queued again."""
    (desk.folder / "s.yml").write_text(FILE)
    desk.variables = {"SPINE_PAUSE_S": "0.1"}
    where = f"experiment={HERE / 'subjects.py'}:regression"
    words = ("launch=slurm", "launch.nodes=2", "launch.procs=1", "launch.threads=1", where)
    following = desk.start("sweep", "s.yml", *words, *OPTIONS)
    sweep = Sweep(desk.folder / "runs" / "s")
    until(lambda: _saved(sweep.run(0)) and _saved(sweep.run(1)), START_S, "both are at work")
    os.kill(_worker(sweep, 0), signal.SIGKILL)  # the hosts have this machine's process numbers
    done = following.wait(END_S)
    assert done.code == Exit.OK, done.err
    assert done.left == []
    told = json.loads(done.out[done.out.index("{") :])
    assert [trial["state"] for trial in told["trials"]] == ["finished", "finished"]
    for number in (0, 1):
        run = sweep.run(number)
        assert run.status()["state"] == "finished"
        assert run.status()["world"] == 2
    said = sweep.run(0).log_file(0).read_text()
    assert re.search(r"going on with run s-0 after step \d+", said), said


def _saved(run: Run) -> bool:
    return run.newest_step() > 0


def _worker(sweep: Sweep, number: int) -> int:
    """That has a trial."""
    return int(json.loads(sweep.lease(number).read_text())["process"]["pid"])
