"""Each example as it is typed, in a copy of the folder; the longest ones with fewer epochs.

`test_train_with_overrides` has an interpreter of its own, and so has what torchrun starts; for the
others torch is imported already.
"""

from __future__ import annotations

import ast
import fcntl
import json
import math
import os
import random
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import command_runner
import pytest
from command_runner import (
    EXAMPLES,
    TORCHRUN,
    TWO,
    CommandResult,
    curve,
    evaluations,
    only_run,
    status,
)
from worlds import run_all_forked, run_forked

pytestmark = pytest.mark.slow
PYTHON = sys.executable


@pytest.fixture
def examples(tmp_path: Path) -> Path:
    shutil.copytree(EXAMPLES, tmp_path / "examples", ignore=shutil.ignore_patterns("runs", "__*"))
    return tmp_path / "examples"


@pytest.fixture
def default_port() -> Iterator[None]:
    """Where ranks meet that are not told: tests run beside each other, and one at a time has it."""
    folder = os.open("/tmp", os.O_RDONLY)  # a folder can be locked, and no file is left behind
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        yield
    finally:
        os.close(folder)


def _trained(done: CommandResult, folder: Path, steps: int) -> Path:
    assert done.code == 0, done.err
    assert done.left == []
    run = only_run(folder)
    told = status(run)
    assert (told["state"], told["step"], told["total_steps"]) == ("finished", steps, steps)
    assert (run / "snapshots" / f"step-{steps:09d}" / "manifest.json").exists()
    assert evaluations(run)[-1][0] == steps
    losses = [loss for _, loss in curve(run)]
    assert losses[-1] < losses[0]
    return run


def test_a_loop_of_ones_own_on_two_processes(examples: Path) -> None:
    words = [PYTHON, "own_loop.py", *TWO, "samples=512", "trainer.epochs=2"]
    done = run_forked(words, examples)
    assert done.code == 0, done.err
    run = only_run(examples)
    told = status(run)
    assert (told["state"], told["step"], told["total_steps"]) == ("finished", 8, 8)
    assert "epoch 2: a made point is [" in done.err
    assert done.err.count("epoch 1: a made point") == 1


def test_train_with_overrides(examples: Path) -> None:
    """From the folder above, as the README has it."""
    words = [PYTHON, "examples/train.py", "trainer.epochs=2", "lr=0.1"]
    run = _trained(command_runner.run(words, examples.parent), examples.parent, steps=2 * 64)
    assert '"lr": 0.1' in (run / "metrics.jsonl").read_text()


@pytest.mark.usefixtures("default_port")
def test_four_distributed_ranks_in_any_order(examples: Path) -> None:
    ranks = random.sample(range(4), 4)
    commands = [[PYTHON, "distributed.py", f"rank={r}", "world_size=4"] for r in ranks]
    for rank, done in zip(ranks, run_all_forked(commands, examples), strict=True):
        assert done.code == 0, (rank, done.err)
        assert done.left == []
        assert ("finished 192 steps" in done.err) == (rank == 0)
    run = only_run(examples)
    assert status(run)["state"] == "finished"
    assert curve(run)[-1][1] < curve(run)[0][1]


@pytest.mark.usefixtures("default_port")
def test_two_distributed_ranks_on_chosen_devices(examples: Path) -> None:
    """Where there is no such device, as here, the CPU."""
    commands = [[PYTHON, "distributed.py", f"rank={r}", "world_size=2"] for r in range(2)]
    for done in run_all_forked(commands, examples, CUDA_VISIBLE_DEVICES="4,7"):
        assert done.code == 0, done.err
        assert done.left == []
    assert status(only_run(examples))["state"] == "finished"


def test_model_parallel(examples: Path) -> None:
    words = [PYTHON, "model_parallel.py", "replica.devices=2", "launch=local", "launch.procs=2"]
    done = run_forked(words, examples)
    _trained(done, examples, steps=3 * 64)
    assert "on 2 processes × 2 stages (cpu stage 0, cpu stage 1: placed by the exper" in done.err


def test_single_gpu(examples: Path) -> None:
    _trained(run_forked([PYTHON, "single_gpu.py"], examples), examples, steps=10 * 64)


def test_multigpu_torchrun(examples: Path) -> None:
    words = [*TORCHRUN, "--standalone", "--nproc_per_node=2", "multigpu_torchrun.py", "2", "1"]
    run = _trained(run_forked(words, examples), examples, steps=2 * 64)
    assert len(evaluations(run)) == 2


def test_multinode_two_agents(examples: Path) -> None:
    size = ("2", "1", "--local_world_size", "1")
    endpoint = f"localhost:{command_runner.free_port()}"
    commands = [[*TORCHRUN, *_typed_on(node, endpoint), "multinode.py", *size] for node in range(2)]
    first, second = run_all_forked(commands, examples)
    assert second.code == 0, second.err
    assert second.left == []
    run = _trained(first, examples, steps=2 * 64)  # one run, though two agents
    state = json.loads((run / "snapshots" / "step-000000128" / "state.json").read_text())
    assert state["world_size"] == 2


def _typed_on(node: int, endpoint: str) -> list[str]:
    world = ["--nproc_per_node", "1", "--nnodes", "2", "--node_rank", str(node)]
    return [*world, "--rdzv_id", "100", "--rdzv_backend", "c10d", "--rdzv_endpoint", endpoint]


def test_python_jobs(examples: Path) -> None:
    done = command_runner.run([PYTHON, "python_jobs.py"], examples)
    assert done.code == 0, done.err
    assert done.left == []
    results = [line.partition(" ") for line in done.out.splitlines()]
    assert [name.startswith("simulate-") for name, _, _ in results] == [True] * 3
    values = [ast.literal_eval(text) for _, _, text in results]
    assert [value["seed"] for value in values] == [0, 1, 2]
    assert all(abs(value["pi"] - math.pi) < 0.05 for value in values)


def test_a_classification_from_end_to_end(examples: Path) -> None:
    """As docs/classification.md has it: trained, the best kept, loaded, and used."""
    words = ["trainer.best=accuracy", "trainer.epochs=5", "run.name=rings", "launch.threads=1"]
    done = run_forked([PYTHON, "classification.py", *words], examples)
    assert done.code == 0, done.err
    run = examples / "runs" / "rings"
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    accuracy = {line["step"]: line["eval_accuracy"] for line in lines if "eval_accuracy" in line}
    assert {"eval_f1_0", "eval_f1_1", "eval_f1_2"} <= lines[-1].keys()
    best = max(accuracy, key=lambda step: accuracy[step])
    assert (run / "snapshots" / "best").readlink().name == f"step-{best:09d}"
    used = run_forked([PYTHON, "classify.py", "rings"], examples)
    assert used.code == 0, used.err
    right = float(used.out.partition("% of 1000 points are right")[0].split()[-1])
    assert right > 90
    counts = [list(map(int, row.split()[1:])) for row in used.out.splitlines()[-3:]]
    assert sum(map(sum, counts)) == 1000
    assert sum(counts[i][i] for i in range(3)) == pytest.approx(10 * right)
