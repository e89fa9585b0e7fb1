"""Run folders as a training leaves them, made in microseconds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from rich.text import Text

from echelon.cli import run_and_report_faults, run_command
from echelon.config.schema import Config
from echelon.runs.run_folder import RUN_FORMAT, Run

STARTED = 1_700_000_000.0
TOY = "echelon.recipes.toy:experiment"


def lines(steps: int = 40, every: int = 10, start: float = STARTED, **more: Any) -> list[Any]:
    """A line of training per step, a second each, and an evaluation now and then."""
    found: list[Any] = []
    for step in range(1, steps + 1):
        numbers = {"loss": 4.0 / step, "lr": 0.1, "samples_per_s": 32.0}
        where = {"step": step, "epoch": 1 + (step - 1) // every, "samples": 32 * step}
        found.append({**where, **numbers, "time": start + step, **more})
        if step % every == 0:
            evaluated = {"eval_loss": 1.0 + abs(step - 30) / 100, "eval_acc": step / 100}
            found.append({"step": step, "epoch": step // every, **evaluated})
    return found


def make_run(
    root: Path,
    name: str,
    metrics: list[Any] | str = "",
    trainer: dict[str, Any] | None = None,
    status: dict[str, Any] | None = None,
    **settings: Any,
) -> Run:
    run = Run(root / name)
    run.logs_folder.mkdir(parents=True)
    config = Config(experiment={"entry": TOY, **settings}).to_dict()
    config["trainer"] |= trainer or {}
    run.config_file.write_text(json.dumps({"run_format": RUN_FORMAT, **config}))
    said = {"state": "finished", "launcher": "inline", "nodes": 1, "world": 1}
    times = {"started": STARTED, "since": STARTED, "updated": STARTED + 99}
    run.status_file.write_text(json.dumps(said | times | (status or {})))
    text = metrics if isinstance(metrics, str) else "".join(json.dumps(m) + "\n" for m in metrics)
    run.metrics_file.write_text(text)
    return run


def write_phases(run: Run, *phases: tuple[float, float | None, int, int], **more: Any) -> None:
    """The history of a run: when each start began to train and ended, and its first and last step,
    of 32 samples each. Without an end it was killed."""
    events: list[dict[str, Any]] = []
    for begun, ended, first, last in phases:
        where = {"host": "here", "launcher": "local", "job": None, "nodes": 1, "processes": 1}
        events.append({"event": "start", "time": begun - 3, **where, **more})
        events.append({"event": "train", "time": begun, "step": first, "samples": 32 * first})
        if ended is not None:
            end = {"step": last, "samples": 32 * last, "cause": "stopped by SIGTERM"}
            events.append({"event": "stop", "time": ended, **end})
    with run.history_file.open("a") as file:
        file.writelines(json.dumps(event) + "\n" for event in events)


def echelon(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    """`echelon WORDS` in this process: its code, and what it said, without colours."""
    code = run_and_report_faults(lambda: run_command(list(words)))
    said = capsys.readouterr()
    return code, Text.from_ansi(said.out).plain, said.err
