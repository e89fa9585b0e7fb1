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


def echelon(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    """`echelon WORDS` in this process: its code, and what it said, without colours."""
    code = run_and_report_faults(lambda: run_command(list(words)))
    said = capsys.readouterr()
    return code, Text.from_ansi(said.out).plain, said.err
