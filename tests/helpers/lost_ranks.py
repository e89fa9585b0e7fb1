"""Runs of `faulty_loops.py` in which a rank is lost, and what must have become of their numbers."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import pytest
from command_runner import ECHELON, HERE, CommandResult, only_run, status
from worlds import run_forked

from echelon.runs.metrics_file import SPEED_METRICS, read_metrics

LOOPS = HERE / "faulty_loops.py"
SETTINGS = ("trainer.batch_size=8", "trainer.steps=40", "trainer.log_steps=1", "pause_s=0.02")
CLOCKS = ("time", *SPEED_METRICS)
HANGS = "no progress for 3 s"
HUNG = ("launch.hang_s=3",)
TRANSIENT = "injected"


@dataclass(frozen=True)
class Loss:
    """Rank `on` of `procs` is lost in `phase` at step `at` of a function by `fault`."""

    function: str
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
        procs = f"launch.procs={self.procs}"
        return list_words(self.function, procs, f"fault='{self.fault}'", *place, *self.more)

    def __str__(self) -> str:
        return f"{self.function}-{self.fault}-rank-{self.on}-of-{self.procs}-{self.phase}-{self.at}"


def list_words(function: str, *more: str) -> list[str]:
    return [*ECHELON, "train", f"experiment={LOOPS}:{function}", "launch=local", *SETTINGS, *more]


def run_clean(folder: Path, function: str, *more: str) -> Path:
    """A run that nothing happens to."""
    done = run_forked(list_words(function, "launch.procs=2", "pause_s=0", *more), folder)
    assert done.code == 0, done.err
    return only_run(folder)


def require_same_numbers(folder: Path, clean: Path, has_evaluations: bool = True) -> None:
    """Every line stands there once, in its order, with the numbers of the clean run."""
    lines, clean_lines = (
        [
            {k: v for k, v in line.items() if k not in CLOCKS}
            for line in read_metrics(f / "metrics.jsonl")
            if has_evaluations or "loss" in line
        ]
        for f in (folder, clean)
    )
    assert [list(line) for line in lines] == [list(line) for line in clean_lines]
    assert [line["step"] for line in lines] == [line["step"] for line in clean_lines]
    for line, clean_line in zip(lines, clean_lines, strict=True):
        assert line == pytest.approx(clean_line, rel=1e-4, abs=1e-7)


def run_with_loss(loss: Loss, folder: Path, *more: str, **variables: str) -> CommandResult:
    """The run, which went on without the rank until it was replaced."""
    once = (f"once={folder}/once", "missing_pause_s=1")
    done = run_forked([*loss.words, *once, *more], folder, **variables)
    assert done.code == 0, done.err
    assert done.left == []
    assert (folder / "once").exists()  # it did happen
    found = status(only_run(folder))
    assert (found["state"], found["failure"]) == ("finished", None)
    lost = re.search(
        rf"lost rank {loss.on} on \S+ (?:after step \d+|before its first step): (.*)", done.err
    )
    assert lost is not None, done.err
    assert loss.says in lost[1]
    # With a limit of seconds another one may seem to hang on a busy machine, and be missing still
    # or come back together with it.
    size = r"\d+" if loss.says == HANGS else loss.procs
    back = rf"ranks? ([\d, ]*, )?{loss.on}(, [\d, ]*)? replaced: {size} processes"
    assert re.search(back, done.err), done.err
    assert "starting again" not in done.err
    return done
