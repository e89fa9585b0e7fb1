"""A small sample of benchmarks/large_runs.py: memory does not grow with a run."""

from __future__ import annotations

import tracemalloc
from pathlib import Path

import pytest
from run_folders import lines, make_run

from echelon.runs.curves import load_metrics
from echelon.runs.downsample import MAX_POINTS
from echelon.runs.metrics_summary import read_summary
from echelon.runs.record import read_run_records
from echelon.runs.run_folder import Run
from echelon.tracking.metrics_writer import MetricsFile

pytestmark = pytest.mark.slow


def measure_peak_bytes(run: Run) -> int:
    """The peak of memory while a list, a picture and a resumed training read the metrics."""
    [record], _ = read_run_records([run])
    tracemalloc.start()
    read_summary(run)
    metrics = load_metrics(record)
    assert metrics.curves["loss"].count > MAX_POINTS
    del metrics
    MetricsFile(run, 10**9)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return peak


def test_the_lines_of_a_long_run_are_never_all_in_memory(tmp_path: Path) -> None:
    text = [f'{{"step": {n}, "loss": {n % 97}.5}}\n' for n in range(1, 4 * MAX_POINTS)]
    run = make_run(tmp_path, "a", "".join(text))
    assert measure_peak_bytes(run) < 2 << 20, "its lines alone would take 5 MB"


def test_the_curve_of_a_long_run_has_its_best_and_its_last(tmp_path: Path) -> None:
    found = lines(3 * MAX_POINTS, every=MAX_POINTS)
    found[5000]["loss"] = -1.0
    run = make_run(tmp_path, "a", found)
    [record], _ = read_run_records([run])
    metrics = load_metrics(record)
    loss = metrics.curves["loss"]
    assert (loss.steps[loss.best_index], loss.values[loss.best_index]) == (
        found[5000]["step"],
        -1.0,
    )
    assert (loss.steps[-1], loss.count) == (3 * MAX_POINTS, 3 * MAX_POINTS)
    assert metrics.axis_points.samples[-1] == 32 * 3 * MAX_POINTS
    assert metrics.axis_points.trained_s[-1] == 3 * MAX_POINTS
