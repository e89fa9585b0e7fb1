"""Asked to stop, all ranks finish the same step, save once, and say so by their exit code."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
from itertools import pairwise
from pathlib import Path

import command_runner
import pytest
import toy_experiments
from command_runner import ECHELON
from worlds import (
    configured,
    differing,
    metrics,
    run_forked,
    snapshot_steps,
    started_forked,
    state_at,
    steps_logged,
    traced_lines,
    train_config,
    train_world,
    wait_until,
)

from echelon.errors import ExitCode
from echelon.runs.run_folder import Run
from echelon.train.stop_signals import StopSignals

pytestmark = pytest.mark.slow

STEPS = 12
SHORT = (
    "trainer.batch_size=5",
    "trainer.epochs=3",
    "trainer.save.epochs=null",  # nothing is saved but on a stop and at the end
    "optimizer=adam",
    "dropout=0.3",
)
ENTRY = f"experiment={toy_experiments.__file__}:regression"
TRAIN = (*ECHELON, "train", ENTRY)


@pytest.fixture(scope="module")
def whole_runs(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Run]:
    folder = tmp_path_factory.mktemp("whole")
    return {n: train_world(folder, n, *SHORT, name=f"whole-{n}").run for n in (1, 3)}


def steps_of_ranks(traced: Path) -> dict[int, int]:
    lines = traced_lines(traced, "step")
    return {
        rank: sum(line["rank"] == rank for line in lines) for rank in {x["rank"] for x in lines}
    }


# --- ranks started by hand ----------------------------------------------------------------------


@pytest.mark.parametrize("name", ["TERM", "USR2", "INT"])
@pytest.mark.parametrize(("world_size", "rank"), [(1, 0), (3, 0), (3, 1), (3, 2)])
def test_a_signal_to_any_rank_stops_all_after_the_same_step(
    tmp_path: Path,
    traced: Path,
    whole_runs: dict[int, Run],
    world_size: int,
    rank: int,
    name: str,
) -> None:
    config = configured(tmp_path, ["run.name=a", *SHORT])
    env = {"ECHELON_TEST_FAULT": f"{rank}:5:{name}", "ECHELON_TEST_TRACE": str(traced)}
    stopped = train_config(tmp_path, world_size, config, env=env)
    assert stopped.codes == [ExitCode.PREEMPTED] * world_size, stopped.said
    status = stopped.run.read_status_file()
    assert (status["state"], status["step"]) == ("preempted", 6)
    assert steps_of_ranks(traced) == dict.fromkeys(range(world_size), 6)
    assert snapshot_steps(stopped.run) == [6]
    assert "after step 6 of 12; everything is saved" in stopped.said
    if rank == 0:
        assert f"stopped by SIG{name} after step 6" in stopped.said
    again = train_config(tmp_path, world_size, config)
    assert again.codes == [0] * world_size, again.said
    whole = whole_runs[world_size]
    assert metrics(again.run) == metrics(whole)
    assert differing(state_at(again.run, STEPS), state_at(whole, STEPS)) == []


def test_signals_to_all_ranks_at_once_stop_once(tmp_path: Path, traced: Path) -> None:
    """As Slurm may send them, one after the other."""
    words = [*SHORT, f"run.dir={tmp_path}", "run.name=a", "launch=local", "launch.procs=3"]
    with started_forked([*TRAIN, *words, "trainer.steps=1000000"], tmp_path) as running:
        _wait_for_step(tmp_path / "a", 5)
        for number in (signal.SIGTERM, signal.SIGUSR2, signal.SIGTERM):
            running.process.send_signal(number)
        ended = running.wait()
    assert ended.code == ExitCode.PREEMPTED, ended.output
    assert ended.left == []
    assert len(snapshot_steps(Run(tmp_path / "a"))) == 1


def test_a_signal_in_the_last_step_changes_nothing(tmp_path: Path) -> None:
    env = {"ECHELON_TEST_FAULT": f"0:{STEPS}:TERM"}
    ended = train_world(tmp_path, 2, *SHORT, env=env)
    assert ended.codes == [0, 0], ended.said
    assert ended.run.read_status_file()["state"] == "finished"


# --- the agent ----------------------------------------------------------------------------------


def _wait_for_step(folder: Path, step: int) -> None:
    run = Run(folder)
    wait_until(lambda: max(steps_logged(run), default=0) >= step, f"step {step} of {folder.name}")


@pytest.mark.parametrize("name", ["TERM", "USR2", "INT"])
def test_a_signal_to_the_agent_stops_all_and_the_run_goes_on(
    tmp_path: Path, traced: Path, name: str
) -> None:
    words = [*SHORT, f"run.dir={tmp_path}", "launch=local", "launch.procs=3", "trainer.log_steps=1"]
    env = {"ECHELON_TEST_TRACE": str(traced), "ECHELON_TEST_PAUSE_S": "0.01"}
    train = [*TRAIN, *words, "run.name=a"]
    with started_forked([*train, "trainer.steps=100000"], tmp_path, **env) as running:
        _wait_for_step(tmp_path / "a", 5)
        running.process.send_signal(getattr(signal, f"SIG{name}"))
        ended = running.wait()
    assert ended.code == ExitCode.PREEMPTED, ended.output
    assert ended.left == []
    run = Run(tmp_path / "a")
    step = run.read_status_file()["step"]
    assert run.read_status_file()["state"] == "preempted"
    assert snapshot_steps(run) == [step]
    assert steps_of_ranks(traced) == dict.fromkeys(range(3), step)
    assert f"stopped by SIG{name} after step {step}" in ended.output
    if name != "TERM":  # how it was stopped is not saved
        return
    # On by ten steps, beside a run that was never stopped, of ranks started by hand.
    more = f"trainer.steps={step + 10}"
    again = run_forked([*train, more], tmp_path)
    assert again.code == 0, again.output
    whole = train_world(tmp_path, 3, *SHORT, more, name="whole")
    assert whole.codes == [0, 0, 0], whole.said
    assert metrics(run) == metrics(whole.run)
    assert differing(state_at(run, step + 10), state_at(whole.run, step + 10)) == []


# --- a second Ctrl-C ----------------------------------------------------------------------------


@pytest.mark.parametrize("launch", [["launch=inline"], ["launch=local", "launch.procs=2"]])
def test_a_second_interrupt_stops_at_once(tmp_path: Path, traced: Path, launch: list[str]) -> None:
    """In the fifth step a rank waits for ever, so the first one cannot be heeded."""
    env = {"ECHELON_TEST_FAULT": "0:5:wait", "ECHELON_TEST_TRACE": str(traced)}
    words = [*TRAIN, *SHORT, f"run.dir={tmp_path}", "run.name=a", *launch]
    often = ["trainer.save.steps=2", "trainer.log_steps=1"]
    with started_forked([*words, *often], tmp_path, **env) as running:
        wait_until(lambda: bool(traced_lines(traced, "waiting")), "the fifth step")
        saved = tmp_path / "a" / "snapshots" / "step-000000004"
        wait_until(saved.exists, "the snapshot of step 4")
        running.process.send_signal(signal.SIGINT)
        log = tmp_path / "a" / "logs" / "rank-0.log"
        heard = "stopping after this step and saving"
        wait_until(lambda: heard in log.read_text(), "the first interrupt is heard")
        with pytest.raises(subprocess.TimeoutExpired):
            running.process.wait(0.3)
        running.process.send_signal(signal.SIGINT)
        ended = running.wait()
    assert ended.left == []
    assert ended.code == ExitCode.INTERRUPTED, ended.output
    assert "stopped at once; the last snapshot is intact" in ended.output
    assert max(snapshot_steps(Run(tmp_path / "a"))) == 4
    again = run_forked(words, tmp_path)
    assert again.code == 0, again.output
    assert "resuming run a after step 4" in again.output


PRESSED_AT_THE_END = """\
import atexit, os, signal
import toy_experiments

def press():
    os.kill(os.getpid(), signal.SIGINT)

class Late:
    def __del__(self, press=press):  # when Python has given its signals back
        press()

late = Late()
atexit.register(press)
regression = toy_experiments.regression
"""


def test_an_interrupt_after_the_last_word_changes_nothing(tmp_path: Path) -> None:
    """In an interpreter of its own, whose end it is about."""
    (tmp_path / "pressed.py").write_text(PRESSED_AT_THE_END)
    words = [*ECHELON, "train", "experiment=pressed.py:regression", *SHORT, f"run.dir={tmp_path}"]
    path = f"{Path(toy_experiments.__file__).parent}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    ended = command_runner.run(words, tmp_path, PYTHONPATH=path)
    assert ended.code == 0, ended.output
    assert f"finished {STEPS} steps" in ended.output
    assert "stopping after this step" not in ended.output


def test_an_interrupt_while_the_file_is_imported(tmp_path: Path) -> None:
    text = "import time\nprint('begun', flush=True)\ntime.sleep(60)\n"
    (tmp_path / "slow.py").write_text(text)
    words = [*ECHELON, "train", "experiment=slow.py:experiment", f"run.dir={tmp_path}"]
    with started_forked(words, tmp_path) as running:
        wait_until(lambda: running.read_output() == "begun\n", "the import has begun")
        running.process.send_signal(signal.SIGINT)
        ended = running.wait()
    assert (ended.code, ended.out, ended.err) == (
        ExitCode.INTERRUPTED,
        "begun\n",
        "interrupted\n",
    )


def test_an_interrupt_of_the_experiment_s_own(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text("def experiment(cfg):\n    raise KeyboardInterrupt\n")
    words = [*ECHELON, "train", "experiment=own.py:experiment", f"run.dir={tmp_path}"]
    ended = run_forked(words, tmp_path)
    assert ended.code == ExitCode.INTERRUPTED
    (line,) = ended.output.splitlines()
    assert line.endswith("failed before the first step: interrupted")


# --- by the clock -------------------------------------------------------------------------------


@pytest.mark.parametrize("world_size", [1, 2])
def test_saving_every_so_many_minutes(tmp_path: Path, traced: Path, world_size: int) -> None:
    """Rank 0's clock counts for all. A step takes 20 ms or more, so 12 of them see 60 ms pass."""
    every_s = 0.06
    words = (*SHORT, f"trainer.save.minutes={every_s / 60}", "trainer.keep_last=100")
    env = {"ECHELON_TEST_TRACE": str(traced), "ECHELON_TEST_PAUSE_S": "0.02"}
    trained = train_world(tmp_path, world_size, *words, env=env)
    assert trained.codes == [0] * world_size, trained.said
    steps = snapshot_steps(trained.run)
    assert steps[-1] == STEPS
    assert len(steps) >= 3, "12 steps of 20 ms, one save in 60"
    clocks = {x["step"]: x["clock"] for x in traced_lines(traced, "step") if x["rank"] == 0}
    by_clock = [step for step in steps if step not in (1, STEPS)]
    for earlier, later in pairwise(by_clock):
        # A wish is made between the step before and its own step.
        assert clocks[later] - clocks[earlier - 1] >= every_s


# --- early --------------------------------------------------------------------------------------


@pytest.mark.parametrize("launch", [["launch=inline"], ["launch=local", "launch.procs=2"]])
def test_a_signal_before_the_first_step_is_not_lost(tmp_path: Path, launch: list[str]) -> None:
    """Sent as soon as anybody listens: no worker is there yet, or no rank is at a step."""
    words = [*ECHELON, "train", *launch, f"run.dir={tmp_path}", "run.name=a"]
    # Where the signal comes late after all, nothing else is saved.
    words += ["trainer.steps=1000000", "trainer.save.epochs=null", "trainer.evaluate.epochs=null"]
    with started_forked(words, tmp_path) as running:
        pid = running.process.pid
        wait_until(lambda: _listens(pid, signal.SIGTERM), "a handler of SIGTERM")
        running.process.send_signal(signal.SIGTERM)
        ended = running.wait()
    assert ended.left == []
    assert ended.code == ExitCode.PREEMPTED, ended.output
    run = Run(tmp_path / "a")
    assert run.read_status_file()["state"] == "preempted"
    assert snapshot_steps(run) == [run.read_status_file()["step"]]


def _listens(pid: int, number: signal.Signals) -> bool:
    fields = dict(
        line.split(":\t", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines()
    )
    return bool(int(fields["SigCgt"], 16) >> (number - 1) & 1)


def test_a_signal_that_only_another_rank_has_heard_of_is_waited_for() -> None:
    stop = StopSignals()
    stop.install()
    try:
        threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGUSR2)).start()
        assert stop.find_reason() == "SIGUSR2"
    finally:
        stop.uninstall()
    assert StopSignals().find_reason() == "a signal to another rank"
