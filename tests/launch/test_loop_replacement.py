"""A rank is lost in a loop or a step of the user's own: the others go back to a copy of the state
in memory, a replacement joins, and the curve is that of a run that nothing happened to."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from command_runner import only_run, status
from lost_ranks import (
    HANGS,
    HUNG,
    TRANSIENT,
    Loss,
    list_words,
    require_same_numbers,
    run_with_loss,
)
from worlds import run_forked

from echelon.runs.metrics_file import read_metrics

LOSSES = (
    Loss("loop", 2, "kill", 1, "step", 5),
    Loss("loop", 2, "kill", 0, "step", 13, more=("trainer.save.epochs=9",)),
    Loss("loop", 3, "kill", 0, "evaluation", 10),
    Loss("loop", 3, "kill", 1, "evaluation", 20, more=("trainer.save.epochs=9",)),
    Loss("loop", 2, "kill", 0, "save", 10),
    Loss("loop", 3, "kill", 1, "save", 1),  # within the first copy in memory
    Loss("loop", 3, "stop", 1, "step", 8, HANGS, HUNG),
    Loss("loop", 2, "sleep", 0, "step", 8, HANGS, HUNG),
    Loss("loop", 3, "error", 1, "step", 5, TRANSIENT, ("transient=true",)),
    Loss("loop", 2, "segv", 1, "step", 1, "killed by SIGSEGV"),
    # Rank 0 imports tensorboard, and has yet to begin.
    Loss("loop", 2, "kill", 1, "step", 1, more=("track=tensorboard",)),
    Loss("steps", 2, "kill", 1, "step", 25),
    Loss("steps", 3, "kill", 0, "step", 9),
    Loss("steps", 3, "stop", 2, "step", 8, HANGS, HUNG),
    Loss("experiment", 2, "kill", 0, "step", 13),
    Loss("experiment", 3, "kill", 1, "evaluation", 10),
    Loss("experiment", 2, "kill", 0, "save", 10),
    Loss("experiment", 3, "sleep", 1, "step", 8, HANGS, HUNG),
    Loss("experiment", 2, "error", 1, "step", 5, TRANSIENT, ("transient=true",)),
)


@pytest.mark.slow
@pytest.mark.parametrize("loss", LOSSES, ids=str)
def test_all_go_back_to_a_copy_and_the_rank_is_replaced(
    loss: Loss, clean_runs: Any, tmp_path: Path
) -> None:
    run_with_loss(loss, tmp_path)
    require_same_numbers(only_run(tmp_path), clean_runs(loss.function))


@pytest.mark.slow
@pytest.mark.parametrize("caught", ["Exception", "everything"])
def test_a_loop_that_catches_errors_does_not_go_on_without_the_others(
    caught: str, clean_runs: Any, tmp_path: Path
) -> None:
    run_with_loss(Loss("loop", 3, "kill", 1, "step", 13, more=(f"caught={caught}",)), tmp_path)
    require_same_numbers(only_run(tmp_path), clean_runs("loop"))


@pytest.mark.slow
@pytest.mark.parametrize("loop", ["loop", "experiment"])
@pytest.mark.parametrize(("on", "phase", "at"), [(0, "save", 40), (1, "step", 40)])
def test_a_rank_that_is_lost_at_the_end_is_made_up_for(
    loop: str, on: int, phase: str, at: int, clean_runs: Any, tmp_path: Path
) -> None:
    loss = Loss(loop, 2, "kill", on, phase, at)
    done = run_forked([*loss.words, f"once={tmp_path}/once"], tmp_path)
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
    done = run_forked([*loss.words, "missing_pause_s=0.5"], tmp_path)
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
    once = (f"unbuildable={tmp_path}/once", f"once={tmp_path}/once", "missing_pause_s=0.5")
    done = run_forked([*loss.words, *once], tmp_path)
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
    assert copies["count"] >= 1
