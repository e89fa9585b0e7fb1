"""What a person is told of a run that is slow, that is profiled, or whose memory runs out."""

from __future__ import annotations

import gzip
import json
import socket
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median

import pytest
import slow_rank_experiment
import toy_experiments
from command_runner import ECHELON, is_a_sentence_and_a_hint
from slow_rank_experiment import experiment
from worlds import (
    Trained,
    losses,
    run_forked,
    snapshot_steps,
    train_config,
    train_world,
)

from echelon.config.compose import compose
from echelon.config.schema import Config, ReplicaConfig, TrainerConfig
from echelon.monitoring.out_of_memory import explain_out_of_memory
from echelon.parallel import fsdp_replica
from echelon.parallel.ddp_replica import DDPReplica
from echelon.runs.history import read_history
from echelon.runs.metrics_file import read_metrics
from echelon.runs.run_folder import Run
from echelon.world import detect

PARTS = ("data_ms", "compute_ms", "communication_ms", "optimizer_ms")


def trained(
    folder: Path, ranks: int, *words: str, prepare: Callable[[int], None] | None = None
) -> Trained:
    small = ("trainer.batch_size=8", "trainer.log_steps=4")
    return train_world(folder, ranks, *small, *words, experiment=experiment, prepare=prepare)


def read_device_every(steps: int, rank: int) -> None:
    """For this rank's process: what the device computed is read this seldom, as on a GPU."""
    DDPReplica.readback_interval_steps = steps  # type: ignore[assignment, method-assign]
    fsdp_replica.READBACK_STEPS = {"cpu": steps}  # type: ignore[attr-defined]


def lines(done: Trained) -> list[dict[str, float]]:
    return [line for line in read_metrics(done.run.metrics_file) if "loss" in line]


# --- speed ---


@pytest.mark.slow
def test_the_split_of_a_step_in_one_process(tmp_path: Path) -> None:
    done = trained(tmp_path, 1)
    assert done.codes == [0], done.said
    first = lines(done)[0]
    assert first["step_ms"] > 0
    assert first["memory_gb"] > 0.01
    assert "communication_ms" not in first, "there is nobody to talk to"
    assert "mfu" not in first, "nobody knows the peak of this processor"
    of_steps = [line for line in lines(done) if "compute_ms" in line]
    assert of_steps
    assert all(line.keys() >= {"data_ms", "optimizer_ms"} for line in of_steps)


@pytest.mark.slow
def test_the_rank_that_is_behind_is_named(tmp_path: Path) -> None:
    done = trained(tmp_path, 3, "slow=1", "trainer.steps=80", "trainer.batch_size=9")
    assert done.codes == [0, 0, 0], done.said
    [said] = [line for line in done.said.splitlines() if "× the median" in line]
    assert said.startswith("rank 1 on ")
    assert "and all wait for it: of these it computes" in said
    last = [line for line in lines(done) if "slowest_rank" in line][-1]
    assert last["slowest_rank"] == 1
    assert last["slowest_x"] > 1.5
    [slow] = read_history(done.run, is_running=False).phases[0].slow_ranks
    assert (slow.rank, slow.host, slow.until_step) == (1, socket.gethostname(), None)
    assert slow.factor > 1.5
    split = [line for line in lines(done) if set(PARTS) <= line.keys()]
    waited = median(line["communication_ms"] for line in split)
    worked = median(sum(line[part] for part in PARTS) for line in split) - waited
    assert waited > worked, "rank 0's lines: it waits for the 100 ms of the other"


@pytest.mark.slow
def test_the_rank_whose_data_is_late_is_named_though_the_model_is_sharded(tmp_path: Path) -> None:
    words = ("replica.kind=fsdp", "late=1", "trainer.steps=80", "trainer.batch_size=6")
    done = trained(tmp_path, 2, *words)
    assert done.codes == [0, 0], done.said
    [said] = [line for line in done.said.splitlines() if "waits for its data" in line]
    assert said.startswith("rank 1 on ")
    assert "and all wait for it" in said


@pytest.mark.slow
def test_the_transformer_trains_alike_in_one_process_and_two(tmp_path: Path) -> None:
    small = ("samples=64", "eval_samples=8", "trainer.epochs=1", "trainer.log_steps=1")
    curves = []
    for ranks in (1, 2):
        words = ("experiment=transformer", *small, f"run.dir={tmp_path}", f"run.name=n{ranks}")
        done = train_config(tmp_path, ranks, compose([*words, "launch.threads=1"]))
        assert done.codes == [0] * ranks, done.said
        curves.append(losses(done.run))
    assert len(curves[0]) == 4
    assert curves[1] == pytest.approx(curves[0], rel=1e-4)


@pytest.mark.slow
def test_a_device_that_is_read_seldom_tells_the_same(tmp_path: Path) -> None:
    """As a GPU is: lines are written late, with the loss of their step and the speed by then."""
    by_steps = ("trainer.save.epochs=null", "trainer.evaluate.epochs=null")
    words = ("trainer.steps=40", "trainer.save.steps=13", *by_steps)
    told = losses(trained(tmp_path / "a", 1, *words).run)
    late = trained(tmp_path / "b", 1, *words, prepare=partial(read_device_every, 16))
    assert losses(late.run) == told
    paces = [line["step_ms"] for line in lines(late)]
    assert len(paces) == 10
    assert paces[1] == paces[2] != paces[0], "read together, after step 13"
    assert paces[4] == paces[5], "after step 26"
    assert len(set(paces)) > 3


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_slow_steps_are_read_one_by_one_so_that_a_stop_is_heard(kind: str, tmp_path: Path) -> None:
    """By all ranks, with the step after the one in which a rank was asked to stop."""
    words = (f"replica.kind={kind}", "trainer.steps=40", "trainer.save.epochs=null")
    env = {"ECHELON_TEST_PAUSE_S": "0.06", "ECHELON_TEST_FAULT": "1:8:TERM"}
    never = "trainer.evaluate.epochs=null"
    done = train_world(
        tmp_path, 2, *words, never, env=env, prepare=partial(read_device_every, 1000)
    )
    assert done.codes == [75, 75], done.said
    assert done.run.read_status_file()["step"] == 9


# --- profiles ---


@pytest.mark.slow
def test_a_profile_of_two_processes_and_training_goes_on(tmp_path: Path) -> None:
    done = trained(tmp_path, 2, "trainer.profile=3", "trainer.steps=12")
    assert done.codes == [0, 0], done.said
    assert [line["step"] for line in lines(done)] == [4, 8, 12]
    assert all(line["samples_per_s"] > 0 for line in lines(done)), "also where it ended, at step 8"
    assert "profiled steps 6 to 8: " in done.said
    assert "OPERATOR" in done.said
    assert "profiled" not in done.ranks[1].output
    for rank in (0, 1):
        with gzip.open(done.run.traces_folder / f"steps-6-8-rank-{rank}.json.gz") as file:
            events = json.load(file)["traceEvents"]
        steps = {e["name"] for e in events if e.get("name", "").startswith("ProfilerStep#")}
        assert len(steps) == 3
        assert sum(e.get("name") == "aten::addmm" for e in events) >= 3


@pytest.mark.slow
def test_a_stop_within_a_profile(tmp_path: Path) -> None:
    """In a process of its own, as torch's profiler would crash at its end."""
    words = [
        f"experiment={toy_experiments.__file__}:regression",
        "trainer.profile=500",
        "run.name=a",
    ]
    words += ["trainer.batch_size=5", "trainer.epochs=300"]
    ended = run_forked([*ECHELON, "train", *words], tmp_path, ECHELON_TEST_FAULT="0:100:TERM")
    assert (ended.code, ended.left) == (75, []), ended.err
    assert "after step 101 of 1200; everything is saved" in ended.err
    assert "the run ended within steps 6 to 505: no profile" in ended.err


@pytest.mark.slow
def test_a_profile_longer_than_the_run(tmp_path: Path) -> None:
    done = trained(tmp_path, 1, "trainer.profile=8", "trainer.steps=12")
    assert done.codes == [2]
    assert is_a_sentence_and_a_hint(done.said)
    assert "trainer.profile=8, after 5 steps to warm up, but the run has 12 steps" in done.said
    assert "set trainer.profile to 7 or less" in done.said


# --- memory ---

TRIED = {
    "cuda": "21.5 GB were asked for, 5.62 GB of 150 GB were free",
    "host": "4,504 TB were asked for, ",
    "python": "out of memory on rank 0: ",
}


@pytest.mark.slow
@pytest.mark.parametrize("how", TRIED)
def test_out_of_memory(tmp_path: Path, how: str) -> None:
    done = trained(tmp_path, 1, f"full={how}", "trainer.save.steps=4")
    assert done.codes == [1]
    assert is_a_sentence_and_a_hint(done.said)
    assert TRIED[how] in done.said
    assert "used by parameters 20 B, gradients 20 B, optimizer state 48 B" in done.said
    assert "a step computes 8 samples at a time" in done.said
    for way in ("trainer.accumulate=2", "replica.checkpoint=true", "trainer.batch_size=4"):
        assert f"\n        {way} (" in done.said
    assert ("PYTORCH_ALLOC_CONF=expandable_segments:True" in done.said) == (how == "cuda")
    assert snapshot_steps(done.run) == [4, 8]
    snapshot = done.run.snapshots_folder / "step-000000008"
    again = f"echelon resume {done.run.folder} trainer.accumulate=2"
    assert f"the last snapshot, {snapshot}, is intact: {again}" in done.said
    assert done.said.rstrip().endswith("after step 8")


@pytest.mark.slow
def test_out_of_memory_in_an_evaluation(tmp_path: Path) -> None:
    """Smaller pieces of a step would not help."""
    words = ("full=host", "at=0", "trainer.save.steps=4", "trainer.sanity_steps=0")
    done = trained(tmp_path, 1, *words)
    assert done.codes == [1]
    assert "\n        trainer.eval_batch_size=4\n" in done.said
    again = f"echelon resume {done.run.folder} trainer.eval_batch_size=4"
    assert f"is intact: {again}" in done.said
    assert "trainer.accumulate" not in done.said


def test_out_of_memory_where_nothing_is_left_to_cut(tmp_path: Path) -> None:
    one = Config(trainer=TrainerConfig(batch_size=1), replica=ReplicaConfig(checkpoint=True))
    said = str(
        explain_out_of_memory(MemoryError(), one, detect({}).world, Run(tmp_path / "a"), None)
    )
    assert said.rstrip().endswith(f"no snapshot yet: echelon resume {tmp_path / 'a'}")


def test_out_of_memory_in_the_larger_of_two_pieces(tmp_path: Path) -> None:
    three = Config(trainer=TrainerConfig(batch_size=3, accumulate=2))
    said = str(
        explain_out_of_memory(MemoryError(), three, detect({}).world, Run(tmp_path / "a"), None)
    )
    assert "trainer.accumulate=4 (the numbers stay)" in said


@pytest.mark.slow
def test_out_of_memory_of_a_model_on_several_devices(tmp_path: Path) -> None:
    words = ("full=host", "replica.devices=2", "trainer.batch_size=8")
    done = train_world(tmp_path, 1, *words, experiment=slow_rank_experiment.placed)
    assert done.codes == [1]
    assert is_a_sentence_and_a_hint(done.said)
    assert "\n        replica.devices=4 (each holds less of the model)" in done.said
    assert "replica.kind=fsdp" not in done.said, "which is of one device per process"


@pytest.mark.slow
def test_out_of_memory_on_another_rank_is_what_all_say(tmp_path: Path) -> None:
    done = trained(tmp_path, 2, "full=host", "trainer.accumulate=2")
    assert done.codes == [1, 1]
    for rank in done.ranks:
        assert "out of memory on rank " in rank.output
        assert "a step computes 2 samples at a time" in rank.output
        assert "trainer.accumulate=4 (the numbers stay)" in rank.output
        assert "replica.kind=fsdp (each holds a shard of the model)" in rank.output
        assert "Traceback" not in rank.output


@pytest.mark.slow
def test_out_of_memory_while_another_rank_still_writes_the_first_snapshot(tmp_path: Path) -> None:
    done = trained(tmp_path, 2, "full=host", "trainer.save.steps=8")
    assert done.codes == [1, 1]
    assert snapshot_steps(done.run) == [8]
    assert "no snapshot yet" not in done.said
