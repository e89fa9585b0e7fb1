"""Run folders by the thousand and runs of a million steps, for the board: each as one real training
left its own, with other settings and numbers."""

from __future__ import annotations

import copy
import json
import math
import random
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from echelon.runs.metrics_file import compute_mark, read_metrics
from echelon.runs.metrics_summary import MetricsSummary, write_summary
from echelon.runs.run_folder import Run
from echelon.utils.files import read_json_object, write_json_atomically

TINY = (
    *("samples=640", "eval_samples=64", "hidden=8"),
    *("trainer.epochs=2", "trainer.log_steps=2", "trainer.batch_size=32"),
)
"""Settings of the toy for a training of 40 steps, with 2 evaluations and 2 snapshots."""
LEARNING_RATES, WIDTHS, SEEDS = (0.3, 0.1, 0.03, 0.01), (16, 64, 256), 5
_STEPS_PER_EPOCH = 20
_CHUNK = 20_000


@dataclass(frozen=True)
class RunTemplate:
    """What a training left: the texts and objects that other runs are made of."""

    config: dict[str, Any]
    status: dict[str, Any]
    events: list[dict[str, Any]]
    start: dict[str, Any]
    log: str
    line: dict[str, Any]
    """The last line of training in metrics.jsonl."""


def train_template(folder: Path) -> RunTemplate:
    """Train the toy for 40 steps in a folder, and take what it left."""
    words = [sys.executable, "-m", "echelon", "train", "run.name=tiny", *TINY]
    subprocess.run(words, cwd=folder, check=True, capture_output=True, stdin=subprocess.DEVNULL)
    return read_template(folder / "runs" / "tiny")


def read_template(folder: Path) -> RunTemplate:
    run = Run(folder)
    lines = [line for line in read_metrics(run.metrics_file) if "loss" in line]
    start = read_json_object(folder / "start.json")
    config, status = read_json_object(run.config_file), read_json_object(run.status_file)
    assert config
    assert status
    events = [json.loads(text) for text in run.history_file.read_text().splitlines()]
    log = (run.logs_folder / "rank-0.log").read_text()
    return RunTemplate(config, status, events, start or {}, log, lines[-1])


def write_runs(root: Path, template: RunTemplate, count: int, points: int = 20) -> list[str]:
    """Write runs over a grid of learning rates, widths and seeds, a minute apart, and return their
    names. A twentieth has failed. The same numbers come out each time."""
    grid = [(lr, width, seed) for lr in LEARNING_RATES for width in WIDTHS for seed in range(SEEDS)]
    names = []
    for number in range(count):
        lr, width, seed = grid[number % len(grid)]
        name = f"toy-{number:05d}"
        state = "failed" if number % 20 == 13 else "finished"
        settings = {"lr": lr, "hidden": width}
        began = 1_700_000_000.0 + 60.0 * number
        write_run(root, name, template, settings, seed, points, state=state, began=began)
        names.append(name)
    return names


def write_run(
    root: Path,
    name: str,
    template: RunTemplate,
    settings: dict[str, Any] | None = None,
    seed: int = 0,
    points: int = 20,
    state: str = "finished",
    began: float = 1_700_000_000.0,
) -> Run:
    """Write one run of as many points, with an evaluation at each twentieth."""
    run = Run(root / name)
    run.logs_folder.mkdir(parents=True)
    summary = MetricsSummary()
    lines = list(make_lines(template, points, settings or {}, seed, began))
    for line in lines:
        summary.add(line)
    run.metrics_file.write_text("".join(map(_format_line, lines)))
    best = min(line["eval_loss"] for line in lines if "eval_loss" in line)
    _write_others(run, template, settings or {}, seed, points, state, began, best)
    summary.offset = run.metrics_file.stat().st_size
    with run.metrics_file.open("rb") as file:
        summary.mark = compute_mark(file, summary.offset)
    write_summary(run, summary, by_training=True)
    return run


def make_lines(
    template: RunTemplate, points: int, settings: dict[str, Any], seed: int, began: float
) -> Iterator[dict[str, Any]]:
    """The lines of metrics.jsonl: a loss that falls by its settings, noisy by its seed."""
    rng = random.Random(f"{sorted(settings.items())} {seed}")
    rate = settings.get("lr", 0.05)
    floor = 0.2 + abs(math.log10(rate / 0.1)) / 4 + 2.0 / settings.get("hidden", 8)
    for step in range(1, points + 1):
        epoch = 1 + (step - 1) // _STEPS_PER_EPOCH
        loss = floor + 3 * math.exp(-step * rate * 2) + rng.gauss(0, 0.03)
        numbers = {"loss": round(loss, 6), "lr": rate, "time": began + 5 + step}
        yield {**template.line, "step": step, "epoch": epoch, "samples": 32 * step, **numbers}
        if step % _STEPS_PER_EPOCH == 0 or step == points:
            mae = round(math.sqrt(abs(loss)), 6)
            yield {"step": step, "epoch": epoch, "eval_loss": round(loss, 6), "eval_mae": mae}


def write_long_run(
    root: Path, name: str, template: RunTemplate, lines: int = 1_000_000, seed: int = 0
) -> Run:
    """Write a run with a noisy loss at each of very many steps, and no summary beside it, as a
    program does that writes metrics.jsonl by itself. Step ``lines // 3`` has a peak of 50."""
    run = Run(root / name)
    run.logs_folder.mkdir(parents=True)
    noise = [random.Random(seed * 7919 + i).gauss(0, 0.1) for i in range(4096)]
    began, peak = 1_700_000_000.0, lines // 3
    with run.metrics_file.open("w") as file:
        for first in range(1, lines + 1, _CHUNK):
            steps = range(first, min(lines + 1, first + _CHUNK))
            level = 0.5 + seed / 100 + 3 * math.exp(-5 * first / lines)
            values = (50.0 if s == peak else level + noise[(s * 31 + first) & 4095] for s in steps)
            file.write(
                "".join(
                    f'{{"step": {s}, "epoch": {1 + s // 10_000}, "samples": {32 * s}, '
                    f'"loss": {value:.6f}, "time": {began + s:.1f}}}\n'
                    for s, value in zip(steps, values, strict=True)
                )
            )
    _write_others(run, template, {}, seed, lines, "finished", began, None)
    return run


def _write_others(
    run: Run,
    template: RunTemplate,
    settings: dict[str, Any],
    seed: int,
    steps: int,
    state: str,
    began: float,
    best: float | None,
) -> None:
    """Write all files of a run but its metrics and their summary."""
    config = copy.deepcopy(template.config)
    config["experiment"] |= settings
    config["seed"] = seed
    config["run"] |= {"name": run.name, "dir": str(run.folder.parent)}
    run.config_file.write_text(json.dumps(config, indent=2) + "\n")
    ended = began + 5 + steps
    status = {**template.status, "state": state, "started": began, "since": began, "step": steps}
    status |= {"total_steps": steps, "updated": ended, "snapshot": None, "best": best}
    write_json_atomically(run.status_file, status)
    cause = "finished" if state == "finished" else "RuntimeError: it broke"
    start, train, stop = (dict(event) for event in template.events)
    start["time"], train["time"] = began, began + 5
    stop |= {"time": ended, "step": steps, "samples": 32 * steps, "cause": cause}
    run.history_file.write_text("".join(_format_line(event) for event in (start, train, stop)))
    write_json_atomically(run.folder / "start.json", template.start)
    (run.logs_folder / "rank-0.log").write_text(template.log)


def _format_line(line: dict[str, Any]) -> str:
    return json.dumps(line) + "\n"
