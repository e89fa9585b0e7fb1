"""One suite for every launcher: the same experiment gives the same curve, logs, failure report and
exit codes, and a run that stopped under one goes on under another."""

from __future__ import annotations

import re
import signal
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest
from command_line import (
    FAULTY,
    REGRESSION,
    CommandLine,
    curve,
    evaluations,
    logs,
    normalize_log,
    open_command_line,
)
from command_runner import CommandResult, RunningCommand, free_port
from slurm_cluster import TestCluster

from echelon.errors import ExitCode
from echelon.runs.run_folder import Run

pytestmark = [pytest.mark.slow, pytest.mark.cluster]

STEPS = 80
SETTINGS = (
    "run.name=a",
    "trainer.batch_size=6",
    f"trainer.steps={STEPS}",
    "trainer.save.epochs=null",
    "trainer.evaluate.epochs=null",
    "trainer.evaluate.steps=20",
    "trainer.log_steps=1",
    "eval_samples=9",
    "launch.threads=1",
)
ERROR = "ValueError: injected error"


# --- the launchers ---


@dataclass(frozen=True)
class Launcher:
    """How the same experiment is typed, and how a person asks it to stop."""

    name: str
    ranks: int
    start: Callable[[CommandLine, tuple[str, ...]], list[RunningCommand]]
    """The command or, for `env`, one per node; the first one shows rank 0."""
    stop: Callable[[CommandLine, list[RunningCommand]], None]

    def wait(self, started: list[RunningCommand]) -> list[CommandResult]:
        return [each.wait() for each in started]


def _typed(*launch: str) -> Callable[[CommandLine, tuple[str, ...]], list[RunningCommand]]:
    return lambda command_line, words: [command_line.start("train", *launch, *words)]


def _by_ssh(command_line: CommandLine, words: tuple[str, ...]) -> list[RunningCommand]:
    hosts = ",".join(command_line.cluster.nodes[:2])
    launch = (f"launch.hosts=[{hosts}]", f"launch.ssh='ssh -F {command_line.cluster.ssh_config}'")
    carry = f"launch.carry=[{','.join(command_line.variables)}]"
    return [command_line.start("train", "launch=ssh", *launch, carry, *words)]


def _by_env(command_line: CommandLine, words: tuple[str, ...]) -> list[RunningCommand]:
    return command_line.env_world("train", "launch=env", *words, port=free_port())


def _terminate_first(command_line: CommandLine, started: list[RunningCommand]) -> None:
    started[0].process.send_signal(signal.SIGTERM)


def _terminate_all(command_line: CommandLine, started: list[RunningCommand]) -> None:
    """A signal to one of the nodes would only have that one leave."""
    for node in started:
        node.process.send_signal(signal.SIGTERM)


def _cancel(command_line: CommandLine, started: list[RunningCommand]) -> None:
    """A signal to one of its processes would only queue the job again."""
    assert command_line.type("cancel", "a").code == ExitCode.OK


SLURM = ("launch=slurm", "launch.nodes=2", "launch.procs=1", "--wait")
LAUNCHERS = (
    Launcher("inline", 1, _typed("launch=inline"), _terminate_first),
    Launcher("local", 2, _typed("launch=local", "launch.procs=2"), _terminate_first),
    Launcher("env", 2, _by_env, _terminate_all),
    Launcher("slurm", 2, _typed(*SLURM), _cancel),
    Launcher("ssh", 2, _by_ssh, _terminate_first),
)
ANY = pytest.mark.parametrize("launcher", LAUNCHERS[2:], ids=lambda each: each.name)
"""What one machine does is shown by `tests/train` and `tests/launch`; here one goes on with what
others began."""


def _next(launcher: Launcher) -> Launcher:
    return LAUNCHERS[(LAUNCHERS.index(launcher) + 1) % len(LAUNCHERS)]


# --- the contract ---


@pytest.fixture(scope="module")
def whole(cluster: TestCluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    """Never stopped, on two processes of one machine."""
    with open_command_line(cluster, tmp_path_factory.mktemp("whole")) as command_line:
        done = command_line.type("train", "launch=local", "launch.procs=2", REGRESSION, *SETTINGS)
        assert done.code == ExitCode.OK, done.err
        yield command_line.run()


@ANY
def test_a_run_stopped_under_one_goes_on_under_another(
    launcher: Launcher, whole: Run, command_line: CommandLine
) -> None:
    # All launchers tell the last rank, and it goes no further before it has heard it.
    command_line.variables = {"ECHELON_TEST_FAULT": f"{launcher.ranks - 1}:20:hear"}
    started = launcher.start(command_line, (REGRESSION, *SETTINGS))
    command_line.wait_for_step(5)
    launcher.stop(command_line, started)
    for done in launcher.wait(started):
        assert done.code == ExitCode.PREEMPTED, done.err
        assert done.left == []
    run, stopped = command_line.run(), command_line.step()
    status = run.read_status_file()
    assert (status["state"], status["step"], status["failure"]) == ("preempted", stopped, None)
    assert run.find_newest_step() == stopped < STEPS
    assert f"stopped by SIGTERM after step {stopped}" in run.get_rank_log_file(0).read_text()

    command_line.variables = {}
    other = _next(launcher)
    for done in other.wait(other.start(command_line, (REGRESSION, *SETTINGS))):
        assert done.code == ExitCode.OK, done.err
        assert done.left == []
    status = run.read_status_file()
    assert (status["state"], status["step"], status["failure"]) == ("finished", STEPS, None)
    _require_same_numbers(run, whole, exactly=launcher.ranks == other.ranks == 2)
    _require_same_logs(run, whole, max(launcher.ranks, other.ranks))


def _require_same_numbers(run: Run, whole: Run, exactly: bool) -> None:
    """Bit for bit at the same world size, and to rounding at another."""
    for numbers in (curve, evaluations):
        mine, theirs = dict(numbers(run)), dict(numbers(whole))
        assert list(mine) == list(theirs)
        assert mine == (theirs if exactly else pytest.approx(theirs, rel=1e-5))


def _require_same_logs(run: Run, whole: Run, ranks: int) -> None:
    """Every rank has one, over both launches; rank 0's ends as that of the whole run does, and says
    how long both took."""
    mine, theirs = logs(run, ranks), logs(whole, 2)
    assert not run.get_rank_log_file(ranks).exists()
    first, went_on = mine[0].split("resuming run a after step ")
    last_words = normalize_log(theirs[0].partition(f"evaluated after step {STEPS}")[2])
    both = "; the whole run: # steps in # s"
    mine_last = normalize_log(went_on.partition(f"evaluated after step {STEPS}")[2])
    assert [line.removesuffix(both) for line in mine_last] == last_words
    assert [line for line in mine_last if line.endswith(both)] == [f"finished # steps in # s{both}"]
    assert "everything is saved" in first
    assert all(normalize_log(log) == [] for log in mine[1:])


@ANY
def test_a_failure_is_reported_in_the_same_words(
    launcher: Launcher, command_line: CommandLine
) -> None:
    guilty = launcher.ranks - 1
    host = _host_of(launcher, guilty, command_line)
    fault = ("fault=error", f"on={guilty}", "at=5", "trainer.batch_size=8", "trainer.log_steps=1")
    first, *others = launcher.wait(launcher.start(command_line, (FAULTY, "run.name=a", *fault)))
    assert first.code == ExitCode.FAILED, first.err
    for done in others:
        assert done.code == ExitCode.FAILED, done.err
        assert f"rank {guilty} on {host} failed" in done.err
    status = command_line.run().read_status_file()
    failure = status["failure"]
    assert (status["state"], status["step"]) == ("failed", 4)
    assert (failure["rank"], failure["host"], failure["step"]) == (guilty, host, 4)
    assert failure["summary"] == ERROR
    assert failure["detail"].startswith("Traceback (most recent call last):")
    assert first.left == []
    report = f"{failure['detail'].rstrip()}\n\nrank {guilty} on {host} failed after step 4: {ERROR}"
    screen = re.sub(r"(?m)^(srun: error|job \d+): .*\n", "", first.out + first.err)
    for text in (screen, *logs(command_line.run(), launcher.ranks)):
        assert text.rstrip().endswith(report), text


def _host_of(launcher: Launcher, rank: int, command_line: CommandLine) -> str:
    away = launcher.name in ("env", "slurm", "ssh")
    return command_line.cluster.nodes[rank] if away else socket.gethostname()


def test_the_suite_knows_every_launcher() -> None:
    from echelon.config.schema import LAUNCHERS as KNOWN

    # The pods of `k8s` need a cluster of Kubernetes, which tests cannot have: its manifests are
    # compared with the published schemas, and its agents run as processes, in
    # tests/launch/test_kubernetes.py and test_kubernetes_pods.py.
    assert {launcher.name for launcher in LAUNCHERS} == set(KNOWN) - {"k8s"}
