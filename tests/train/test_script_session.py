"""`echelon.session`: the training of a script that keeps its own command line and main program."""

from __future__ import annotations

import signal
from functools import partial
from pathlib import Path

import command_runner
import pytest
import script_training
import session_loops
from command_runner import TORCHRUN, only_run, status
from worlds import (
    Trained,
    differing,
    losses,
    metrics,
    snapshot_steps,
    spawn_world,
    state_at,
    train_world,
    verb,
)

import echelon
from echelon.errors import EchelonError, ExitCode
from echelon.runs.run_folder import Run
from echelon.runs.status import read_run_status

pytestmark = pytest.mark.slow

BATCHES = ("trainer.batch_size=5", "trainer.epochs=3")
STEPS = 12
SCRIPT = Path(script_training.__file__)
GOES_ON = "goes on after the block"


def run_script(
    folder: Path, world_size: int, *words: str, name: str = "a", mistake: str = "", **env: str
) -> Trained:
    given = [f"run.dir={folder}", f"run.name={name}", "track.progress=none", "trainer.log_steps=1"]
    given += ["launch.threads=1", *BATCHES, *words]
    call = partial(
        script_training.train_forked, world_size=world_size, words=given, mistake=mistake
    )
    is_killed = "KILL" in env.get("ECHELON_TEST_FAULT", "")
    output = folder / f"output-{name}"
    ranks = spawn_world(world_size, call, output, env=env, end_together=is_killed)
    return Trained(Run(folder / name), ranks)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_the_block_trains_what_main_trains(world_size: int, tmp_path: Path) -> None:
    ended = run_script(tmp_path, world_size)
    assert set(ended.codes) == {0}, ended.said
    for rank, each in enumerate(ended.ranks):
        assert f"rank {rank} {GOES_ON}" in each.output
    assert f"finished {STEPS} steps" in ended.said
    assert 'again, with echelon.session("run.name=a")' in ended.said
    assert read_run_status(ended.run).state == "finished"
    by_main = train_world(
        tmp_path, world_size, *BATCHES, name="main", experiment=session_loops.regression
    )
    assert metrics(ended.run) == metrics(by_main.run)
    assert differing(state_at(ended.run, STEPS), state_at(by_main.run, STEPS)) == []
    settings = ended.run.read_config().experiment_settings
    assert settings == {"lr": 0.05, "folder": "a"}


def test_killed_and_stopped_it_goes_on_at_other_sizes(tmp_path: Path) -> None:
    whole = run_script(tmp_path, 1, name="whole")
    killed = run_script(tmp_path, 2, "trainer.save.steps=1", ECHELON_TEST_FAULT="1:5:KILL")
    assert -signal.SIGKILL in killed.codes
    stopped = run_script(tmp_path, 3, ECHELON_TEST_FAULT="2:9:TERM")
    assert set(stopped.codes) == {ExitCode.PREEMPTED}, stopped.said
    assert "everything is saved" in stopped.said
    assert GOES_ON not in stopped.said
    assert read_run_status(stopped.run).state == "preempted"
    ended = run_script(tmp_path, 1)
    assert ended.codes == [0], ended.said
    assert losses(ended.run) == pytest.approx(losses(whole.run), rel=1e-5)


@pytest.mark.parametrize("world_size", [1, 2])
def test_an_error_in_the_block_is_everybodys(world_size: int, tmp_path: Path) -> None:
    failed = run_script(tmp_path, world_size, ECHELON_TEST_ERROR_AT="6")
    assert set(failed.codes) == {ExitCode.FAILED}, failed.said
    for each in failed.ranks:
        assert each.output.count("ValueError: in the middle of an iteration") >= 1
        assert "failed after step 5: ValueError: in the middle" in each.output
        assert "script_session.py" not in each.output
        assert GOES_ON not in each.output
    assert read_run_status(failed.run).state == "failed"


@pytest.mark.parametrize(
    ("mistake", "code", "said"),
    [
        ("no block", 70, "session.prepare is used, but the session has not begun"),
        ("within", ExitCode.USAGE, "echelon.session is called within another session"),
        ("late", 70, "the session is used after its block has ended"),
        ("no loop", ExitCode.USAGE, "the block of the session ended without a loop"),
        ("sys.exit", ExitCode.FAILED, "failed after step 0: SystemExit: 3"),
        ("sys.exit(0)", 0, "finished 12 steps"),
    ],
)
def test_a_block_that_is_used_wrongly(mistake: str, code: int, said: str, tmp_path: Path) -> None:
    """70 is an exception that nobody caught: the block is not there to report it."""
    ended = run_script(tmp_path, 1, mistake=mistake)
    assert ended.codes == [code], ended.said
    assert said in ended.said
    assert GOES_ON not in ended.said


def test_settings_that_a_script_cannot_have(tmp_path: Path) -> None:
    ended = run_script(tmp_path, 1, "launch=local")
    assert ended.codes == [ExitCode.USAGE]
    assert "launch=local, but echelon.session is in a process that runs already" in ended.said
    ended = run_script(tmp_path, 1, "lrr=0.1", "trainer.epoch=3")
    assert ended.codes == [ExitCode.USAGE]
    assert "lrr=0.1: there is no such setting" in ended.said
    assert "trainer.epoch=3: there is no such setting" in ended.said
    ended = run_script(tmp_path, 1, "trainer.clip=1")
    assert ended.codes == [ExitCode.USAGE]
    assert "trainer.clip=1.0 has no effect on a loop of your own" in ended.said
    assert "Traceback" not in ended.said


def test_a_second_block_trains_alone_but_not_in_a_world(tmp_path: Path) -> None:
    ended = run_script(tmp_path, 1, mistake="second")
    assert ended.codes == [0], ended.said
    assert losses(ended.run) == losses(Run(tmp_path / "second"))
    ended = run_script(tmp_path, 2, name="b", mistake="second")
    assert set(ended.codes) == {ExitCode.USAGE}
    assert "echelon.session is called a second time" in ended.said
    assert read_run_status(ended.run).state == "finished"


def test_commands_know_that_a_script_trained(tmp_path: Path) -> None:
    ended = run_script(tmp_path, 1)
    folder = str(ended.run.folder)
    resumed = verb(tmp_path, "resume", folder)
    assert resumed.code == ExitCode.USAGE
    assert "is of a script with a training loop of its own" in resumed.output
    assert "start the script again, with run.name=a" in resumed.output
    shown = verb(tmp_path, "show", folder)
    assert 'again, with echelon.session("run.name=a")' in shown.output
    with pytest.raises(EchelonError, match="has a training loop of its own"):
        echelon.load(folder)


def test_torchrun_starts_a_killed_script_again_in_the_same_run(tmp_path: Path) -> None:
    """Its exit code is its own, though the process group is still there when Python ends."""
    options = ["--standalone", "--nproc_per_node=2", "--max-restarts=1"]
    words = [str(SCRIPT), "--lr", "0.05", f"--once={tmp_path}/once"]
    done = command_runner.run([*TORCHRUN, *options, *words], tmp_path, ECHELON_TEST_EXIT="9")
    assert (tmp_path / "once").exists()
    assert done.left == []
    folder = only_run(tmp_path)
    assert folder.name.startswith("script_training-")
    assert "resuming run" in done.err
    assert status(folder)["state"] == "finished"
    run = Run(folder)
    assert len(losses(run)) == STEPS
    assert snapshot_steps(run)[-1] == STEPS
    for rank in range(2):
        assert f"rank {rank} {GOES_ON}" in done.out
    assert "exitcode  : 9 " in done.err
