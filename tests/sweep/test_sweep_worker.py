"""What a worker makes of a world's end, with worlds that do as they are told here."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from echelon.config.schema import Config
from echelon.entrypoint import compose_config
from echelon.errors import ExitCode
from echelon.runs.run_folder import Run
from echelon.sweep.sweep_folder import SweepFolder, SweepSettings
from echelon.sweep.trial_store import TrialStore, TrialSummary
from echelon.sweep.worker import SweepWorker

FILE = """\
method: grid
metric: {name: loss}
parameters: {lr: {values: [0.1, 0.2]}}
early_terminate: {type: hyperband, min_iter: 1, eta: 2, strict: true}
"""
KILLED = -signal.SIGKILL


class World:
    """One evaluation, then it waits to be asked to end, or ends by itself."""

    def __init__(self, run: Run, loss: float, code: int, waits: bool) -> None:
        run.logs_folder.mkdir(parents=True, exist_ok=True)
        run.metrics_file.write_text(json.dumps({"step": 1, "eval_loss": loss}) + "\n")
        self._code, self._over = code, not waits

    def poll(self, wait_s: float) -> int | None:
        return self._code if self._over else None

    def request_stop(self) -> None:
        self._over = True

    def kill(self) -> None:
        raise AssertionError("a world that ends when asked is not killed")


class Worlds:
    def __init__(self, *ends: tuple[float, int, bool], cancelled: bool = False) -> None:
        self._ends, self._cancelled = list(ends), cancelled

    def start(self, config: Config, run: Run, variables: Mapping[str, str]) -> World:
        world = World(run, *self._ends.pop(0))
        if self._cancelled:
            run.cancel_file.touch()
        return world


@pytest.fixture(autouse=True)
def _signals() -> Iterator[None]:
    numbers = (signal.SIGTERM, signal.SIGUSR2)
    before = {number: signal.getsignal(number) for number in numbers}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def results(folder: Path, worlds: Worlds, in_job: bool = False) -> tuple[int, list[TrialSummary]]:
    sweep = SweepFolder(folder / "s")
    sweep.write_files(SweepSettings([], [], {"name": "loss"}, 2), FILE)
    code = SweepWorker(sweep, "0", compose_config, worlds, in_job).run()
    return code, TrialStore(sweep).summarize_trials()


@pytest.mark.parametrize(
    ("code", "state"), [(ExitCode.PREEMPTED, "pruned"), (ExitCode.OK, "finished")]
)
def test_what_was_at_its_last_step_when_it_was_pruned_is_finished(
    tmp_path: Path, code: int, state: str
) -> None:
    worlds = Worlds((1.0, ExitCode.OK, False), (2.0, code, True))
    ended, found = results(tmp_path, worlds)
    assert ended == ExitCode.OK
    assert [result.state for result in found] == ["finished", state]
    second = SweepFolder(tmp_path / "s").get_trial_run(1).read_status_file()
    assert second.get("state") == ("pruned" if state == "pruned" else None), "as its run wrote it"


def test_a_trial_that_is_cancelled_is_over_and_the_next_one_comes(tmp_path: Path) -> None:
    worlds = Worlds(
        (1.0, ExitCode.PREEMPTED, True), (0.5, ExitCode.PREEMPTED, True), cancelled=True
    )
    ended, found = results(tmp_path, worlds, in_job=True)
    assert ended == ExitCode.OK
    assert [(result.state, result.cause) for result in found] == [("failed", "cancelled")] * 2


def test_a_trial_that_was_cut_off_is_given_back_and_the_job_goes_on_in_another(
    tmp_path: Path,
) -> None:
    ended, found = results(tmp_path, Worlds((1.0, KILLED, False)), in_job=True)
    assert ended == ExitCode.PREEMPTED
    assert [result.state for result in found] == ["waiting"]


def test_the_cause_of_a_failed_trial_is_one_short_line(tmp_path: Path) -> None:
    class FailingWorlds(Worlds):
        def start(self, config: Config, run: Run, variables: Mapping[str, str]) -> World:
            world = super().start(config, run, variables)
            (run.logs_folder / "trial.log").write_text("error: it broke" + " and broke" * 100)
            return world

    _, found = results(tmp_path, FailingWorlds((1.0, 1, False), (1.0, 1, False)))
    assert [result.state for result in found] == ["failed", "failed"]
    assert found[0].cause.startswith("it broke and broke")
    assert len(found[0].cause) == 200
