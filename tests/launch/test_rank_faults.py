"""One rank fails: the exit code, the last words, the logs, what is left, and going on after it."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import command_runner
import pytest
from command_runner import (
    ECHELON,
    HERE,
    TORCHRUN,
    TWO,
    CommandResult,
    curve,
    evaluations,
    only_run,
    status,
)
from worlds import run_all_forked, run_forked, started_forked

FAULTY = HERE / "faulty_experiment.py"
TRAIN = (*ECHELON, "train", f"experiment={FAULTY}:experiment", *TWO)
SETTINGS = (
    "trainer.batch_size=8",
    "trainer.epochs=2",
    "trainer.log_steps=1",
    "launch.max_replacements=0",
)
"""Twenty steps, evaluated and saved after the 10th and the 20th. What replacing a rank does is in
test_rank_replacement.py."""
HOST = socket.gethostname()
WRECKAGE = ("Connection closed by peer", "Connection reset by peer", "gloo", "Broken pipe")


@dataclass(frozen=True)
class Case:
    """Rank `on` fails in `phase` at step `at` with `fault`; then rank `on` `says` this."""

    fault: str
    on: int
    phase: str
    at: int
    step: int | None
    """Steps made before, as reported; -1: any number, since the fault takes a moment to act."""
    says: str
    limit_s: float = 0.0

    @property
    def words(self) -> list[str]:
        hang = [f"launch.hang_s={self.limit_s}"] if self.limit_s else []
        fault = f"fault='{self.fault}'"
        return [fault, f"on={self.on}", f"phase={self.phase}", f"at={self.at}", *hang, *SETTINGS]

    def __str__(self) -> str:
        return f"{self.fault}, rank {self.on}, {self.phase} {self.at}".replace(" ", "-")


ERROR, EXIT, KILLED = "ValueError: injected error", "SystemExit: 1", "killed by SIGKILL"
CASES = (
    # fault, rank, phase, at step, steps before, what is said, launch.hang_s
    Case("error", 1, "build", 0, None, ERROR),
    Case("error", 1, "step", 5, 4, ERROR),
    Case("error", 1, "evaluation", 10, 10, ERROR),
    Case("error", 0, "save", 10, 10, ERROR),
    Case("exit 1", 0, "step", 5, 4, EXIT),
    Case("exit 0", 1, "step", 5, 4, "SystemExit: 0"),
    Case("os._exit 3", 1, "step", 5, 4, "exited with code 3"),
    Case("kill", 1, "build", 0, None, KILLED),
    Case("kill", 1, "step", 1, 0, KILLED),
    Case("kill", 0, "step", 5, 4, KILLED),
    Case("kill", 1, "evaluation", 10, 10, KILLED),
    Case("kill", 0, "save", 10, 10, KILLED),
    Case("segv", 1, "step", 5, 4, "killed by SIGSEGV"),
    Case("kill fork server", 1, "step", 5, -1, "killed with all others"),
    # The limit is longer than a busy machine keeps every rank from running.
    Case("stop", 1, "step", 5, 4, "no progress for 3 s (launch.hang_s=3), and every", 3),
    Case("loop", 1, "step", 5, 4, "no progress for 3 s", 3),
    Case("sleep", 0, "step", 1, 0, "no progress for 6 s (launch.hang_s=0.75, 8 times as", 0.75),
    Case("sleep", 1, "evaluation", 10, 10, "no progress for 6 s (launch.hang_s=0.75, 8 t", 0.75),
)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_guilty_rank_has_the_last_word_everywhere(case: Case, tmp_path: Path) -> None:
    done = run_forked([*TRAIN, *case.words], tmp_path)
    assert done.code == 1, done.err
    assert done.left == []
    folder = only_run(tmp_path)
    failure = status(folder)["failure"]
    assert status(folder)["state"] == "failed"
    guilty = 0 if case.fault == "kill fork server" else case.on
    assert (failure["rank"], failure["host"]) == (guilty, HOST)
    assert case.says in failure["summary"]
    if case.step != -1:
        assert failure["step"] == case.step
    last_words = f"{failure['detail'].rstrip()}\n\nrank {guilty} on {HOST} failed ".lstrip()
    last_words += "before" if failure["step"] is None else f"after step {failure['step']}: "
    for text in (done.err, *_logs(folder)):
        _, found, after = text.rpartition(last_words)
        assert found, text[-3000:]
        assert len(after.strip().splitlines()) == 1, after
        assert case.says in after
        assert not any(word in after for word in WRECKAGE)
    if case.says in (ERROR, EXIT):
        assert "Traceback (most recent call last)" in failure["detail"]
        assert str(FAULTY) in failure["detail"]
    if case.fault == "segv":  # a crash in compiled code leaves the Python stack
        log = _logs(folder)[case.on]
        assert "Fatal Python error: Segmentation fault" in log
        assert f'File "{FAULTY}"' in log


@pytest.mark.slow
def test_a_rank_alone_says_its_cause_as_well(tmp_path: Path) -> None:
    """Nobody else is there to publish it to, but its agent is."""
    case = Case("error", 0, "step", 5, 4, ERROR)
    done = run_forked([*TRAIN, *case.words, "launch.procs=1"], tmp_path)
    assert done.code == 1, done.err
    for text in (done.err, *_logs(only_run(tmp_path))):
        assert text.rstrip().endswith(f"rank 0 on {HOST} failed after step 4: {ERROR}")
    assert status(only_run(tmp_path))["failure"]["summary"] == ERROR


@pytest.mark.slow
def test_a_rank_alone_leaves_with_the_code_of_its_fault(tmp_path: Path) -> None:
    words = [*ECHELON, "train", "launch=local", "launch.procs=1", "trainer.profile=1000"]
    done = run_forked(words, tmp_path)
    assert done.code == 2, done.err
    assert "error: trainer.profile=1000, after 5 steps to warm up, but the run has 192" in done.err


@pytest.mark.slow
def test_a_slow_rank_is_not_called_hung(tmp_path: Path) -> None:
    """Rank 1 evaluates for longer than the limit, a batch at a time, while rank 0 waits for it."""
    words = ["fault=slow", "on=1", "phase=every-evaluation", "launch.hang_s=4", *SETTINGS]
    done = run_forked([*TRAIN, *words, "trainer.eval_batch_size=1", "trainer.epochs=1"], tmp_path)
    assert done.code == 0, done.err


# --- going on ---


@pytest.fixture(scope="module")
def clean_curve(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[int, float]]:
    folder = tmp_path_factory.mktemp("clean")
    done = run_forked([*TRAIN, *SETTINGS], folder)
    assert done.code == 0, done.err
    return curve(only_run(folder))


RESTARTED = (
    Case("error", 1, "step", 13, 12, ERROR),
    Case("kill", 0, "step", 13, 12, KILLED),
    Case("kill", 1, "build", 0, None, KILLED),
    Case("kill", 0, "save", 10, None, KILLED),
    Case("stop", 1, "step", 13, 12, "no progress for 3 s", 3),
    Case("kill fork server", 1, "step", 13, -1, "killed with all others"),
)


@pytest.mark.slow
@pytest.mark.parametrize("case", RESTARTED, ids=str)
def test_a_restart_goes_on_with_the_same_curve(
    case: Case, clean_curve: list[tuple[int, float]], tmp_path: Path
) -> None:
    words = [*case.words, "launch.max_restarts=1", f"once={tmp_path}/once"]
    done = run_forked([*TRAIN, *words], tmp_path)
    assert done.code == 0, done.err
    assert done.left == []
    assert (tmp_path / "once").exists()  # it did fail
    folder = only_run(tmp_path)
    assert curve(folder) == clean_curve
    assert status(folder)["state"] == "finished"
    assert status(folder)["failure"] is None
    assert f"rank {0 if case.fault == 'kill fork server' else case.on} on {HOST} failed" in done.err
    assert "starting again, 1 restart(s) left" in done.err


@pytest.mark.slow
def test_a_killed_agent_takes_everything_with_it_and_the_same_command_goes_on(
    clean_curve: list[tuple[int, float]], tmp_path: Path
) -> None:
    words = [*TRAIN, *Case("kill agent", 1, "step", 15, 14, "").words]
    words += ["run.name=a", f"once={tmp_path}/once"]
    words += [f"after={tmp_path}/runs/a/snapshots/step-000000010"]
    done = run_forked(words, tmp_path)
    assert done.code == -signal.SIGKILL
    assert done.left == []
    assert status(only_run(tmp_path))["state"] == "running"  # nobody was left to say it
    again = run_forked(words, tmp_path)
    assert again.code == 0, again.err
    assert "resuming run a after step 10" in again.err
    assert curve(only_run(tmp_path)) == clean_curve


@pytest.mark.slow
def test_when_the_restarts_are_used_up_the_last_failure_is_told(tmp_path: Path) -> None:
    words = Case("error", 1, "step", 5, 4, ERROR).words
    done = run_forked([*TRAIN, *words, "launch.max_restarts=1"], tmp_path)
    assert done.code == 1
    assert done.left == []
    assert done.err.count("starting again") == 1
    assert done.err.rstrip().endswith(f"rank 1 on {HOST} failed after step 4: {ERROR}")
    assert status(only_run(tmp_path))["failure"]["rank"] == 1


# --- without our agent ---


def _by_hand(case: Case, folder: Path, *more: str, size: int = 2) -> list[CommandResult]:
    words = (
        *case.words,
        f"world_size={size}",
        f"master=127.0.0.1:{command_runner.free_port()}",
        *more,
    )
    commands = [[*ECHELON[:1], str(FAULTY), f"rank={r}", *words] for r in range(size)]
    return run_all_forked(commands, folder)


@pytest.mark.slow
@pytest.mark.parametrize(("rank", "phase"), [(1, "build"), (0, "step")])
def test_ranks_started_by_hand_all_print_the_guilty_one(
    rank: int, phase: str, tmp_path: Path
) -> None:
    """Three, so that one has neither failed nor hosts the store that tells of it."""
    case = Case("error", rank, phase, 3, 0, ERROR)
    for done in _by_hand(case, tmp_path, size=3):
        assert done.code == 1
        assert done.left == []
        assert "Traceback (most recent call last)" in done.err
        assert f"rank {rank} on {HOST} failed" in done.last_lines
        assert done.last_lines.endswith(ERROR)
        assert not any(word in done.err for word in WRECKAGE), done.err
    failure = status(only_run(tmp_path))["failure"]
    assert (failure["rank"], failure["host"]) == (rank, HOST)


@pytest.mark.slow
def test_under_torchrun_all_print_the_guilty_one(tmp_path: Path) -> None:
    case = Case("error", 1, "step", 5, 4, ERROR)
    options = ["--standalone", "--nproc_per_node=2", "--redirects=3", f"--log-dir={tmp_path}/logs"]
    done = run_forked([*TORCHRUN, *options, str(FAULTY), *case.words], tmp_path)
    assert done.code != 0
    assert done.left == []
    for rank in range(2):
        (log,) = tmp_path.glob(f"logs/*/attempt_0/{rank}/stderr.log")
        text = log.read_text().rstrip()
        assert text.endswith(f"rank 1 on {HOST} failed after step 4: {ERROR}"), text
        assert not any(word in text for word in WRECKAGE)


# --- disks ---


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "small"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=4m", "none", str(folder)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("mounting a small file system needs root")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


@pytest.mark.slow
def test_a_full_disk_is_told_and_training_goes_on(small_disk: Path, tmp_path: Path) -> None:
    """A snapshot takes some 300 kB: the first ones fit, and then the disk is filled."""
    command = [*TRAIN, *_filled_at_13(tmp_path), "trainer.epochs=30"]
    command += [f"run.dir={small_disk}", "run.name=full"]
    folder = small_disk / "full"
    with started_forked(command, tmp_path) as running:
        _fill_after_the_save(folder, small_disk / "filler")
        (tmp_path / "filled").touch()
        done = running.wait()
    assert done.code == 1, done.err
    assert done.left == []
    assert "error: finished after step 300 of 300, but this step is not saved: no space" in done.err
    assert "hint: fix that, then continue: echelon resume " in done.err
    assert "Traceback" not in done.err
    (first, *_) = [line for line in done.err.splitlines() if "not saved" in line]
    assert first.startswith("warning: not saved: ")
    assert "no space left" in first.lower()
    assert str(folder / "snapshots" / "step-") in first
    assert "stands" in first
    saved_step = int(first.rpartition("the snapshot of step ")[2].split()[0])
    assert (folder / "snapshots" / f"step-{saved_step:09d}" / "manifest.json").exists()
    # With room again, the same command goes on from there.
    (small_disk / "filler").unlink()
    again = run_forked(command, tmp_path)
    assert again.code == 0, again.err
    assert "resuming run full after step " in again.err
    assert evaluations(folder)[-1][0] == 300


@pytest.mark.slow
def test_stopped_with_a_full_disk_it_says_so_and_may_be_queued_again(
    small_disk: Path, tmp_path: Path
) -> None:
    command = [*TRAIN, *_filled_at_13(tmp_path), "trainer.epochs=100000"]
    command += [f"run.dir={small_disk}", "run.name=full"]
    with started_forked(command, tmp_path) as running:
        _fill_after_the_save(small_disk / "full", small_disk / "filler")
        running.process.send_signal(signal.SIGTERM)
        (tmp_path / "filled").touch()
        done = running.wait()
    assert done.code == 75, done.err
    assert done.left == []
    (last,) = [line for line in done.err.splitlines() if line.startswith("stopped by")]
    assert "; this step is not saved: no space left" in last
    assert "everything is saved" not in done.err
    assert "  go on     echelon resume " in done.err


def _filled_at_13(folder: Path) -> list[str]:
    """Settings of a run that waits in its 13th step until there is a file `filled`."""
    gate = ["fault=wait", "at=13", f"after={folder}/filled"]
    return ["rows=8000", *SETTINGS, "trainer.save.steps=5", "trainer.keep_last=1", *gate]


def _fill_after_the_save(folder: Path, filler: Path) -> None:
    """Once nothing is being written: what a save removes at its end would be room for the next."""
    alone = {"step-000000010", "best"}
    snapshots = folder / "snapshots"
    command_runner.until(
        lambda: snapshots.exists() and set(os.listdir(snapshots)) == alone, 300, "10"
    )
    _fill(filler)


def _fill(path: Path) -> None:
    filled = subprocess.run(["dd", "if=/dev/zero", f"of={path}", "bs=4k"], capture_output=True)
    assert b"No space left" in filled.stderr


def test_a_full_disk_at_the_start_is_a_sentence(
    small_disk: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from echelon.cli import run_and_report_faults, run_command

    _fill(small_disk / "filler")
    assert run_and_report_faults(lambda: run_command(["train", f"run.dir={small_disk}"])) == 2
    told = capsys.readouterr().err
    assert command_runner.is_a_sentence_and_a_hint(told), told
    assert "no space left" in told
    assert str(small_disk) in told


def test_a_read_only_folder_is_a_sentence(
    small_disk: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from echelon.cli import run_and_report_faults, run_command

    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    assert run_and_report_faults(lambda: run_command(["train", f"run.dir={small_disk}"])) == 2
    told = capsys.readouterr().err
    assert command_runner.is_a_sentence_and_a_hint(told), told
    assert "read-only" in told
    assert str(small_disk) in told


# --- numbers ---


@pytest.mark.slow
@pytest.mark.parametrize("how", ["local", "by hand"])
def test_nan_names_the_step_and_the_last_good_snapshot(how: str, tmp_path: Path) -> None:
    case = Case("error", 1, "nan", 8, 8, "the loss is nan at step 8")
    if how == "local":
        all_done = [run_forked([*TRAIN, *case.words, "trainer.save.steps=3"], tmp_path)]
    else:
        all_done = _by_hand(case, tmp_path, "trainer.save.steps=3")
    folder = only_run(tmp_path)
    good = folder / "snapshots" / "step-000000006"
    said = f"the loss is nan at step 8; the last snapshot is {good}"
    assert good.exists()
    for done in all_done:
        assert done.code == 1
        assert done.left == []
        assert done.last_lines.endswith(f"rank 0 on {HOST}, after step 8")
        assert said in done.err
        assert command_runner.is_a_sentence_and_a_hint(done.err), done.err
    assert status(folder)["failure"]["summary"] == said
    if how == "local":
        assert all(said in log for log in _logs(folder))


def _logs(folder: Path) -> list[str]:
    return [path.read_text() for path in sorted((folder / "logs").glob("rank-*.log"))]
