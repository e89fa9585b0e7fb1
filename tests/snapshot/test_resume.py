"""Ended anywhere, a run goes on exactly where it was."""

from __future__ import annotations

import json
import shutil
import signal
from collections import Counter
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

import pytest
import toy_experiments
from worlds import (
    Trained,
    configured,
    differing,
    global_batches,
    losses,
    metrics,
    snapshot_steps,
    state_at,
    steps_logged,
    traced_lines,
    train_config,
    train_world,
    verb,
)

from echelon.runs.run_folder import Run
from echelon.snapshot.reader import verify_snapshot

pytestmark = pytest.mark.slow

STEPS = 12
SHORT = (
    "trainer.batch_size=5",  # four steps per epoch, the last one of two samples
    "trainer.epochs=3",
    "trainer.save.steps=1",
    "trainer.clip=1.0",
    "eval_samples=7",
    "optimizer=adam",
    "dropout=0.3",
    "trainer.schedule=cosine",
    "trainer.warmup_steps=2",
)


def fault(rank: int, step: int, what: str) -> dict[str, str]:
    return {"ECHELON_TEST_FAULT": f"{rank}:{step}:{what}"}


def stop(rank: int, step: int, what: str = "TERM") -> dict[str, str]:
    """The wish travels with the gradients of the next step, which is then the last."""
    return fault(rank, step - 1, what)


def require_same(resumed: Run, whole: Run, steps: int = STEPS) -> None:
    """Bit for bit: every line of metrics, the weights, the optimizer, the random numbers; and what
    the last snapshots say of themselves."""
    assert metrics(resumed) == metrics(whole)
    assert differing(state_at(resumed, steps), state_at(whole, steps)) == []
    for step in snapshot_steps(whole):
        assert _said(resumed, step) == _said(whole, step)


def _said(run: Run, step: int) -> dict[str, Any]:
    info = verify_snapshot(run.snapshots_folder / f"step-{step:09d}").info
    return {key: info[key] for key in ("samples", "best", "results", "evaluated_step", "losses")}


@pytest.fixture(scope="module")
def whole_runs(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Run]:
    """The short run, never interrupted, by world size."""
    folder = tmp_path_factory.mktemp("whole")
    found = {}
    for world_size in (1, 3):
        trained = train_world(folder, world_size, *SHORT, name=f"whole-{world_size}")
        assert trained.codes == [0] * world_size, trained.said
        found[world_size] = trained.run
    return found


# --- killed and typed again ---------------------------------------------------------------------


@pytest.mark.parametrize("world_size", [1, 3])
@pytest.mark.parametrize("step", range(1, STEPS + 1))
def test_killed_after_any_step_goes_on_bit_for_bit(
    tmp_path: Path, whole_runs: dict[int, Run], world_size: int, step: int
) -> None:
    config = configured(tmp_path, ["run.name=a", *SHORT])
    killed = train_config(
        tmp_path,
        world_size,
        config,
        env=fault(rank=step % world_size, step=step, what="KILL"),
        end_together=True,
    )
    assert killed.codes[step % world_size] == -signal.SIGKILL, killed.said
    assert 0 not in killed.codes
    again = train_config(tmp_path, world_size, config)
    assert again.codes == [0] * world_size, again.said
    require_same(again.run, whole_runs[world_size])


def test_killed_again_and_again(tmp_path: Path, whole_runs: dict[int, Run]) -> None:
    """A life ends in its third step, when its first is saved for sure: the next save waits."""
    config = configured(tmp_path, ["run.name=a", *SHORT])
    lives = 0
    while max(snapshot_steps(Run(tmp_path / "a")), default=0) < STEPS - 2:
        ended = train_config(tmp_path, 3, config, env=fault(1, 3, "KILL"), end_together=True)
        assert -signal.SIGKILL in ended.codes, ended.said
        lives += 1
        assert max(snapshot_steps(ended.run)) >= lives
    ended = train_config(tmp_path, 3, config)
    assert ended.codes == [0, 0, 0], ended.said
    require_same(ended.run, whole_runs[3])


def test_loaders_do_not_change_where_a_run_goes_on(
    tmp_path: Path, whole_runs: dict[int, Run]
) -> None:
    words = ("dataset=true", "trainer.loader_workers=2")
    whole = train_world(tmp_path, 1, *SHORT, *words, name="whole")
    config = configured(tmp_path, ["run.name=a", *SHORT, *words])
    killed = train_config(tmp_path, 1, config, env=stop(0, 6))
    assert killed.codes == [75], killed.said
    again = train_config(tmp_path, 1, config)
    assert again.codes == [0], again.said
    require_same(again.run, whole.run)
    assert metrics(whole.run) == metrics(whole_runs[1])


def test_lines_between_two_logs_survive(tmp_path: Path) -> None:
    """A line is the mean over the steps since the last: also over those before the kill."""
    words = (*SHORT, "trainer.log_steps=4", "trainer.evaluate.epochs=null")
    whole = train_world(tmp_path, 1, *words, name="whole")
    config = configured(tmp_path, ["run.name=a", *words])
    train_config(tmp_path, 1, config, env=fault(0, 7, "KILL"))
    again = train_config(tmp_path, 1, config)
    assert steps_logged(again.run) == [4, 8, 12]
    require_same(again.run, whole.run)


@pytest.mark.parametrize("step", [4, 9, 11])
def test_a_kill_loses_at_most_one_interval(tmp_path: Path, step: int) -> None:
    words = (*SHORT, "trainer.save.steps=5", "trainer.save.epochs=null", "eval_samples=0")
    whole = train_world(tmp_path, 1, *words, name="whole")
    config = configured(tmp_path, ["run.name=a", *words])
    saved = 5 * (step // 5)
    # Steps of microseconds would outrun the save, which goes on beside them.
    after = tmp_path / "a" / "snapshots" / f"step-{saved:09d}" if saved else tmp_path
    env = {**fault(0, step, "KILL"), "ECHELON_TEST_AFTER": str(after)}
    killed = train_config(tmp_path, 1, config, env=env)
    assert killed.codes == [-signal.SIGKILL]
    assert max(snapshot_steps(killed.run), default=0) == saved
    again = train_config(tmp_path, 1, config)
    assert again.codes == [0], again.said
    assert (f"resuming run a after step {saved}" in again.said) == (saved > 0)
    require_same(again.run, whole.run)


# --- another number of processes ----------------------------------------------------------------


def test_resumed_on_4_then_2_then_3(tmp_path: Path) -> None:
    """Stopped twice in the middle of an epoch."""
    words = ("trainer.batch_size=5", "trainer.epochs=3", "dataset=true", "eval_samples=7")
    traces = [tmp_path / f"trace-{i}" for i in range(3)]
    for trace in traces:
        trace.mkdir()
    config = configured(tmp_path, ["run.name=a", *words])
    stops: tuple[dict[str, str], ...] = (stop(2, 3, "TERM"), stop(1, 4, "USR2"), {})
    for world_size, asked, trace in zip((4, 2, 3), stops, traces, strict=True):
        env = {"ECHELON_TEST_TRACE": str(trace), **asked}
        ended = train_config(tmp_path, world_size, config, env=env)
        assert ended.codes == [75 if asked else 0] * world_size, ended.said
    whole = train_world(tmp_path, 1, *words, name="whole")
    batches = [batch for trace in traces for batch in global_batches(trace)]
    assert [len(global_batches(trace)) for trace in traces] == [3, 4, 5]
    for epoch in range(3):
        samples = chain(*batches[4 * epoch : 4 * epoch + 4])
        assert sorted(samples) == list(range(17)), f"epoch {epoch + 1}"
    fetched = Counter(line["asked"] for trace in traces for line in traced_lines(trace, "asked"))
    assert set(fetched.values()) == {3}, "and none for nothing"
    assert steps_logged(ended.run) == list(range(1, 13))
    assert losses(ended.run) == pytest.approx(losses(whole.run), rel=1e-5)


# --- which snapshot -----------------------------------------------------------------------------


@pytest.fixture
def stopped(tmp_path: Path) -> Trained:
    """The short run, stopped after step 6."""
    trained = train_world(tmp_path, 1, *SHORT, env=stop(0, 6))
    assert trained.codes == [75], trained.said
    assert snapshot_steps(trained.run) == [4, 5, 6]
    return trained


def test_a_damaged_snapshot_is_passed_over_and_said(
    tmp_path: Path, stopped: Trained, whole_runs: dict[int, Run]
) -> None:
    newest = stopped.run.snapshots_folder / "step-000000006" / "model.pt"
    newest.write_bytes(newest.read_bytes()[:-100])
    again = train_world(tmp_path, 1, *SHORT)
    assert again.codes == [0], again.said
    assert f"warning: {newest.parent} is damaged (model.pt: " in again.said
    assert "resuming from step-000000005" in again.said
    require_same(again.run, whole_runs[1])


@pytest.mark.parametrize("lost", ["folder", "snapshots", "files", "manifests"])
@pytest.mark.parametrize("world_size", [1, 2])
def test_lost_snapshots_are_refused_and_the_numbers_kept(
    tmp_path: Path, stopped: Trained, lost: str, world_size: int
) -> None:
    """As a purge of old files leaves it: the numbers are all there is."""
    root = stopped.run.snapshots_folder
    if lost == "folder":
        shutil.rmtree(root)
    for folder in root.glob("step-*") if lost != "folder" else ():
        if lost == "snapshots":
            shutil.rmtree(folder)
        for file in folder.glob("*" if lost == "files" else "manifest.json"):
            file.unlink()
    before = stopped.run.metrics_file.read_text()
    for again in (
        train_world(tmp_path, world_size, *SHORT),
        train_world(tmp_path, world_size, *SHORT, "trainer.epochs=5"),
    ):
        assert again.codes == [3] * world_size, again.said
        assert "run a had saved step 6, but of the snapshots in" in again.said
        assert "trainer.resume=never, which keeps the old run as a.1" in again.said
        assert stopped.run.metrics_file.read_text() == before
    assert verb(tmp_path, "resume", str(stopped.run.folder)).code == 3
    anew = train_world(tmp_path, world_size, *SHORT, "trainer.resume=never")
    assert anew.codes == [0] * world_size, anew.said
    assert Run(tmp_path / "a.1").metrics_file.read_text() == before
    assert steps_logged(anew.run) == list(range(1, STEPS + 1))


def test_never_keeps_numbers_that_are_all_that_is_left(tmp_path: Path, stopped: Trained) -> None:
    shutil.rmtree(stopped.run.snapshots_folder)
    stopped.run.config_file.unlink()
    stopped.run.status_file.unlink()
    before = stopped.run.metrics_file.read_text()
    again = train_world(tmp_path, 1, *SHORT)
    assert again.codes == [3], again.said
    assert "run a has trained before, but" in again.said
    anew = train_world(tmp_path, 1, *SHORT, "trainer.resume=never", "trainer.steps=1")
    assert anew.codes == [0], anew.said
    assert Run(tmp_path / "a.1").metrics_file.read_text() == before


def test_a_run_that_saved_nothing_yet_starts_anew(
    tmp_path: Path, whole_runs: dict[int, Run]
) -> None:
    words = (
        *SHORT,
        "trainer.save.steps=99",
        "trainer.save.epochs=null",
        "trainer.evaluate.epochs=null",
    )
    killed = train_world(tmp_path, 1, *words, env=fault(0, 3, "KILL"))
    assert killed.codes == [-signal.SIGKILL], killed.said
    again = train_world(tmp_path, 1, *SHORT)
    assert again.codes == [0], again.said
    require_same(again.run, whole_runs[1])


def test_a_snapshot_by_its_path(
    tmp_path: Path, stopped: Trained, whole_runs: dict[int, Run]
) -> None:
    path = stopped.run.snapshots_folder / "step-000000005"
    other = train_world(tmp_path, 1, *SHORT, f"trainer.resume={path}", name="b")
    assert other.codes == [0], other.said
    assert steps_logged(other.run) == list(range(6, STEPS + 1))
    whole = metrics(whole_runs[1])
    assert metrics(other.run) == [line for line in whole if line["step"] > 5]
    assert differing(state_at(other.run, STEPS), state_at(whole_runs[1], STEPS)) == []


def test_the_best_snapshot_by_its_name(tmp_path: Path) -> None:
    first = train_world(tmp_path, 1, *SHORT)
    path = first.run.snapshots_folder / "best"
    name = path.readlink().name
    words = [word for word in SHORT if not word.startswith("trainer.epochs")]
    longer = (*words, "trainer.epochs=5", f"trainer.resume={path}")
    ended = train_world(tmp_path, 1, *longer, name="b")
    assert ended.codes == [0], ended.said
    assert f"resuming from {path.with_name(name)} after step {int(name[5:])}" in ended.said


def test_a_snapshot_by_its_path_with_another_rate(tmp_path: Path, stopped: Trained) -> None:
    path = stopped.run.snapshots_folder / "step-000000005"
    words = (*SHORT, "trainer.schedule=constant", "trainer.warmup_steps=0", "lr=0.5")
    other = train_world(tmp_path, 1, *words, f"trainer.resume={path}", name="b")
    assert other.codes == [0], other.said
    assert "note: experiment.lr=0.5, in the snapshot it was 0.02" in other.said
    assert {line["lr"] for line in metrics(other.run) if "lr" in line} == {0.5}


def test_a_snapshot_by_its_path_with_another_batch(tmp_path: Path, stopped: Trained) -> None:
    """Five samples of the second epoch are seen: no batch of seven begins there."""
    path = stopped.run.snapshots_folder / "step-000000005"
    words = (*SHORT, "trainer.batch_size=7", f"trainer.resume={path}")
    other = train_world(tmp_path, 1, *words, name="b")
    assert other.codes == [2]
    assert "note: trainer.batch_size=7, in the snapshot it was 5" in other.said
    assert f"trainer.batch_size=7, but {path} was saved after 5 of 17 samples" in other.said


def test_another_batch_from_the_end_of_an_epoch(tmp_path: Path, stopped: Trained) -> None:
    """Four steps were one epoch; two steps are, of the two that are left."""
    path = stopped.run.snapshots_folder / "step-000000004"
    plain = ("trainer.schedule=linear", "trainer.warmup_steps=0", "trainer.batch_size=9")
    words = (*SHORT, *plain, f"trainer.resume={path}")
    other = train_world(tmp_path, 1, *words, name="b", env=stop(0, 3))
    assert other.codes == [75], other.said
    resumed = verb(tmp_path, "resume", str(other.run.folder))
    assert resumed.code == 0, resumed.output
    assert [(line["step"], line["samples"]) for line in metrics(other.run) if "loss" in line] == [
        (5, 17 + 9),
        (6, 2 * 17),
        (7, 2 * 17 + 9),
        (8, 3 * 17),
    ]
    assert [line["step"] for line in metrics(other.run) if "eval_loss" in line] == [6, 8]
    rates = [line["lr"] / 0.02 for line in metrics(other.run) if "lr" in line]
    assert rates == pytest.approx([1 - step / 8 for step in (4, 5, 6, 7)])
    assert "finished 1 step in" in resumed.output
    assert "; the whole run: 8 steps in" in resumed.output


@pytest.mark.parametrize(
    ("less", "said"),
    [
        ("trainer.epochs=1", "nothing left to do: all 6 steps were already made"),
        ("trainer.steps=3", "nothing left to do: all 3 steps were already made"),
    ],
)
def test_less_than_was_made(tmp_path: Path, stopped: Trained, less: str, said: str) -> None:
    shorter = verb(tmp_path, "resume", str(stopped.run.folder), less)
    assert shorter.code == 0, shorter.output
    assert said in shorter.output
    assert snapshot_steps(stopped.run) == [4, 5, 6]


def test_returning_to_an_older_snapshot_of_the_same_run(tmp_path: Path, stopped: Trained) -> None:
    """What it saves from there on takes the place of what was saved before."""
    path = stopped.run.snapshots_folder / "step-000000004"
    plain = ("trainer.schedule=constant", "trainer.warmup_steps=0", "lr=0.5", "trainer.steps=6")
    words = (*SHORT, *plain, f"trainer.resume={path}")
    elsewhere = train_world(tmp_path, 1, *words, name="b")
    returned = train_world(tmp_path, 1, *words)
    assert returned.codes == elsewhere.codes == [0], returned.said
    assert metrics(returned.run)[-3:] == metrics(elsewhere.run)[-3:]
    for step in (5, 6):
        assert differing(state_at(returned.run, step), state_at(elsewhere.run, step)) == []


def test_no_snapshot_at_the_path(tmp_path: Path) -> None:
    ended = train_world(tmp_path, 1, *SHORT, f"trainer.resume={tmp_path / 'nowhere'}")
    assert ended.codes == [3]
    assert f"trainer.resume={tmp_path / 'nowhere'} is not a snapshot" in ended.said


def test_never_sets_the_old_run_aside(
    tmp_path: Path, stopped: Trained, whole_runs: dict[int, Run]
) -> None:
    before = metrics(stopped.run)
    anew = train_world(tmp_path, 1, *SHORT, "trainer.resume=never")
    assert anew.codes == [0], anew.said
    assert metrics(Run(tmp_path / "a.1")) == before
    assert snapshot_steps(Run(tmp_path / "a.1")) == [4, 5, 6]
    require_same(anew.run, whole_runs[1])
    train_world(tmp_path, 1, *SHORT, "trainer.resume=never", "trainer.steps=1")
    assert snapshot_steps(Run(tmp_path / "a.2")) == [10, 11, 12]


def test_a_run_that_began_with_never_is_resumed(tmp_path: Path, whole_runs: dict[int, Run]) -> None:
    words = (*SHORT, "trainer.resume=never")
    begun = train_world(tmp_path, 1, *words, env=stop(0, 6))
    assert begun.codes == [75], begun.said
    resumed = verb(tmp_path, "resume", str(begun.run.folder))
    assert resumed.code == 0, resumed.output
    assert not (tmp_path / "a.1").exists()
    require_same(begun.run, whole_runs[1])


# --- not this run's -----------------------------------------------------------------------------


def test_a_run_of_another_experiment(tmp_path: Path, stopped: Trained) -> None:
    before = stopped.run.config_file.read_text()
    ended = train_world(tmp_path, 1, *SHORT, experiment=toy_experiments.another)
    assert ended.codes == [2]
    assert "toy_experiments.py:regression', not of '" in ended.said
    assert "toy_experiments.py:another'" in ended.said
    assert "choose another run.name" in ended.said
    assert stopped.run.config_file.read_text() == before


@pytest.mark.parametrize("world_size", [1, 3])
def test_changed_numbers_are_named(
    tmp_path: Path, stopped: Trained, whole_runs: dict[int, Run], world_size: int
) -> None:
    changed = ("lr=0.3", "trainer.clip=2.0", "trainer.precision=bf16")
    ended = train_world(tmp_path, world_size, *SHORT, *changed)
    assert ended.codes == [2] * world_size
    assert "experiment.lr=0.3, but run a was trained with experiment.lr=0.02" in ended.said
    assert "trainer.clip=2.0, but run a was trained with trainer.clip=1.0" in ended.said
    assert "run a was trained with trainer.precision=float32" in ended.said
    assert "Traceback" not in ended.said
    # The refused command has not changed the run.
    resumed = verb(tmp_path, "resume", str(stopped.run.folder))
    assert resumed.code == 0, resumed.output
    require_same(stopped.run, whole_runs[1])


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_snapshot_of_another_model_names_the_keys(
    tmp_path: Path, stopped: Trained, world_size: int
) -> None:
    path = stopped.run.snapshots_folder / "step-000000006"
    words = (*SHORT, "hidden=9", f"trainer.resume={path}")
    ended = train_world(tmp_path, world_size, *words, name="b")
    assert ended.codes == [2] * world_size
    for text in (
        "'0.weight' is (8, 5) in the snapshot and (9, 5) in the model",
        "'3.weight' is (1, 8) in the snapshot and (1, 9) in the model",
    ):
        assert text in ended.said
    assert all("Traceback" not in rank.output for rank in ended.ranks)


# --- finished, and further ----------------------------------------------------------------------


def test_a_finished_run_typed_again_does_nothing(tmp_path: Path) -> None:
    done = train_world(tmp_path, 1, *SHORT)
    before, files = metrics(done.run), _files(done.run.snapshots_folder)
    again = train_world(tmp_path, 1, *SHORT)
    assert again.codes == [0]
    assert f"nothing left to do: all {STEPS} steps were already made" in again.said
    assert metrics(again.run) == before
    assert _files(again.run.snapshots_folder) == files


def _files(folder: Path) -> dict[str, bytes]:
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def test_more_epochs_for_a_finished_run(tmp_path: Path) -> None:
    plain = [word for word in SHORT if "schedule" not in word]  # cosine depends on the length
    done = train_world(tmp_path, 1, *plain)
    longer = verb(tmp_path, "resume", str(done.run.folder), "trainer.epochs=5")
    assert longer.code == 0, longer.output
    assert "resuming run a after step 12" in longer.output
    assert steps_logged(done.run) == list(range(1, 21))
    whole = train_world(tmp_path, 1, *plain, "trainer.epochs=5", name="whole")
    require_same(done.run, whole.run, steps=20)


def test_steps_after_the_snapshot_are_logged_once(tmp_path: Path, stopped: Trained) -> None:
    """Metrics run ahead of the snapshot a killed run goes on from, and half a line may be left."""
    shutil.rmtree(stopped.run.snapshots_folder / "step-000000006")
    with stopped.run.metrics_file.open("a") as file:
        file.write('{"step": 7, "lo')
    again = train_world(tmp_path, 1, *SHORT)
    assert again.codes == [0], again.said
    lines = stopped.run.metrics_file.read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines if '"loss"' in line] == list(
        range(1, STEPS + 1)
    )
    evaluated = [json.loads(line)["step"] for line in lines if '"eval_loss"' in line]
    assert evaluated == [4, 8, 12]


# --- what is restored ---------------------------------------------------------------------------


@pytest.mark.parametrize("optimizer", ["momentum", "adam"])
def test_the_optimizer_is_restored(tmp_path: Path, optimizer: str) -> None:
    """With a fresh one the first step after would already go elsewhere (promise B5)."""
    words = ("trainer.batch_size=5", f"optimizer={optimizer}", "trainer.save.steps=1")
    whole = train_world(tmp_path, 2, *words, name="whole")
    stopped = train_world(tmp_path, 2, *words, env=stop(1, 6))
    moments = state_at(stopped.run, 6)["optimizer"]["optimizer"]["state"]
    assert len(moments) == 4
    assert all(t.abs().sum() > 0 for state in moments.values() for t in state.values())
    again = train_world(tmp_path, 2, *words)
    assert again.codes == [0, 0], again.said
    require_same(again.run, whole.run)


def test_a_schedule_of_the_users_is_followed_and_restored(tmp_path: Path, traced: Path) -> None:
    words = ("trainer.batch_size=5", "schedule=step", "lr=0.08", "trainer.save.steps=1")
    expected = [0.08 * 0.5 ** (step // 2) for step in range(STEPS)]
    env = {"ECHELON_TEST_TRACE": str(traced)}
    whole = train_world(tmp_path, 1, *words, name="whole", env=env)
    assert whole.codes == [0], whole.said
    assert [line["lr"] for line in traced_lines(traced, "step")] == pytest.approx(expected)
    train_world(tmp_path, 1, *words, env=stop(0, 5))
    again = train_world(tmp_path, 1, *words)
    assert again.codes == [0], again.said
    require_same(again.run, whole.run)


def _settings(run: Run, step: int) -> dict[str, Any]:
    [settings] = state_at(run, step)["optimizer"]["optimizer"]["param_groups"]
    assert isinstance(settings, dict)
    return settings


PLAIN = ("trainer.batch_size=5", "trainer.save.steps=1", "trainer.keep_last=99")


@pytest.mark.parametrize("world_size", [1, 2])
def test_other_settings_of_the_optimizer_hold_from_a_path_on(
    tmp_path: Path, world_size: int
) -> None:
    done = train_world(tmp_path, world_size, *PLAIN, "trainer.steps=4")
    path = done.run.snapshots_folder / "step-000000004"
    words = (*PLAIN, "optimizer=less momentum", f"trainer.resume={path}")
    whole = train_world(tmp_path, world_size, *words, name="whole")
    assert "note: experiment.optimizer=less momentum" in whole.said
    assert (_settings(done.run, 4)["momentum"], _settings(whole.run, 5)["momentum"]) == (0.9, 0.5)
    again = train_world(tmp_path, world_size, *words, "trainer.steps=8", name="again")
    assert again.codes == [0] * world_size, again.said
    on = train_world(tmp_path, world_size, *words, "trainer.resume=auto", name="again")
    assert on.codes == [0] * world_size, on.said
    assert _settings(on.run, STEPS)["momentum"] == 0.5
    assert differing(state_at(on.run, STEPS), state_at(whole.run, STEPS)) == []


def test_what_a_schedule_cycles_goes_on_from_a_path(tmp_path: Path) -> None:
    words = (*PLAIN, "schedule=cycle", "lr=0.08")
    whole = train_world(tmp_path, 1, *words)
    assert whole.codes == [0], whole.said
    path = whole.run.snapshots_folder / "step-000000004"
    assert 0.85 < _settings(whole.run, 4)["momentum"] < 0.95
    same = train_world(tmp_path, 1, *words, f"trainer.resume={path}", name="b")
    assert differing(state_at(same.run, STEPS), state_at(whole.run, STEPS)) == []
    higher = train_world(tmp_path, 1, *words, "lr=0.16", f"trainer.resume={path}", name="c")
    assert higher.codes == [0], higher.said
    assert _settings(higher.run, 8)["lr"] == pytest.approx(2 * _settings(whole.run, 8)["lr"])
    assert _settings(higher.run, 8)["momentum"] == _settings(whole.run, 8)["momentum"]


def test_a_schedule_that_is_new_begins_with_the_experiments_rate(
    tmp_path: Path, traced: Path
) -> None:
    done = train_world(tmp_path, 1, *PLAIN, "trainer.steps=4", "trainer.schedule=linear")
    path = done.run.snapshots_folder / "step-000000004"
    words = (*PLAIN, "schedule=step", "lr=0.08", f"trainer.resume={path}")
    other = train_world(tmp_path, 1, *words, name="b", env={"ECHELON_TEST_TRACE": str(traced)})
    assert other.codes == [0], other.said
    rates = [line["lr"] for line in traced_lines(traced, "step")]
    assert rates == [0.08 * 0.5 ** (step // 2) for step in range(8)]


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_scaler_is_used_and_restored(tmp_path: Path, world_size: int) -> None:
    """A power of two rounds nothing, so the curve is that without; it grows every four steps."""
    words = ("trainer.batch_size=5", "trainer.save.steps=1", "trainer.clip=0.5", "dropout=0.3")
    plain = train_world(tmp_path, world_size, *words, name="plain")
    scaled = (*words, "scale=1024")
    whole = train_world(tmp_path, world_size, *scaled, name="whole")
    assert whole.codes == [0] * world_size, whole.said
    assert losses(whole.run) == losses(plain.run)
    assert state_at(whole.run, STEPS)["optimizer"]["scaler"]["scale"] == 1024 * 2**3
    stopped = train_world(tmp_path, world_size, *scaled, env=stop(0, 6))
    assert stopped.codes == [75] * world_size, stopped.said
    assert state_at(stopped.run, 6)["optimizer"]["scaler"]["_growth_tracker"] == 2
    again = train_world(tmp_path, world_size, *scaled)
    assert again.codes == [0] * world_size, again.said
    require_same(again.run, whole.run)


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_step_that_overflows_is_skipped_on_every_rank(tmp_path: Path, world_size: int) -> None:
    words = ("trainer.batch_size=5", "trainer.save.steps=1", "trainer.keep_last=99", "scale=3e38")
    trained = train_world(tmp_path, world_size, *words)
    assert trained.codes == [0] * world_size, trained.said
    scales = [state_at(trained.run, s)["optimizer"]["scaler"]["scale"] for s in range(1, STEPS + 1)]
    skipped = [s for s, (a, b) in enumerate(pairwise([3e38, *scales]), 1) if b < a]
    assert 1 in skipped
    assert len(skipped) < STEPS
    weights = [state_at(trained.run, step)["model"] for step in range(1, STEPS + 1)]
    still = [s for s, (a, b) in enumerate(pairwise(weights), 2) if not differing(a, b)]
    assert still == skipped[1:]


def test_two_schedules_are_one_too_many(tmp_path: Path) -> None:
    words = ("schedule=step", "trainer.schedule=cosine", "trainer.batch_size=5")
    ended = train_world(tmp_path, 1, *words)
    assert ended.codes == [2]
    assert "trainer.schedule=cosine" in ended.said
    assert "schedule of its own" in ended.said


@pytest.mark.parametrize(
    ("words", "factors"),
    [
        (["trainer.schedule=constant"], [1.0] * 8),
        (["trainer.schedule=linear"], [1 - k / 8 for k in range(8)]),
        (
            ["trainer.schedule=linear", "trainer.warmup_steps=2"],
            [1 / 3, 2 / 3, *(1 - k / 6 for k in range(6))],
        ),
        (
            ["trainer.schedule=cosine"],
            # 0.5 (1 + cos(π k / 8)), written out
            [1.0, 0.961940, 0.853553, 0.691342, 0.5, 0.308658, 0.146447, 0.038060],
        ),
        (["trainer.warmup_steps=3"], [0.25, 0.5, 0.75, *[1.0] * 5]),
    ],
)
def test_the_learning_rate(
    tmp_path: Path, traced: Path, words: list[str], factors: list[float]
) -> None:
    """As the optimizer had it at each of its steps, and as it was logged."""
    words = ["trainer.batch_size=5", "trainer.steps=8", "lr=0.04", *words]
    trained = train_world(tmp_path, 1, *words, env={"ECHELON_TEST_TRACE": str(traced)})
    assert trained.codes == [0], trained.said
    expected = pytest.approx([0.04 * factor for factor in factors], rel=1e-4)
    assert [line["lr"] for line in traced_lines(traced, "step")] == expected
    assert [line["lr"] for line in metrics(trained.run) if "loss" in line] == expected
