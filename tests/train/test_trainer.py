"""When the trainer evaluates, saves and keeps; what a snapshot holds; who talks and who reads."""

from __future__ import annotations

import socket
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from worlds import (
    configured,
    losses,
    metrics,
    snapshot_steps,
    spawn_world,
    state_at,
    steps_logged,
    train_config,
    train_world,
)

from echelon.config.schema import Config
from echelon.runs.run_folder import Run
from echelon.snapshot.layout import find_best
from echelon.snapshot.reader import verify_snapshot
from echelon.train import worker
from echelon.train.worker import train_in_process

pytestmark = pytest.mark.slow

BATCH = "trainer.batch_size=5"
"""Four steps per epoch of the 17 samples."""


def read_eval_values(run: Run, name: str = "eval_loss") -> dict[int, float]:
    return {line["step"]: line[name] for line in metrics(run) if name in line}


def test_the_first_lines_say_what_a_batch_is(tmp_path: Path) -> None:
    said = train_world(tmp_path, 2, "trainer.batch_size=1000000", "trainer.steps=1").said
    assert ": 1 step over 17 samples in batches of 1,000,000 on 2 processes" in said
    all_of_them = "but there are 17 samples: every step takes all of them"
    assert said.count(f"note: trainer.batch_size=1000000, {all_of_them}") == 1
    assert "finished 1 step in" in said
    assert "note:" not in train_world(tmp_path, 1, BATCH, "trainer.steps=1", name="b").said


# --- when ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "steps_evaluated", "steps_saved"),
    [
        ([], [4, 8, 12], [4, 8, 12]),
        (["trainer.steps=6"], [4, 6], [4, 6]),  # steps count, not epochs; the end always
        (["trainer.evaluate.steps=5", "trainer.evaluate.epochs=null"], [5, 10, 12], [4, 8, 12]),
        (["trainer.evaluate.steps=5"], [4, 5, 8, 10, 12], [4, 8, 12]),
        (["trainer.save.steps=5", "trainer.save.epochs=2"], [4, 8, 12], [5, 8, 10, 12]),
        (["trainer.evaluate.minutes=1e-9", "trainer.steps=3"], [1, 2, 3], [3]),
    ],
    ids=lambda value: " ".join(map(str, value)),
)
def test_evaluated_and_saved_when_due(
    tmp_path: Path, words: list[str], steps_evaluated: list[int], steps_saved: list[int]
) -> None:
    """The best is saved too, whenever it comes: with a rate of 0 that is the first evaluation."""
    common = [BATCH, "eval_samples=3", "trainer.keep_last=99", "lr=0"]
    trained = train_world(tmp_path, 2, *common, *words)
    assert trained.codes == [0, 0], trained.said
    assert list(read_eval_values(trained.run)) == steps_evaluated
    assert snapshot_steps(trained.run) == sorted({*steps_saved, steps_evaluated[0]})


@pytest.mark.parametrize(("best_is", "pick"), [("min", min), ("max", max)])
def test_the_last_ones_and_the_best_are_kept(tmp_path: Path, best_is: str, pick: Any) -> None:
    words = ["eval_samples=9", "metrics=true", "lr=0.3", "trainer.evaluate.steps=1"]
    keep = ["trainer.keep_last=2", "trainer.best=mae", f"trainer.best_is={best_is}"]
    trained = train_world(tmp_path, 1, BATCH, *words, *keep)
    assert trained.codes == [0], trained.said
    of_steps = read_eval_values(trained.run, "eval_mae")
    best_step = pick(of_steps, key=lambda step: of_steps[step])
    kept = find_best(trained.run.snapshots_folder)
    assert kept is not None
    assert kept.name == f"step-{best_step:09d}"
    assert len(snapshot_steps(trained.run)) <= 3
    assert {best_step, 12} <= set(snapshot_steps(trained.run))
    assert trained.run.read_status_file()["best"] == of_steps[best_step]


def test_the_last_step_can_be_the_best(tmp_path: Path) -> None:
    """Also where it is saved because of its epoch, and evaluated only because it is the last."""
    words = ["eval_samples=9", "lr=0.01"]
    never = ["trainer.evaluate.epochs=null", "trainer.evaluate.steps=7"]
    trained = train_world(tmp_path, 1, BATCH, *words, *never)
    assert trained.codes == [0], trained.said
    of_steps = read_eval_values(trained.run)
    assert of_steps[12] == min(of_steps.values())
    kept = find_best(trained.run.snapshots_folder)
    assert kept is not None
    assert kept.name == "step-000000012"


def test_a_seed_decides_the_numbers(tmp_path: Path) -> None:
    curves = []
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        trained = train_world(tmp_path, 2, BATCH, "dropout=0.3", f"seed={seed}", name=name)
        assert trained.codes == [0, 0], trained.said
        curves.append(losses(trained.run))
    assert curves[0] == curves[1]
    assert curves[0] != curves[2]


def test_every_start_without_a_name_is_a_new_run(tmp_path: Path) -> None:
    config = configured(tmp_path, [BATCH, "trainer.epochs=1"])
    for _ in range(2):
        [ended] = train_config(tmp_path, 1, config).ranks
        assert ended.code == 0, ended.output
        assert "resuming" not in ended.output
    runs = [Run(file.parent) for file in tmp_path.glob("toy_experiments-*/status.json")]
    assert len(runs) == 2
    assert all(steps_logged(run) == [1, 2, 3, 4] for run in runs)


# --- what a snapshot holds ----------------------------------------------------------------------


def test_a_snapshot_holds_the_whole_state(tmp_path: Path) -> None:
    words = [BATCH, "eval_samples=3", "schedule=step", "trainer.steps=6"]
    trained = train_world(tmp_path, 2, *words)
    assert trained.codes == [0, 0], trained.said
    parts = state_at(trained.run, 6)
    assert parts.keys() == {"model", "optimizer", "rng"}
    assert parts["optimizer"].keys() == {"optimizer", "settings", "schedule"}
    assert parts["optimizer"]["schedule"]["last_epoch"] == 6
    random_of_ranks = parts["rng"]["ranks"]
    assert len(random_of_ranks) == 2
    assert not random_of_ranks[0].equal(random_of_ranks[1])
    info = verify_snapshot(trained.run.snapshots_folder / "step-000000006").info
    config = trained.run.read_config()
    expected = {
        "step": 6,
        "samples": 17 + 10,
        "best": min(read_eval_values(trained.run).values()),
        "fingerprint": config.compute_numerics_fingerprint(),
        "config": config.select_numerics_settings(),
        "world_size": 2,
        "wandb_run_id": None,
    }
    assert {key: info[key] for key in expected} == expected


# --- who reads, and who talks -------------------------------------------------------------------


def train_and_watch_files(rank: int, master: str, folder: Path, epochs: int) -> None:
    touched: list[str] = []

    def watch(event: str, arguments: tuple[Any, ...]) -> None:
        if event in ("open", "os.listdir", "os.scandir", "os.mkdir", "os.rename"):
            path = str(arguments[0])
            if path.startswith(str(folder)):
                touched.append(f"{event} {path}")

    sys.addaudithook(watch)
    words = ["run.name=a", BATCH, "eval_samples=3", f"trainer.epochs={epochs}"]
    config = configured(folder, words)
    assert _train_rank(config, 3, rank, master) == 0
    assert bool(touched) == (rank == 0), touched


def test_only_rank_0_touches_the_run_folder(tmp_path: Path) -> None:
    """So no file system need be shared, in a fresh run and in a resumed one."""
    folder = tmp_path / "of-rank-0"
    for epochs in (1, 2):
        ranks = spawn_world(
            3, partial(train_and_watch_files, folder=folder, epochs=epochs), tmp_path / "output"
        )
        assert [rank.code for rank in ranks] == [0, 0, 0], [rank.output for rank in ranks]
    assert steps_logged(Run(folder / "a")) == list(range(1, 9))


def _train_rank(config: Config, world_size: int, rank: int, master: str) -> int:
    """A rank of a world leaves with os._exit; here it must come back to be asked."""
    worker.exit_process = sys.exit  # type: ignore[assignment]
    try:
        train_in_process(replace(config, rank=rank, world_size=world_size, master=master))
    except SystemExit as left:
        return int(left.code or 0)
    raise AssertionError("it did not leave")


def count_collectives(rank: int, master: str, folder: Path, words: list[str]) -> int:
    calls: list[str] = []
    for collective in COLLECTIVES:
        _count(collective, calls)
    assert _train_rank(configured(folder, words), 2, rank, master) == 0
    return len(calls)


COLLECTIVES = ("all_reduce", "all_gather", "gather", "broadcast", "barrier", "reduce", "scatter")


@pytest.mark.parametrize(
    ("few", "many"),
    [
        (["trainer.steps=4"], ["trainer.steps=64"]),
        (["eval_samples=400"], ["eval_samples=1600"]),  # fewer results than these travel at once
    ],
    ids=["steps", "evaluated batches"],
)
def test_more_of_it_needs_no_more_collectives(
    tmp_path: Path, few: list[str], many: list[str]
) -> None:
    """DDP's own all-reduce of gradients is not seen here; anything else would be."""

    def count_calls(words: list[str]) -> list[int]:
        name = f"run.name={len(words)}-{words[-1].replace('=', '-')}"
        words = [name, BATCH, "metrics=true", *once, *words]
        count = partial(count_collectives, folder=tmp_path, words=words)
        ranks = spawn_world(2, count, tmp_path / "output")
        assert [rank.code for rank in ranks] == [0, 0], [rank.output for rank in ranks]
        return [rank.value for rank in ranks]

    # Evaluated and saved once, at the end.
    once = ["trainer.save.epochs=null", "trainer.evaluate.epochs=null", "trainer.eval_batch_size=4"]
    assert count_calls(few) == count_calls(many)
    assert min(count_calls(few)) > 0, "else nothing is counted"


def _count(collective: str, calls: list[str]) -> None:
    plain = getattr(dist, collective)

    def counted(*args: Any, **kwargs: Any) -> Any:
        calls.append(collective)
        return plain(*args, **kwargs)

    setattr(dist, collective, counted)


def test_a_job_that_asked_for_gpus_and_has_none_is_warned(tmp_path: Path) -> None:
    words = ("launch=slurm", "launch.gpus_per_node=2", "trainer.steps=2")
    for ranks in (1, 2):
        ended = train_world(tmp_path, ranks, *words, name=f"of-{ranks}")
        assert ended.codes == [0] * ranks, ended.said
        assert ended.said.count("warning: launch.gpus_per_node=2, but torch ") == 1
        assert f"sees no GPU on {socket.gethostname()}" in ended.said
