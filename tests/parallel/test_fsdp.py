"""A model that the ranks hold together trains as one that each holds whole, and its snapshots go on
anywhere."""

from __future__ import annotations

import os
import resource
from functools import partial
from pathlib import Path
from typing import Any

import layer_stack
import pytest
import torch
import toy_experiments
from command_runner import ECHELON, QUICK, TWO
from worlds import (
    Trained,
    configured,
    differing,
    losses,
    metrics,
    run_forked,
    snapshot_steps,
    state_at,
    traced_lines,
    train_config,
    train_world,
)

import echelon
from echelon.errors import EchelonError
from echelon.runs.run_folder import Run
from echelon.snapshot.layout import list_snapshots
from echelon.snapshot.manifest import InvalidSnapshotError
from echelon.snapshot.reader import verify_snapshot

pytestmark = pytest.mark.slow

FSDP = "replica.kind=fsdp"
PAIRS, TRIPLES = "replica.shards=2", "replica.shards=3"
BATCHES_OF_7 = "trainer.batch_size=7"  # 7, 7 and 3 samples
SHORT = (
    "trainer.batch_size=5",  # the last batch of an epoch is of two samples: four ranks, two idle
    "trainer.epochs=3",
    "trainer.save.steps=4",
    "eval_samples=7",
    "trainer.eval_batch_size=2",
    "trainer.keep_last=9",
)
CLOSE = 1e-5


def train_run(folder: Path, ranks: int, *words: str, name: str, **more: Any) -> Run:
    more = {"experiment": layer_stack.stack, **more}
    ended = train_world(folder, ranks, *SHORT, *words, name=name, **more)
    assert ended.codes == [0] * ranks, ended.said
    return ended.run


def require_close(a: Run, b: Run) -> None:
    """Every number of every line of metrics, to rounding."""
    found, wanted = metrics(a), metrics(b)
    assert [line.keys() for line in found] == [line.keys() for line in wanted]
    assert len(wanted) > 8
    for one, other in zip(found, wanted, strict=True):
        assert one == pytest.approx(other, rel=CLOSE)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return train_run(tmp_path_factory.mktemp("whole"), 2, name="ddp")


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return train_run(tmp_path_factory.mktemp("shared"), 2, FSDP, name="fsdp")


# --- the curve ----------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize(
    "words",
    [
        (),
        ("trainer.clip=0.5", "trainer.accumulate=3"),
        # Not Adam, which makes steps of gradients that are zero but for rounding: those before a
        # normalization have some.
        ("optimizer=momentum", "scale=65536.0", "norm=true", "replica.checkpoint=true"),
        ("optimizer=adagrad", "replica.blocks=[Block,Linear]"),
    ],
    ids=["plain", "clipped pieces", "scaled and recomputed", "named blocks"],
)
def test_the_curve_is_ddps(tmp_path: Path, ranks: int, words: tuple[str, ...]) -> None:
    of_both = [word for word in words if not word.startswith("replica.blocks")]
    whole = train_run(tmp_path, ranks, *of_both, name="ddp")
    require_close(train_run(tmp_path, ranks, *words, FSDP, name="fsdp"), whole)


@pytest.mark.parametrize(
    ("ranks", "words"),
    [
        (4, (PAIRS, "trainer.clip=0.5", "trainer.accumulate=3")),
        (6, (TRIPLES, BATCHES_OF_7, "optimizer=momentum", "scale=65536.0")),
    ],
    ids=["4 ranks", "6 ranks"],
)
def test_the_curve_of_several_replicas_of_shards_is_that_of_one_process(
    tmp_path: Path, ranks: int, words: tuple[str, ...]
) -> None:
    """The last batch of an epoch has no sample for some ranks."""
    alone = train_run(tmp_path, 1, *words[1:], name="alone")
    require_close(train_run(tmp_path, ranks, *words, name="hybrid"), alone)


@pytest.mark.parametrize("ranks", [2, 4])
def test_the_curve_of_the_toy_is_ddps(tmp_path: Path, ranks: int) -> None:
    words = ("trainer.clip=1.0", "schedule=step", "metrics=true")
    more = {"experiment": toy_experiments.regression}
    whole = train_run(tmp_path, ranks, *words, name="ddp", **more)
    require_close(train_run(tmp_path, ranks, *words, FSDP, name="fsdp", **more), whole)


def test_an_overflow_is_skipped_by_all_or_none(tmp_path: Path, traced: Path) -> None:
    """A scale far too large is halved until the gradients of every shard fit."""
    env = {"ECHELON_TEST_TRACE": str(traced)}
    words = (FSDP, "scale=1e38", "optimizer=momentum")  # which does not skip by itself
    run = train_run(tmp_path, 2, *words, name="a", env=env)
    steps = [[n["step"] for n in traced_lines(traced, "step") if n["rank"] == r] for r in (0, 1)]
    assert steps[0] == steps[1]
    assert 0 < len(steps[0]) < 12
    assert state_at(run, 12)["optimizer"]["scaler"]["scale"] < 1e38


@pytest.mark.parametrize("norm", ["norm=false", "norm=true"])
def test_half_precision_trains_as_ddps_and_keeps_whole_weights(tmp_path: Path, norm: str) -> None:
    words = ("trainer.precision=bf16", "optimizer=momentum", norm)
    whole = train_run(tmp_path, 2, *words, name="ddp")
    shared = train_run(tmp_path, 2, *words, FSDP, name="fsdp")
    assert losses(shared) == pytest.approx(losses(whole), rel=0.01)
    assert losses(shared) != losses(train_run(tmp_path, 2, *words[1:], FSDP, name="plain"))
    kept = state_at(shared, 12)["model"].values()
    assert {t.dtype for t in kept if t.is_floating_point()} == {torch.float32}


def test_half_precision_leaves_the_inputs_as_they_are(tmp_path: Path) -> None:
    words = ("trainer.precision=bf16", "trainer.log_steps=1")
    more = {"experiment": layer_stack.centred}
    whole = train_run(tmp_path, 2, *words, name="ddp", **more)
    shared = train_run(tmp_path, 2, *words, FSDP, name="fsdp", **more)
    assert losses(shared) == pytest.approx(losses(whole), rel=0.01)


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_complex_weights_are_for_one_process(kind: str, tmp_path: Path) -> None:
    """Nobody knows how to send them: gloo does not, and torch shards only one kind of number."""
    words = (f"replica.kind={kind}", "imaginary=true")
    ended = train_world(tmp_path, 2, *SHORT, *words, experiment=layer_stack.stack)
    assert ended.codes == [2, 2], ended.said
    assert "scale is complex, which one process alone can train" in ended.said


def test_recomputing_changes_nothing_with_ddp(tmp_path: Path, whole: Run) -> None:
    again = train_run(tmp_path, 2, "replica.checkpoint=true", name="again")
    assert metrics(again) == metrics(whole)


# --- snapshots ----------------------------------------------------------------------------------


def test_a_snapshot_holds_what_ddps_does(shared: Run, whole: Run) -> None:
    folder = shared.snapshots_folder / "step-000000012"
    assert (folder / "model.00001-of-00002.pt").is_file()
    assert not (folder / "model.pt").exists()
    found, wanted = state_at(shared, 12), state_at(whole, 12)
    assert found.keys() == wanted.keys()
    assert found["model"].keys() == wanted["model"].keys()
    for name, tensor in wanted["model"].items():
        torch.testing.assert_close(found["model"][name], tensor, rtol=1e-4, atol=1e-5)
    theirs, ours = (part["optimizer"]["optimizer"] for part in (wanted, found))
    assert ours["param_groups"] == theirs["param_groups"]
    for number, state in theirs["state"].items():
        for key, tensor in state.items():
            torch.testing.assert_close(ours["state"][number][key], tensor, rtol=1e-3, atol=1e-5)


def test_weights_are_plain_for_others(shared: Run) -> None:
    for folder in (shared.folder, shared.snapshots_folder / "step-000000012"):
        weights = echelon.load_weights(folder)
        assert differing(weights, state_at(shared, 12)["model"]) == []
        layer_stack.Stack(layer_stack.Settings()).load_state_dict(weights)


def test_weights_of_the_best_and_of_a_snapshot_that_is_gone(shared: Run) -> None:
    marked = (shared.snapshots_folder / "best").readlink().name
    weights = echelon.load_weights(shared.snapshots_folder / "best")
    assert differing(weights, echelon.load_weights(shared.snapshots_folder / marked)) == []
    with pytest.raises(EchelonError) as told:
        echelon.load_weights(shared.snapshots_folder / "step-000000001")
    [fault] = told.value.faults
    assert fault.what == f"there is no snapshot {shared.snapshots_folder / 'step-000000001'}"
    assert "step-000000012" in fault.do


def train_until_stop(folder: Path, ranks: int, *words: str) -> Trained:
    """The short run up to its 8th step, under a name that goes on."""
    ended = train_world(
        folder,
        ranks,
        *SHORT,
        *words,
        experiment=layer_stack.stack,
        env={"ECHELON_TEST_FAULT": "1:7:TERM"},
    )
    assert ended.codes == [75] * ranks, ended.said
    assert snapshot_steps(ended.run)[-1] == 8
    return ended


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ((2, FSDP), (4, FSDP)),
        ((4, FSDP), (2, FSDP)),
        ((2, FSDP), (1,)),
        ((2, FSDP), (3,)),
        ((2,), (2, FSDP)),
    ],
    ids=str,
)
def test_goes_on_at_another_size_and_of_another_kind(
    tmp_path: Path, whole: Run, before: Any, after: Any
) -> None:
    train_until_stop(tmp_path, *before)
    gone_on = train_run(tmp_path, *after, name="a")
    require_close(gone_on, whole)


def test_goes_on_with_any_shards_in_any_number_of_replicas(tmp_path: Path) -> None:
    """An epoch with each."""
    more = (BATCHES_OF_7, "trainer.epochs=5", "trainer.save.steps=3")
    alone = train_run(tmp_path, 1, *more, name="alone")
    shapes = ((6, TRIPLES), (4, PAIRS), (2, FSDP), (1, "replica.kind=ddp"), (4, PAIRS))
    for epoch, (ranks, word) in enumerate(shapes, 1):
        run = train_run(tmp_path, ranks, word, *more, f"trainer.steps={3 * epoch}", name="a")
    require_close(run, alone)
    folders = list_snapshots(run.snapshots_folder)
    assert [sorted(file.name for file in folder.glob("model.*")) for folder in folders] == [
        [f"model.{shard:05d}-of-00003.pt" for shard in range(3)],
        *[[f"model.{shard:05d}-of-00002.pt" for shard in range(2)]] * 2,
        ["model.pt"],
        [f"model.{shard:05d}-of-00002.pt" for shard in range(2)],
    ]


def test_goes_on_bit_for_bit_with_the_same_ranks(tmp_path: Path, shared: Run) -> None:
    train_until_stop(tmp_path, 2, FSDP)
    gone_on = train_run(tmp_path, 2, FSDP, name="a")
    assert metrics(gone_on) == metrics(shared)
    assert differing(state_at(gone_on, 12), state_at(shared, 12)) == []


def test_returning_to_an_older_snapshot_replaces_the_later_ones(tmp_path: Path) -> None:
    path = train_until_stop(tmp_path, 2, FSDP).run.snapshots_folder / "step-000000004"
    words = (FSDP, "lr=0.05", "trainer.steps=8", f"trainer.resume={path}")
    elsewhere = train_run(tmp_path, 2, *words, name="b")
    returned = train_run(tmp_path, 2, *words, name="a")
    assert differing(state_at(returned, 8), state_at(elsewhere, 8)) == []


@pytest.mark.parametrize("optimizer", ["adagrad", "momentum"])
def test_the_state_of_other_optimizers_goes_on(tmp_path: Path, optimizer: str) -> None:
    words = (f"optimizer={optimizer}", FSDP)
    unbroken = train_run(tmp_path, 2, *words, name="unbroken")
    train_until_stop(tmp_path, 2, *words)
    gone_on = train_run(tmp_path, 2, *words, name="a")
    assert metrics(gone_on) == metrics(unbroken)
    assert differing(state_at(gone_on, 12), state_at(unbroken, 12)) == []


@pytest.mark.parametrize("step", range(2, 7))
def test_killed_while_saving_leaves_a_whole_snapshot(
    tmp_path: Path, shared: Run, step: int
) -> None:
    """One save after every step, written while the next is computed; a rank dies in between."""
    rank = step % 2
    words = [*SHORT, FSDP, "trainer.save.steps=1"]
    ended = train_world(
        tmp_path,
        2,
        *words,
        experiment=layer_stack.stack,
        env={"ECHELON_TEST_FAULT": f"{rank}:{step}:KILL"},
        end_together=True,
    )
    assert ended.codes[rank] == -9
    for found in snapshot_steps(ended.run):
        verify_snapshot(ended.run.snapshots_folder / f"step-{found:09d}")
    gone_on = train_run(tmp_path, 2, FSDP, "trainer.save.steps=1", name="a")
    assert [n for n in os.listdir(gone_on.snapshots_folder) if n.startswith(".")] == []
    assert metrics(gone_on) == metrics(shared)


@pytest.mark.parametrize("how", ["cut short", "missing"])
def test_a_damaged_piece_makes_the_snapshot_none(tmp_path: Path, whole: Run, how: str) -> None:
    run = train_until_stop(tmp_path, 2, FSDP).run
    piece = run.snapshots_folder / "step-000000008" / "optimizer.00001-of-00002.pt"
    if how == "missing":
        piece.unlink()
    else:
        os.truncate(piece, piece.stat().st_size - 100)
    with pytest.raises(InvalidSnapshotError, match=r"optimizer\.00001-of-00002\.pt"):
        verify_snapshot(piece.parent)
    ended = train_world(tmp_path, 2, *SHORT, FSDP, experiment=layer_stack.stack)
    assert ended.codes == [0, 0], ended.said
    assert f"{piece.parent} is damaged" in ended.said
    assert "resuming from step-000000004" in ended.said
    require_close(ended.run, whole)


def limit_files_of_rank_1(rank: int) -> None:
    if rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (2000, 2000))


def test_a_piece_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    config = configured(tmp_path, [*SHORT, FSDP, "run.name=a"], layer_stack.stack)
    ended = train_config(tmp_path, 2, config, prepare=limit_files_of_rank_1).ranks
    assert [rank.code for rank in ended] == [1, 0], ended[0].output
    assert "warning: not saved: rank 1: file too large" in ended[0].output
    assert "but this step is not saved: rank 1: file too large" in ended[0].output
    assert snapshot_steps(Run(tmp_path / "a")) == []


def _one_layer(cfg: layer_stack.Settings) -> echelon.Experiment:
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = (torch.ones(8, 2), torch.ones(8, 1))
    return echelon.Experiment(model, optimizer, torch.nn.functional.mse_loss, data)


def test_a_model_without_layers_to_compile_is_told(tmp_path: Path) -> None:
    words = (FSDP, "trainer.compile=true", "trainer.steps=2")
    ended = train_world(tmp_path, 2, *words, experiment=_one_layer)
    assert ended.codes == [0, 0], ended.said
    assert "note: the first steps compile the model" in ended.said
    assert ended.said.count("trainer.compile=true: not compiled: fsdp compiles layer by layer") == 1


def move_to_own_folder(folder: Path, rank: int) -> None:
    own = folder / f"machine-{rank}"
    (own / "runs").mkdir(parents=True)
    os.chdir(own)


def test_without_a_shared_folder_rank_0_saves_for_all(tmp_path: Path, shared: Run) -> None:
    # A path that is another folder to each rank.
    config = configured(
        Path("/proc/self/cwd/runs"), [*SHORT, FSDP, "run.name=a"], layer_stack.stack
    )
    ended = train_config(tmp_path, 2, config, prepare=partial(move_to_own_folder, tmp_path)).ranks
    assert [rank.code for rank in ended] == [0, 0], ended[0].output
    assert "so rank 0 saves for all" in ended[0].output
    run = Run(tmp_path / "machine-0" / "runs" / "a")
    assert (run.snapshots_folder / "step-000000012" / "model.pt").is_file()
    assert differing(state_at(run, 12), state_at(shared, 12)) == []
    assert not (tmp_path / "machine-1" / "runs" / "a" / "snapshots").exists()


@pytest.mark.parametrize(
    ("word", "told"),
    [
        ("optimizer=adafactor", "the optimizer Adafactor cannot train shards"),
        ("outside=true", "uses weights outside a call of its model"),
    ],
)
def test_what_torch_cannot_do_with_shards(tmp_path: Path, word: str, told: str) -> None:
    ended = train_world(tmp_path, 2, *SHORT, FSDP, word, experiment=layer_stack.stack)
    assert ended.codes == [1, 1]
    assert told in ended.said
    assert "Traceback" not in ended.said


def test_by_the_command_that_a_person_types(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = (*ECHELON, "train", *QUICK, "hidden=8", FSDP, "run.name=a")
    ended = run_forked([*words, *TWO], tmp_path)
    assert (ended.code, ended.left) == (0, []), ended.err
    assert "on 2 processes (cpu), which share the model" in ended.err
    monkeypatch.chdir(tmp_path)
    for where in (tmp_path / "runs" / "a", "a", "latest"):
        assert echelon.load_weights(where)["0.weight"].shape == (8, 20)
    with pytest.raises(EchelonError, match="nothing"):
        echelon.load_weights("nothing")
    alone = run_forked([*words, "launch=local", "launch.procs=1"], tmp_path)
    assert alone.code == 2
    assert "there is only one process" in alone.err


# --- what cannot be -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ranks", "words", "told"),
    [
        (1, (FSDP,), "there is only one process"),
        (
            2,
            (FSDP, "sparse=true", "optimizer=adagrad"),
            "'words.weight' is a table with sparse gradients",
        ),
        (2, (FSDP, "number=true"), "the parameter 'scale' is a single number"),
        (2, (FSDP, "replica.blocks=[Blok]"), "did you mean 'Block'? known: Block, BatchNorm"),
        (2, ("replica.checkpoint=true", "replica.blocks=[Blok]"), "did you mean 'Block'?"),
    ],
)
def test_what_cannot_be_sharded(
    tmp_path: Path, ranks: int, words: tuple[str, ...], told: str
) -> None:
    ended = train_world(tmp_path, ranks, *SHORT, *words, "norm=true", experiment=layer_stack.stack)
    assert ended.codes == [2] * ranks
    assert all(told in rank.output for rank in ended.ranks)
    assert "Traceback" not in ended.said
