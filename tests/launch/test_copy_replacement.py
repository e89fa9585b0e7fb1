"""A rank is lost whose part of the state no other rank has: shards of a model, or the position of a
stream. It is rebuilt from copies in the memory of the others. Mirrors and recomputed layers go on
too."""

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
from object_store_server import serve_object_store
from worlds import run_forked

from echelon.runs.metrics_file import read_metrics

FSDP = ("replica.kind=fsdp",)
HYBRID = ("replica.shards=2",)
UNSAVED = ("trainer.save.epochs=9", "trainer.evaluate.epochs=9")
"""Nothing is on disk before the end."""
WIDE = "rows=1000"
LOADER = ("trainer.loader_workers=1",)

LOSSES = (
    Loss("layers", 2, "kill", 1, "step", 5, more=FSDP),
    Loss("layers", 2, "kill", 0, "step", 23, more=(*FSDP, *UNSAVED)),
    Loss("layers", 3, "kill", 1, "step", 33, more=(*FSDP, *UNSAVED)),
    Loss("layers", 3, "kill", 0, "evaluation", 10, more=FSDP),
    Loss("layers", 3, "kill", 2, "save", 1, more=(*FSDP, *UNSAVED)),  # within the first copy
    Loss("layers", 3, "kill", 1, "save", 10, more=FSDP),
    # While the first copy is on its way to other ranks: they begin anew.
    Loss("layers", 3, "kill", 2, "step", 2, more=(*FSDP, *UNSAVED, WIDE)),
    Loss("layers", 2, "kill", 1, "step", 2, more=(*FSDP, *UNSAVED, WIDE)),
    Loss("layers", 3, "stop", 1, "step", 8, HANGS, more=(*FSDP, *HUNG)),
    Loss("layers", 2, "error", 1, "step", 5, TRANSIENT, more=(*FSDP, "transient=true")),
    # Another replica has the shards of the lost rank; the three that are left hold one together.
    Loss("layers", 4, "kill", 1, "step", 23, more=(*HYBRID, *UNSAVED)),
    Loss("streamed_layers", 2, "kill", 1, "step", 23),
    Loss("streamed_layers", 3, "kill", 0, "step", 13, more=LOADER),
    Loss("streamed_loop", 3, "kill", 1, "step", 23),
    Loss("streamed_loop", 2, "kill", 0, "step", 13, more=LOADER),
    Loss("layers", 3, "kill", 1, "step", 13, more=("replica.checkpoint=true",)),
)


@pytest.mark.slow
@pytest.mark.parametrize("loss", LOSSES, ids=str)
def test_what_a_lost_rank_had_is_in_the_memory_of_others(
    loss: Loss, clean_runs: Any, tmp_path: Path
) -> None:
    run_with_loss(loss, tmp_path)
    clean = clean_runs(loss.function, *(word for word in loss.more if word == WIDE))
    evaluates = "trainer.evaluate.epochs=9" not in loss.more
    require_same_numbers(only_run(tmp_path), clean, has_evaluations=evaluates)


@pytest.mark.slow
def test_shards_are_rebuilt_again_and_again(clean_runs: Any, tmp_path: Path) -> None:
    loss = Loss("layers", 3, "kill", 1, "step", 4, more=FSDP)
    done = run_forked([*loss.words, "missing_pause_s=0.5"], tmp_path)
    assert done.code == 0, done.err
    assert done.left == []
    assert done.err.count("lost rank 1") > 1
    require_same_numbers(only_run(tmp_path), clean_runs("layers"))


@pytest.mark.slow
@pytest.mark.parametrize("on", [0, 1])
@pytest.mark.parametrize("function", ["layers", "loop"])
def test_the_mirror_goes_on_with_the_new_rank_0(
    function: str, on: int, clean_runs: Any, tmp_path: Path
) -> None:
    loss = Loss(function, 2, "kill", on, "step", 23, more=("trainer.save.steps=10",))
    with serve_object_store() as server:
        mirror = f"trainer.mirror=s3://{server.bucket}/runs"
        done = run_with_loss(loss, tmp_path, mirror, **server.environment)
        keys = server.list_keys()
    folder = only_run(tmp_path)
    require_same_numbers(folder, clean_runs(function))
    assert f"runs/{folder.name}/step-000000040/manifest.json" in keys
    assert status(folder)["mirror"]["step"] == 40
    assert "warning" not in done.err


@pytest.mark.slow
def test_a_slow_rank_is_named_in_later_rounds_too(tmp_path: Path) -> None:
    """Its host is asked of the store, which has other keys in every round."""
    loss = Loss("layers", 3, "kill", 1, "step", 3, more=("slow_on=2", "launch.hang_s=20"))
    done = run_with_loss(loss, tmp_path, "trainer.steps=25", *UNSAVED)
    assert re.search(r"rank 1 replaced: 3 processes\n(.*\n)*?rank 2 on \S+ ", done.err), done.err


@pytest.mark.slow
def test_copies_of_shards_are_counted(tmp_path: Path) -> None:
    words = list_words("layers", "launch.procs=2", *FSDP, *UNSAVED, "rows=600")
    done = run_forked(words, tmp_path)
    assert done.code == 0, done.err
    folder = only_run(tmp_path)
    copies = status(folder)["memory_copies"]
    trained_s = (
        sum(line.get("step_ms", 0.0) for line in read_metrics(folder / "metrics.jsonl")) / 1e3
    )
    print(f"{copies['count']} copies took {100 * copies['seconds'] / trained_s:.2f} % of the time")
    assert copies["count"] >= 1
