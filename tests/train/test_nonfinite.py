"""What is not finite is never saved, its cause is named, and no hint leads back to it."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest
import torch
from diverging_experiments import BAD_SAMPLE, diverging, sharded
from worlds import Trained, losses, snapshot_steps, state_at, train_world, verb

from echelon.runs.run_folder import Run
from echelon.snapshot.layout import list_snapshots
from echelon.snapshot.reader import verify_snapshot
from echelon.snapshot.writer import SnapshotWriter

pytestmark = pytest.mark.slow

SHORT = ("trainer.batch_size=4", "trainer.epochs=3")
EVERY = "trainer.save.steps=1"


def fail(folder: Path, ranks: int, why: str, *words: str, name: str = "a") -> Trained:
    ended = train_world(
        folder, ranks, *SHORT, f"why={why}", *words, name=name, experiment=diverging
    )
    assert ended.codes == [1] * ranks, ended.said
    assert "Traceback" not in ended.said
    for folder_of_step in list_snapshots(ended.run.snapshots_folder):
        for tensor in state_at(ended.run, int(folder_of_step.name[5:]))["model"].values():
            assert not tensor.isnan().any()
    return ended


def hint(ended: Trained) -> str:
    return ended.said.partition("hint: ")[2].splitlines()[0]


SAMPLE = f"sample {BAD_SAMPLE} of train_data"
CAUSES = {
    "sample": f"{SAMPLE} has nan in element 0 at [1]",
    "layer": f"layer 'exponent' (Exponent) gives what is not finite for {SAMPLE}",
    "loss": f"the loss function gives -inf for {SAMPLE}",
    "gradient": "the gradient of first.weight, first.bias, head.weight and 1 more is not finite "
    f"for {SAMPLE}",
}


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("why", CAUSES)
def test_the_cause_is_named_before_the_rate_is_blamed(tmp_path: Path, why: str, ranks: int) -> None:
    early = fail(tmp_path, ranks, why)
    assert CAUSES[why] in early.said
    assert "no snapshot was saved" in early.said
    late = fail(tmp_path, ranks, why, EVERY, "trainer.accumulate=2", name="b")
    assert CAUSES[why] in late.said
    newest = list_snapshots(late.run.snapshots_folder)[-1]
    assert f"the last snapshot is {newest}" in late.said
    for ended in (early, late):
        assert "learning rate" not in ended.said
        assert f"then go on: echelon resume {ended.run.folder}" in hint(ended)


def test_a_gradient_that_spoils_the_weights_is_noticed_when_they_are_saved(
    tmp_path: Path,
) -> None:
    """The loss of that step is finite, so its weights would have been the newest snapshot."""
    ended = fail(tmp_path, 2, "gradient", EVERY)
    assert "is not finite (first.weight, first.bias, head.weight and 5 more)" in ended.said
    assert "and was not saved" in ended.said
    unsaved = int(ended.said.partition("the state after step ")[2].split()[0])
    assert snapshot_steps(ended.run)[-1] == unsaved - 1


@pytest.mark.parametrize(
    ("why", "what"),
    [
        ("buffer", "the state after step 7 is not finite (running_mean)"),
        ("optimizer", "(the optimizer's momentum_buffer of first.weight, "),
    ],
)
def test_what_is_not_a_weight_counts_too(tmp_path: Path, why: str, what: str) -> None:
    ended = fail(tmp_path, 1, why, EVERY)
    assert what in ended.said
    assert snapshot_steps(ended.run) == [4, 5, 6]


def test_infinities_that_are_meant_are_saved(tmp_path: Path) -> None:
    ended = train_world(tmp_path, 2, *SHORT, "why=mask", experiment=diverging)
    assert ended.codes == [0, 0], ended.said
    assert state_at(ended.run, 15)["model"]["mask"].isinf().any()
    longer = train_world(tmp_path, 1, *SHORT, "why=mask", "trainer.epochs=4", experiment=diverging)
    assert longer.codes == [0], longer.said


@pytest.mark.parametrize("words", [(), (EVERY,)], ids=["unsaved", "saved"])
def test_the_rate_is_blamed_last_and_its_hint_trains(
    tmp_path: Path, words: tuple[str, ...]
) -> None:
    """Also where a snapshot is finite and too large already: the hint does not lead back to it."""
    ended = fail(tmp_path, 1, "rate", *words)
    said = hint(ended)
    assert "lower the learning rate, which is 1e+06" in said
    command = shlex.split(said.partition(": echelon ")[2])
    assert command[:2] == ["resume", str(ended.run.folder)]
    assert command[-1] == "trainer.clip=1.0"
    again = verb(tmp_path, *command, "trainer.steps=1")
    assert again.code == 0, again.output


def test_a_loss_that_rose_says_so(tmp_path: Path) -> None:
    ended = fail(tmp_path, 1, "none", "lr=3.0", "trainer.epochs=99")
    assert "the loss rose from" in hint(ended)


def test_a_snapshot_that_is_not_finite_is_passed_over(tmp_path: Path) -> None:
    """As a version before this check has saved it, and as a path that a person gives."""
    words = (*SHORT, "why=none", EVERY)
    whole = train_world(tmp_path, 1, *words, experiment=diverging, name="whole")
    begun = train_world(tmp_path, 1, *words, "trainer.steps=5", experiment=diverging)
    assert begun.codes == [0], begun.said
    bad = save_spoiled_copy(begun.run, 5)
    given = train_world(
        tmp_path, 1, *words, f"trainer.resume={bad}", experiment=diverging, name="b"
    )
    assert given.codes == [3]
    assert "is not a valid snapshot: not finite: head.weight" in given.said
    again = train_world(tmp_path, 2, *words, experiment=diverging)
    assert again.codes == [0, 0], again.said
    assert f"{bad} is damaged (not finite: head.weight); resuming from step-000000005" in again.said
    assert losses(again.run) == pytest.approx(losses(whole.run))


def save_spoiled_copy(run: Run, step: int) -> Path:
    """Save the state of a step as that of the next, with weights that are not finite."""
    good = verify_snapshot(run.snapshots_folder / f"step-{step:09d}")
    parts = state_at(run, step)
    parts["model"]["head.weight"] = torch.full_like(parts["model"]["head.weight"], torch.nan)
    writer = SnapshotWriter(run.snapshots_folder, keep_last=9)
    writer.save(step + 1, parts, good.info | {"step": step + 1})
    [saved] = writer.close()
    assert saved.folder is not None
    return saved.folder


def test_repaired_data_goes_on_where_the_good_ended(tmp_path: Path) -> None:
    """At another world size, too."""
    fail(tmp_path, 3, "sample", EVERY)
    repaired = {"ECHELON_TEST_REPAIRED": "1"}
    words = (*SHORT, "why=sample", EVERY)
    again = train_world(tmp_path, 2, *words, experiment=diverging, env=repaired)
    assert again.codes == [0, 0], again.said
    assert "resuming run a after step 3" in again.said
    whole = train_world(tmp_path, 1, *words, experiment=diverging, env=repaired, name="whole")
    assert losses(again.run) == pytest.approx(losses(whole.run), rel=1e-5)


def test_sharded_weights_are_looked_at_on_every_rank(tmp_path: Path) -> None:
    """Only the shard of the last rank is bad; every rank ends, and no piece of it is saved."""
    words = ("replica.kind=fsdp", "trainer.batch_size=6", "trainer.steps=8", EVERY)
    spoiled = {"ECHELON_TEST_SPOILED_SHARD": "2:5"}
    ended = train_world(tmp_path, 3, *words, experiment=sharded, env=spoiled)
    assert ended.codes == [1, 1, 1], ended.said
    assert "the state after step 5 is not finite (" in ended.said
    assert snapshot_steps(ended.run) == [2, 3, 4]
    again = train_world(tmp_path, 2, *words, experiment=sharded)
    assert again.codes == [0, 0], again.said
    assert "resuming run a after step 4" in again.said
