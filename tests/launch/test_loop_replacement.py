"""A rank is lost in a loop or a step of the user's own: the others go back to a copy of the state
in memory, a replacement joins, and the curve is that of a run that nothing happened to."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from command_runner import ECHELON, HERE, only_run, status
from worlds import run_forked

from echelon.runs.metrics_file import SPEED_METRICS, read_metrics

LOOPS = HERE / "faulty_loops.py"
SETTINGS = ("trainer.batch_size=8", "trainer.steps=40", "trainer.log_steps=1", "pause_s=0.02")
CLOCKS = ("time", *SPEED_METRICS)


@dataclass(frozen=True)
class Loss:
    """Rank `on` of `procs` is lost in `phase` at step `at` of a loop by `fault`."""

    loop: str
    procs: int
    fault: str
    on: int
    phase: str
    at: int
    says: str = "killed by SIGKILL"
    more: tuple[str, ...] = ()

    @property
    def words(self) -> list[str]:
        place = [f"on={self.on}", f"phase={self.phase}", f"at={self.at}"]
        return [f"launch.procs={self.procs}", f"fault='{self.fault}'", *place, *self.more]

    def __str__(self) -> str:
        return f"{self.loop}-{self.fault}-rank-{self.on}-of-{self.procs}-{self.phase}-{self.at}"


HANGS = "no progress for 3 s"
HUNG = ("launch.hang_s=3",)
LOSSES = (
    Loss("loop", 2, "kill", 1, "step", 5),
    Loss("loop", 2, "kill", 0, "step", 13, more=("trainer.save.epochs=9",)),
    Loss("loop", 3, "kill", 0, "evaluation", 10),
    Loss("loop", 3, "kill", 1, "evaluation", 20, more=("trainer.save.epochs=9",)),
    Loss("loop", 2, "kill", 0, "save", 10),
    Loss("loop", 3, "kill", 1, "save", 1),  # within the first copy in memory
    Loss("loop", 3, "stop", 1, "step", 8, HANGS, HUNG),
    Loss("loop", 2, "sleep", 0, "step", 8, HANGS, HUNG),
    Loss("loop", 3, "error", 1, "step", 5, "TransientError: injected", ("transient=true",)),
    Loss("loop", 2, "segv", 1, "step", 1, "killed by SIGSEGV"),
    Loss("steps", 2, "kill", 1, "step", 25),
    Loss("steps", 3, "kill", 0, "step", 9),
    Loss("steps", 3, "stop", 2, "step", 8, HANGS, HUNG),
    Loss("experiment", 2, "kill", 0, "step", 13),
    Loss("experiment", 3, "kill", 1, "evaluation", 10),
    Loss("experiment", 2, "kill", 0, "save", 10),
    Loss("experiment", 3, "sleep", 1, "step", 8, HANGS, HUNG),
    Loss("experiment", 2, "error", 1, "step", 5, "TransientError: injected", ("transient=true",)),
)


def list_words(loop: str, *more: str) -> list[str]:
    return [*ECHELON, "train", f"experiment={LOOPS}:{loop}", "launch=local", *SETTINGS, *more]


@pytest.fixture(scope="module")
def clean_runs(tmp_path_factory: pytest.TempPathFactory) -> Any:
    @cache
    def find_clean_run(loop: str) -> Path:
        folder = tmp_path_factory.mktemp(f"clean-{loop}")
        done = run_forked(list_words(loop, "launch.procs=2", "pause_s=0"), folder)
        assert done.code == 0, done.err
        return only_run(folder)

    return find_clean_run


def require_same_numbers(folder: Path, clean: Path) -> None:
    """Every line stands there once, in its order, with the numbers of the clean run."""
    lines, clean_lines = (
        [{k: v for k, v in line.items() if k not in CLOCKS} for line in read_metrics(f)]
        for f in (folder / "metrics.jsonl", clean / "metrics.jsonl")
    )
    assert [list(line) for line in lines] == [list(line) for line in clean_lines]
    assert [line["step"] for line in lines] == [line["step"] for line in clean_lines]
    for line, clean_line in zip(lines, clean_lines, strict=True):
        assert line == pytest.approx(clean_line, rel=1e-4, abs=1e-7)


@pytest.mark.slow
@pytest.mark.parametrize("loss", LOSSES, ids=str)
def test_all_go_back_to_a_copy_and_the_rank_is_replaced(
    loss: Loss, clean_runs: Any, tmp_path: Path
) -> None:
    once = (f"once={tmp_path}/once", "missing_pause_s=1")
    done = run_forked(list_words(loss.loop, *loss.words, *once), tmp_path)
    assert done.code == 0, done.err
    assert done.left == []
    assert (tmp_path / "once").exists()  # it did happen
    folder = only_run(tmp_path)
    require_same_numbers(folder, clean_runs(loss.loop))
    assert status(folder)["state"] == "finished"
    assert status(folder)["failure"] is None
    lost = re.search(
        rf"lost rank {loss.on} on \S+ (after step \d+|before its first step): (.*)", done.err
    )
    assert lost is not None, done.err
    assert loss.says in lost[2]
    assert f"rank {loss.on} replaced: {loss.procs} processes" in done.err
    assert "starting again" not in done.err


@pytest.mark.slow
@pytest.mark.parametrize("caught", ["Exception", "everything"])
def test_a_loop_that_catches_errors_does_not_go_on_without_the_others(
    caught: str, clean_runs: Any, tmp_path: Path
) -> None:
    loss = Loss("loop", 3, "kill", 1, "step", 13, more=(f"caught={caught}",))
    once = (f"once={tmp_path}/once", "missing_pause_s=1")
    done = run_forked(list_words("loop", *loss.words, *once), tmp_path)
    assert done.code == 0, done.err
    require_same_numbers(only_run(tmp_path), clean_runs("loop"))
    assert "rank 1 replaced: 3 processes" in done.err


@pytest.mark.slow
@pytest.mark.parametrize("loop", ["loop", "experiment"])
@pytest.mark.parametrize(("on", "phase", "at"), [(0, "save", 40), (1, "step", 40)])
def test_a_rank_that_is_lost_at_the_end_is_made_up_for(
    loop: str, on: int, phase: str, at: int, clean_runs: Any, tmp_path: Path
) -> None:
    loss = Loss(loop, 2, "kill", on, phase, at)
    done = run_forked(list_words(loop, *loss.words, f"once={tmp_path}/once"), tmp_path)
    assert done.code == 0, done.err
    assert done.left == []
    assert (tmp_path / "once").exists()  # it did happen
    folder = only_run(tmp_path)
    require_same_numbers(folder, clean_runs(loop))
    assert (folder / "snapshots" / "step-000000040" / "manifest.json").exists()
    assert status(folder)["state"] == "finished"


@pytest.mark.slow
@pytest.mark.parametrize("loop", ["loop", "experiment"])
def test_a_rank_that_is_lost_again_and_again_does_not_keep_the_others(
    loop: str, clean_runs: Any, tmp_path: Path
) -> None:
    """Each replacement is killed in its fourth step, and the other rank goes on meanwhile."""
    loss = Loss(loop, 2, "kill", 1, "step", 4)
    done = run_forked(list_words(loop, *loss.words), tmp_path)
    assert done.code == 0, done.err
    assert done.left == []
    assert len(re.findall("lost rank 1", done.err)) > 1
    require_same_numbers(only_run(tmp_path), clean_runs(loop))


@pytest.mark.slow
@pytest.mark.parametrize("loop", ["loop", "experiment"])
def test_a_rank_whose_replacements_do_not_start_is_left_out(
    loop: str, clean_runs: Any, tmp_path: Path
) -> None:
    loss = Loss(loop, 2, "kill", 1, "step", 3)
    once = (f"unbuildable={tmp_path}/once", f"once={tmp_path}/once", "missing_pause_s=0.2")
    done = run_forked(list_words(loop, *loss.words, *once), tmp_path)
    assert done.code == 0, done.err
    assert done.left == []
    require_same_numbers(only_run(tmp_path), clean_runs(loop))
    assert "warning: rank 1 could not be replaced: " in done.err


@pytest.mark.slow
def test_copies_are_counted(tmp_path: Path) -> None:
    done = run_forked(list_words("loop", "launch.procs=2", "rows=100000"), tmp_path)
    assert done.code == 0, done.err
    folder = only_run(tmp_path)
    copies = status(folder)["memory_copies"]
    trained_s = sum(
        line["step_ms"] for line in read_metrics(folder / "metrics.jsonl") if "loss" in line
    )
    print(f"{copies['count']} copies took {1e5 * copies['seconds'] / trained_s:.2f} % of the time")
    assert 1 <= copies["count"] < 40
