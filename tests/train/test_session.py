"""Loops of one's own over a session: the same numbers at any world size and after any end."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import session_loops
import torch
from toy_experiments import FEATURES
from worlds import (
    Trained,
    differing,
    global_batches,
    losses,
    metrics,
    snapshot_steps,
    state_at,
    traced_lines,
    train_world,
)

import echelon
from echelon.errors import EchelonError, ExitCode
from echelon.runs.status import read_run_status

pytestmark = pytest.mark.slow

BATCHES = ("trainer.batch_size=5", "trainer.epochs=3")
"""17 samples: four steps an epoch, the last one of two samples, which three ranks share."""
STEPS = 12


def run_loop(
    folder: Path,
    world_size: int,
    *words: str,
    loop: Callable[..., Any] = session_loops.regression,
    name: str = "a",
    **env: str,
) -> Trained:
    return train_world(
        folder,
        world_size,
        *(words or BATCHES),
        name=name,
        experiment=loop,
        env=env,
        end_together="KILL" in env.get("ECHELON_TEST_FAULT", ""),
    )


def read_columns(trained: Trained) -> list[dict[str, float]]:
    """Every line of metrics without what depends on the machine."""
    return [{k: v for k, v in line.items() if k != "epoch"} for line in metrics(trained.run)]


def require_close(a: Trained, b: Trained, step: int = STEPS, limit: float = 1e-5) -> None:
    ours, theirs = state_at(a.run, step), state_at(b.run, step)
    for part in ours.keys() - {"rng"}:
        compare_trees(ours[part], theirs[part], limit, part)
    assert losses(a.run) == pytest.approx(losses(b.run), rel=limit, abs=limit)


def compare_trees(a: Any, b: Any, limit: float, path: str) -> None:
    if isinstance(a, torch.Tensor):
        torch.testing.assert_close(a, b, rtol=limit, atol=limit, msg=path)
    elif isinstance(a, dict):
        assert a.keys() == b.keys(), path
        for key in a:
            compare_trees(a[key], b[key], limit, f"{path}/{key}")
    elif isinstance(a, (list, tuple)):
        for i, (x, y) in enumerate(zip(a, b, strict=True)):
            compare_trees(x, y, limit, f"{path}/{i}")
    elif isinstance(a, float):
        assert a == pytest.approx(b, rel=limit, abs=limit), path
    else:
        assert a == b, path


@pytest.mark.parametrize(
    "loop",
    [
        session_loops.regression,
        session_loops.adversaries,
        session_loops.thawing,
        session_loops.tokens,
        session_loops.rare_targets,
        session_loops.contrast,
        session_loops.repeated_passes,
        session_loops.wide_adversaries,
        session_loops.wide_contrast,
        session_loops.sampled,
    ],
)
def test_the_same_numbers_at_any_world_size(loop: Callable[..., Any], tmp_path: Path) -> None:
    ended = [
        run_loop(tmp_path, world_size, loop=loop, name=f"of-{world_size}")
        for world_size in (1, 2, 3)
    ]
    for trained in ended:
        assert set(trained.codes) == {0}, trained.said
        assert len(losses(trained.run)) == STEPS
        require_close(trained, ended[0])


def test_a_loop_is_what_torch_does_with_it(tmp_path: Path) -> None:
    """One process alone, without the session: to the bit."""
    trained = run_loop(tmp_path, 1, *BATCHES, loop=session_loops.tokens)
    assert trained.codes == [0], trained.said
    torch.manual_seed(0)
    model = torch.nn.Linear(FEATURES, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    numbers, x, _ = session_loops.make_data(17)
    for rows in read_batches(tmp_path):
        target = (numbers[rows].unsqueeze(1) + torch.arange(3)) % 4
        target[torch.arange(3) > numbers[rows].unsqueeze(1) % 3] = -100
        scores = model(x[rows]).unsqueeze(1).expand(-1, 3, -1).reshape(-1, 4)
        torch.nn.functional.cross_entropy(scores, target.reshape(-1), ignore_index=-100).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert differing(state_at(trained.run, STEPS)["model"], model.state_dict()) == []


def read_batches(folder: Path) -> list[list[int]]:
    """The samples of every step, from another loop over the same data."""
    trace = folder / "trace"
    trace.mkdir()
    ended = run_loop(folder, 1, *BATCHES, name="traced", ECHELON_TEST_TRACE=str(trace))
    assert ended.codes == [0], ended.said
    return [list(batch) for batch in global_batches(trace)]


def test_every_sample_once_in_an_epoch(tmp_path: Path, traced: Path) -> None:
    ended = run_loop(tmp_path, 3, ECHELON_TEST_TRACE=str(traced))
    assert set(ended.codes) == {0}, ended.said
    batches = global_batches(traced)
    assert len(batches) == STEPS


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("step", [1, 6, 11])
def test_killed_anywhere_it_goes_on_to_the_bit(step: int, world_size: int, tmp_path: Path) -> None:
    every = ("trainer.save.steps=1", "trainer.log_steps=5")
    words = ("samples=20", *BATCHES, *every, "dropout=0.3", "batch_norm=true")
    whole = run_loop(tmp_path, world_size, *words, name="whole")
    assert set(whole.codes) == {0}, whole.said
    fault = f"{world_size - 1}:{step}:KILL"
    killed = run_loop(tmp_path, world_size, *words, ECHELON_TEST_FAULT=fault)
    assert -9 in killed.codes
    resumed = run_loop(tmp_path, world_size, *words)
    assert set(resumed.codes) == {0}, resumed.said
    assert metrics(resumed.run) == metrics(whole.run)
    assert differing(state_at(resumed.run, STEPS), state_at(whole.run, STEPS)) == []


def test_loader_processes_change_nothing(tmp_path: Path) -> None:
    """Two of them at two ranks, killed, and gone on with alone."""
    whole = run_loop(tmp_path, 1, loop=session_loops.sampled, name="whole")
    words = (*BATCHES, "trainer.loader_workers=2", "trainer.save.steps=1")
    killed = run_loop(
        tmp_path, 2, *words, loop=session_loops.sampled, ECHELON_TEST_FAULT="1:5:KILL"
    )
    assert -9 in killed.codes
    ended = run_loop(tmp_path, 1, *BATCHES, loop=session_loops.sampled)
    assert ended.codes == [0], ended.said
    require_close(ended, whole)


def test_what_was_thawed_is_trained_after_a_resume(tmp_path: Path) -> None:
    loop = session_loops.thawed_once
    words = (*BATCHES, "trainer.save.steps=1")
    whole = run_loop(tmp_path, 1, loop=loop, name="whole")
    killed = run_loop(tmp_path, 2, *words, loop=loop, ECHELON_TEST_FAULT="1:6:KILL")
    assert -9 in killed.codes
    stopped = run_loop(tmp_path, 1, *words, loop=loop, ECHELON_TEST_FAULT="0:9:TERM")
    assert stopped.codes == [ExitCode.PREEMPTED], stopped.said
    ended = run_loop(tmp_path, 1, *words, loop=loop)  # a second resume knows it as well
    assert ended.codes == [0], ended.said
    require_close(ended, whole)


def test_an_evaluation_sees_what_is_saved_and_may_come_after_the_loop(tmp_path: Path) -> None:
    words = ("samples=20", "batch_norm=true", "trainer.batch_size=10", "trainer.epochs=2")
    ended = run_loop(tmp_path, 2, *words, loop=session_loops.evaluated)
    assert set(ended.codes) == {0}, ended.said
    lines = metrics(ended.run)
    assert [line["lr"] for line in lines if "lr" in line] == [7.0] * 4  # the one that was logged
    assert [(line["step"], line["tested"]) for line in lines if "tested" in line] == [(4, 0.25)]
    assert [line["step"] for line in lines if "eval_error" in line] == [4]
    assert (ended.run.snapshots_folder / "best").resolve().name == "step-000000004"
    again = run_loop(tmp_path, 1, *words, loop=session_loops.evaluated)
    assert again.codes == [0], again.said
    assert metrics(again.run) == lines


@pytest.mark.parametrize(
    ("mistake", "code", "said"),
    [
        ("schedule", 1, "schedule, a ReduceLROnPlateau, differs between the ranks after step 4"),
        ("rows", 1, "(5,) of torch.float32 on rank 0, (5,) of torch.float64 on rank 1"),
        ("state", 0, "warning: collected differs between the ranks after step 4, and a snapshot"),
    ],
)
def test_what_differs_between_ranks_is_said(
    mistake: str, code: int, said: str, tmp_path: Path
) -> None:
    ended = run_loop(tmp_path, 2, *BATCHES, f"mistake={mistake}", loop=session_loops.unequal)
    assert set(ended.codes) == {code}, ended.said
    assert said in ended.said
    assert "Traceback" not in ended.said


def test_stopped_at_one_size_it_goes_on_at_others(tmp_path: Path) -> None:
    whole = run_loop(tmp_path, 1, name="whole")
    for size, step in ((1, 3), (3, 5), (2, 9)):
        stopped = run_loop(tmp_path, size, ECHELON_TEST_FAULT=f"{size - 1}:{step}:TERM")
        assert set(stopped.codes) == {ExitCode.PREEMPTED}, stopped.said
        assert "everything is saved" in stopped.said
        assert snapshot_steps(stopped.run)[-1] in (step, step + 1)
        assert read_run_status(stopped.run).state == "preempted"
    ended = run_loop(tmp_path, 3)
    assert set(ended.codes) == {0}, ended.said
    assert len(losses(ended.run)) == STEPS
    require_close(ended, whole)
    best = (ended.run.snapshots_folder / "best").resolve().name
    assert best == (whole.run.snapshots_folder / "best").resolve().name


@pytest.mark.parametrize("how", ["stop_at", "leave_at"])
def test_a_loop_that_ends_early_is_finished_at_any_size(how: str, tmp_path: Path) -> None:
    """A stop after the step of an iteration takes effect with the next one; `break` at once."""
    last = 6 if how == "stop_at" else 5
    ended = [run_loop(tmp_path, size, *BATCHES, f"{how}=5", name=f"of-{size}") for size in (1, 2)]
    for trained in ended:
        assert set(trained.codes) == {0}, trained.said
        assert read_run_status(trained.run).state == "finished"
        assert snapshot_steps(trained.run)[-1] == last
        require_close(trained, ended[0], last)
    again = run_loop(tmp_path, 1, *BATCHES, f"{how}=5", name="of-1")
    assert again.codes == [0]
    assert snapshot_steps(again.run)[-1] == last


def test_left_before_its_step_an_iteration_does_not_count(tmp_path: Path) -> None:
    ended = [
        run_loop(tmp_path, size, *BATCHES, "leave_before=5", name=f"of-{size}") for size in (1, 2)
    ]
    for trained in ended:
        assert set(trained.codes) == {0}, trained.said
        assert snapshot_steps(trained.run)[-1] == 4
        require_close(trained, ended[0], 4)


@pytest.mark.parametrize("world_size", [1, 2])
def test_an_error_within_an_iteration_saves_nothing_of_it(world_size: int, tmp_path: Path) -> None:
    words = (*BATCHES, "trainer.save.steps=1")
    failed = run_loop(tmp_path, world_size, *words, ECHELON_TEST_ERROR_AT="6")
    assert set(failed.codes) == {ExitCode.FAILED}, failed.said
    assert "ValueError: in the middle of an iteration" in failed.said
    assert read_run_status(failed.run).state == "failed"
    assert failed.run.read_status_file()["step"] == 5
    assert snapshot_steps(failed.run)[-1] <= 5  # the failure does not wait for the one of step 5
    resumed, whole = (run_loop(tmp_path, world_size, *words, name=name) for name in ("a", "whole"))
    assert metrics(resumed.run) == metrics(whole.run)
    assert differing(state_at(resumed.run, STEPS), state_at(whole.run, STEPS)) == []


@pytest.mark.parametrize(("mistake", "name"), [("own", "train_data"), ("own eval", "eval_batches")])
def test_data_that_differs_between_ranks_is_refused(
    mistake: str, name: str, tmp_path: Path
) -> None:
    ended = run_loop(tmp_path, 2, *BATCHES, f"mistake={mistake} data", loop=session_loops.mistaken)
    assert set(ended.codes) == {ExitCode.USAGE}, ended.said
    assert f"{name} is not the same on all ranks: its first or last sample is another" in ended.said
    assert "read it from a file, or draw it with a seed" in ended.said


@pytest.mark.parametrize(
    ("mistake", "said"),
    [
        ("own gradient", "1 parameters of SGD have a gradient in step 1 that session.backward has"),
        ("own backward", "loss.backward() is called in step 1, so the gradients of 2 processes"),
        (
            "own step",
            "optimizer.step() of SGD is called in step 1, which the session would not count",
        ),
        ("never", "but session.step was never called, so nothing was trained"),
    ],
)
def test_what_would_train_wrongly_is_refused(mistake: str, said: str, tmp_path: Path) -> None:
    ended = run_loop(tmp_path, 2, *BATCHES, f"mistake={mistake}", loop=session_loops.mistaken)
    assert 0 not in ended.codes, ended.said
    assert said in ended.said
    assert "Traceback" not in ended.said


def test_a_rate_that_is_changed_on_purpose_holds_after_a_resume(tmp_path: Path) -> None:
    plain = session_loops.contrast
    first = run_loop(tmp_path, 1, *BATCHES, "lr=0.01", loop=plain)
    snapshot = first.run.snapshots_folder / f"step-{STEPS:09d}"
    longer = ("trainer.batch_size=5", "trainer.epochs=4", "lr=0.001")
    refused = run_loop(tmp_path, 1, *longer, loop=plain)
    assert refused.codes == [ExitCode.USAGE]
    for size in (1, 2):
        words = (*longer, f"trainer.resume={snapshot}")
        changed = run_loop(tmp_path, size, *words, loop=plain, name=f"changed-{size}")
        assert set(changed.codes) == {0}, changed.said
        assert {line["lr"] for line in metrics(changed.run) if "lr" in line} == {0.001}
    again = run_loop(
        tmp_path, 1, *longer[:2], "lr=0.01", f"trainer.resume={snapshot}", loop=plain, name="again"
    )
    assert {line["lr"] for line in metrics(again.run) if "lr" in line} == {0.01}


def test_awkward_loops_have_the_same_numbers_at_any_size(tmp_path: Path) -> None:
    ended = [
        run_loop(tmp_path, size, *BATCHES, loop=session_loops.awkward, name=f"of-{size}")
        for size in (1, 2, 3)
    ]
    for trained in ended:
        assert set(trained.codes) == {0}, trained.said
        assert metrics(trained.run)[-1]["samples"] == 51
        require_close(trained, ended[0], limit=1e-4)
    assert float(state_at(ended[0].run, STEPS)["model"]["seen"]) != 0.0


def test_steps_without_data(tmp_path: Path) -> None:
    for size in (1, 2):
        ended = run_loop(
            tmp_path, size, "trainer.steps=7", loop=session_loops.policy, name=f"of-{size}"
        )
        assert set(ended.codes) == {0}, ended.said
        assert losses(ended.run) == [float(n) for n in range(1, 8)]
        assert snapshot_steps(ended.run) == [7]


def test_rows_of_all_are_shared(tmp_path: Path) -> None:
    """In the first steps there are fewer of them than ranks."""
    ended = [
        run_loop(
            *(tmp_path, size, "trainer.steps=5"),
            loop=session_loops.split_rows,
            name=f"of-{size}",
        )
        for size in (1, 3)
    ]
    for trained in ended:
        assert set(trained.codes) == {0}, trained.said
        require_close(trained, ended[0], 5)


@pytest.mark.parametrize(
    ("mistake", "said"),
    [
        ("foreign", "parameters of a module that the session does not have"),
        ("nothing", "session.prepare is given nothing"),
        ("data", "session.prepare is given tuple, which has no state_dict"),
        ("no state", "session.register is given buffer of type list"),
        ("no loop", "the training function returned without a loop"),
        ("too early", "session.backward is called, but no loop of the session has begun"),
        ("batch size", "batch_size=0"),
        ("own size", "trainer.batch_size=8 has no effect, as the loop gives batch_size=4 to"),
        ("total", "session.total_steps is read, but no loop of the session has begun"),
        ("closure", "the optimizer is LBFGS, which computes the loss several times"),
        ("object", "the state to save holds a builtins.object at collected/seen"),
        ("two orders", "there are both a sampler and a batch_sampler"),
        ("share", "the sampler, a DistributedSampler, gives the share of one of 2 processes"),
        ("collate", "the collate_fn is of type int"),
        ("no iteration", "but nothing iterated over its session.batches"),
        ("again", "the session has had its loop already"),
        ("after", "session.backward is called after the loop"),
        ("late", "model comes to the session after its loop has begun"),
        ("second loop", "the session has had its loop already"),
        ("number", "session.backward is given float in step 1"),
        ("rows", "session.backward is given a tensor of shape (8, 1)"),
        ("no backward", "no parameter of SGD has a gradient in step 1"),
        ("norm", "session.grad_norm is read, but no step has measured it"),
        ("stranger", "session.step is given SGD, which is no optimizer that the session has"),
        ("text", "loss is no number: list, ['high'] (rank 0, step 1)"),
        ("best", "session.best(flumph=…): the name does not say"),
        ("interval", "session.every is given steps=None, epochs=None, which is no interval"),
        ("zero", "session.every is given steps=None, epochs=0, which is no interval"),
        ("no time", "session.every is given steps=None, epochs=None, minutes=0, which is no"),
        ("twice", "the session is given the same Linear twice"),
        ("count", "session.backward is given count=-1 in step 1"),
        ("word", "session.backward is given count=3 in step 1"),
        ("counts", "session.backward is given count=a tensor of shape (2,) in step 1"),
        ("none", "session.backward is given count=0 on every rank in step 1"),
        ("clip", "session.step is given clip=-1.0 in step 1"),
        ("place", "step is the name of a place in metrics.jsonl (rank 0, step 1)"),
        ("no name", "session.log is given Tensor without a name (rank 0, step 1)"),
        ("eval size", "batch_size=-1"),
        ("row", "session.gather is given Tensor without rows in step 1"),
        ("no rows", "session.split is given int without rows in step 1"),
        ("shuffle", "the loader sets shuffle, which Echelon decides"),
        ("index", "the batch_sampler gives the index 99 in epoch 1, but the data has 17 samples"),
    ],
)
def test_a_mistake_is_a_sentence(mistake: str, said: str, tmp_path: Path) -> None:
    words = ("trainer.batch_size=8", f"mistake='{mistake}'")
    ended = run_loop(tmp_path, 1, *words, loop=session_loops.mistaken)
    assert ended.codes == [ExitCode.USAGE], ended.said
    assert said in ended.said
    assert "  hint: " in ended.said
    assert "Traceback" not in ended.said


def test_ranks_with_different_parts(tmp_path: Path) -> None:
    words = ("trainer.batch_size=8", "mistake=unequal")
    ended = run_loop(tmp_path, 2, *words, loop=session_loops.mistaken)
    assert "rank 1 has the parts model, optimizer, extra" in ended.said
    assert 0 not in ended.codes


def test_the_weights_of_a_loop_are_loaded_without_it(tmp_path: Path) -> None:
    trained = run_loop(tmp_path, 1, "trainer.epochs=1", loop=session_loops.tokens)
    folder = str(trained.run.folder)
    model = torch.nn.Linear(FEATURES, 4)
    model.load_state_dict(echelon.load_weights(folder))
    with pytest.raises(EchelonError, match="has a training loop of its own"):
        echelon.load(folder)


def test_another_part_than_in_the_snapshot(tmp_path: Path) -> None:
    assert run_loop(tmp_path, 1, "trainer.epochs=1", loop=session_loops.tokens).codes == [0]
    ended = run_loop(tmp_path, 1, "trainer.epochs=2", loop=session_loops.contrast)
    assert ended.codes != [0]


def test_weights_that_are_not_finite_are_not_saved(tmp_path: Path) -> None:
    ended = run_loop(tmp_path, 2, *BATCHES, loop=session_loops.nonfinite)
    assert 0 not in ended.codes
    assert "is not finite (weight, bias) and was not saved" in ended.said
    assert snapshot_steps(ended.run) == []


def test_settings_that_a_loop_does_not_read(tmp_path: Path) -> None:
    words = (*BATCHES, "trainer.clip=1", "trainer.schedule=cosine", "replica.checkpoint=true")
    ended = run_loop(tmp_path, 1, *words)
    assert ended.codes == [ExitCode.USAGE]
    for setting in words[2:]:
        assert setting.replace("=1", "=1.0").replace("=true", "=True") in ended.said
    assert "session.step(optimizer, clip=…)" in ended.said


@pytest.mark.parametrize("world_size", [1, 3])
def test_what_is_due_by_the_clock_is_due_on_all_ranks(
    world_size: int, tmp_path: Path, traced: Path
) -> None:
    ended = run_loop(tmp_path, world_size, loop=session_loops.timed, ECHELON_TEST_TRACE=str(traced))
    assert set(ended.codes) == {0}, ended.said
    lines = traced_lines(traced, "due")
    of_rank_0 = [line["due"] for line in lines if line["rank"] == 0]
    assert len(of_rank_0) == STEPS
    for rank in range(world_size):
        assert [line["due"] for line in lines if line["rank"] == rank] == of_rank_0
    often, _, never = ([due[i] for due in of_rank_0] for i in range(3))
    assert often == [False, *[True] * (STEPS - 1)]  # the clock is that of the iterations before
    assert never == [*[False] * (STEPS - 1), True]
    assert all(due[:3] == due[3:] for due in of_rank_0)  # the same wherever it is asked


def test_a_loop_may_know_of_its_training(tmp_path: Path, traced: Path) -> None:
    stopped = run_loop(
        tmp_path,
        2,
        *BATCHES,
        loop=session_loops.informed,
        ECHELON_TEST_FAULT="0:5:TERM",
        ECHELON_TEST_TRACE=str(traced),
    )
    assert set(stopped.codes) == {ExitCode.PREEMPTED}, stopped.said
    ended = run_loop(tmp_path, 1, loop=session_loops.informed, ECHELON_TEST_TRACE=str(traced))
    assert ended.codes == [0], ended.said
    told = traced_lines(traced, "begun")
    assert {line["total"] for line in told} == {STEPS}
    assert sorted(line["begun"] for line in told)[:2] == [0, 0]
    assert sorted(line["begun"] for line in told)[2] in (5, 6)


@pytest.mark.parametrize(
    ("world_size", "words", "left_after"),
    [
        (3, ("leave_at=5",), 5),
        (2, ("leave_at=5", "samples=24", "trainer.batch_size=8", "batch_norm=true"), 5),
        (2, ("leave_at=5", "mistake=gather"), 5),
        (2, ("leave_before=5",), 4),
    ],
)
def test_a_rank_that_leaves_the_loop_alone_is_named(
    world_size: int, words: tuple[str, ...], left_after: int, tmp_path: Path
) -> None:
    ended = run_loop(tmp_path, world_size, *BATCHES, *words, loop=session_loops.uneven)
    assert set(ended.codes) == {ExitCode.FAILED}, ended.said
    for rank in ended.ranks:
        assert f"rank {world_size - 1} left the loop after step {left_after}, but rank" in (
            rank.output
        )
        assert "session.stop(), which ends the loop on all of them" in rank.output
    assert read_run_status(ended.run).state == "failed"


@pytest.mark.parametrize("call", ["gather", "best"])
def test_a_call_that_one_rank_alone_makes_is_named(call: str, tmp_path: Path) -> None:
    # Without lines of metrics, whose message could cross with the call: gloo ends a process then.
    words = (*BATCHES, f"mistake='{call} alone'", "trainer.log_steps=100")
    ended = run_loop(tmp_path, 2, *words, loop=session_loops.uneven)
    assert set(ended.codes) == {ExitCode.FAILED}, ended.said
    for rank in ended.ranks:
        assert f"in step 5 rank 1 called session.{call}, but rank 0 called" in rank.output
        assert "call it on every rank in every iteration" in rank.output


def test_a_rank_that_skips_a_step_alone_is_named(tmp_path: Path) -> None:
    words = (*BATCHES, "mistake=skip", "trainer.save.steps=1")
    ended = run_loop(tmp_path, 3, *words, loop=session_loops.uneven)
    assert set(ended.codes) == {ExitCode.FAILED}, ended.said
    for rank in ended.ranks:
        assert "rank 2 ended step 5 without a call that rank" in rank.output
        assert "Traceback" not in rank.output
    assert snapshot_steps(ended.run)[-1] == 4
    together = run_loop(
        tmp_path, 3, *BATCHES, "mistake=all skip", loop=session_loops.uneven, name="b"
    )
    assert set(together.codes) == {0}, together.said


def test_a_rank_that_breaks_in_the_last_iteration_is_not_alone(tmp_path: Path) -> None:
    ended = run_loop(tmp_path, 2, *BATCHES, f"leave_at={STEPS}", loop=session_loops.uneven)
    assert set(ended.codes) == {0}, ended.said
    assert snapshot_steps(ended.run)[-1] == STEPS
