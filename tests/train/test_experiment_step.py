"""Experiments with a step of their own: several models and optimizers, the same numbers at any
world size and after any end."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import session_loops
import step_experiments
import torch
from toy_experiments import FEATURES
from worlds import (
    Trained,
    differing,
    losses,
    metrics,
    snapshot_steps,
    state_at,
    steps_logged,
    train_world,
)

import echelon
from echelon.errors import ExitCode, Fault
from echelon.experiment.step_checks import find_step_faults
from echelon.runs.status import read_run_status
from echelon.snapshot.layout import find_best

slow = pytest.mark.slow

BATCHES = ("trainer.batch_size=5", "trainer.epochs=3", "trainer.best=error")
"""17 samples: four steps an epoch, the last one of two samples, which three ranks share."""
STEPS = 12


def run_steps(
    folder: Path,
    world_size: int,
    *words: str,
    experiment: Callable[..., Any] = step_experiments.adversaries,
    name: str = "a",
    **env: str,
) -> Trained:
    return train_world(
        folder,
        world_size,
        *(words or BATCHES),
        name=name,
        experiment=experiment,
        env=env,
        end_together="KILL" in env.get("ECHELON_TEST_FAULT", ""),
    )


def require_close(a: Trained, b: Trained, step: int = STEPS) -> None:
    ours, theirs = (flatten(state_at(t.run, step)) for t in (a, b))
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():
        torch.testing.assert_close(value, theirs[name], rtol=1e-5, atol=1e-5, msg=name)


def flatten(tree: Any, path: str = "") -> dict[str, Any]:
    """The numbers of a snapshot by name, without those that are drawn from."""
    if isinstance(tree, dict):
        pairs = [(f"{path}/{k}", v) for k, v in tree.items() if k != "rng"]
    elif isinstance(tree, (list, tuple)):
        pairs = [(f"{path}/{i}", v) for i, v in enumerate(tree)]
    else:
        return {path: tree} if isinstance(tree, (torch.Tensor, int, float)) else {}
    return {name: value for p, v in pairs for name, value in flatten(v, p).items()}


def read_best(trained: Trained) -> str:
    best = find_best(trained.run.snapshots_folder)
    assert best is not None
    return best.name


@slow
def test_a_step_is_what_the_loop_over_a_session_is(tmp_path: Path) -> None:
    """To the bit, but for how parts are named: the same models in the same order."""
    for ours, theirs in (
        (step_experiments.adversaries, session_loops.adversaries),
        (step_experiments.sampled, session_loops.sampled),
    ):
        words = BATCHES[:2] if ours is step_experiments.sampled else BATCHES
        name = theirs.__name__
        stepped = run_steps(tmp_path, 2, *words, experiment=ours, name=f"stepped-{name}")
        looped = run_steps(tmp_path, 2, *BATCHES[:2], experiment=theirs, name=f"looped-{name}")
        assert stepped.codes == looped.codes == [0, 0], stepped.said + looped.said
        assert losses(stepped.run) == losses(looped.run)
        weights, parts = state_at(stepped.run, STEPS)["model"], state_at(looped.run, STEPS)
        found = [
            value for part in parts if part.startswith("model") for value in parts[part].values()
        ]
        assert differing(list(weights.values()), found) == []


@slow
def test_the_same_numbers_at_any_world_size(tmp_path: Path) -> None:
    ended = [
        run_steps(tmp_path, size, *BATCHES, "scheduled=true", name=f"of-{size}")
        for size in (1, 2, 3)
    ]
    for trained in ended:
        assert set(trained.codes) == {0}, trained.said
        assert losses(trained.run) == pytest.approx(losses(ended[0].run), rel=1e-5)
        require_close(trained, ended[0])
        assert read_best(trained) == read_best(ended[0])
    parts = state_at(ended[0].run, STEPS)
    assert {"model", "optimizer-makes", "optimizer-judges", "schedule-judge"} < parts.keys()
    assert parts["counter"] == {"steps": STEPS}
    rates = [line["lr"] for line in metrics(ended[0].run) if "lr" in line]
    assert rates == pytest.approx([0.05 * 0.9**n for n in range(1, STEPS + 1)])
    evaluated = [line["step"] for line in metrics(ended[0].run) if "eval_error" in line]
    assert evaluated == [4, 8, 12]
    assert read_run_status(ended[0].run).state == "finished"


@slow
@pytest.mark.parametrize("world_size", [1, 2])
def test_killed_it_goes_on_to_the_bit(world_size: int, tmp_path: Path) -> None:
    every = ("trainer.save.steps=1", "trainer.log_steps=5", "trainer.evaluate.steps=2")
    words = (*BATCHES, *every, "samples=20", "dropout=0.3", "batch_norm=true")
    run = partial(run_steps, experiment=step_experiments.regression)
    whole = run(tmp_path, world_size, *words, name="whole")
    assert set(whole.codes) == {0}, whole.said
    for step in (1, 6, 11):
        fault = f"{world_size - 1}:{step}:KILL"
        killed = run(tmp_path, world_size, *words, ECHELON_TEST_FAULT=fault)
        assert -9 in killed.codes
    resumed = run(tmp_path, world_size, *words)
    assert set(resumed.codes) == {0}, resumed.said
    assert metrics(resumed.run) == metrics(whole.run)
    assert differing(state_at(resumed.run, STEPS), state_at(whole.run, STEPS)) == []
    assert read_best(resumed) == read_best(whole)


@slow
def test_stopped_at_one_size_it_goes_on_at_others(tmp_path: Path) -> None:
    words = (*BATCHES, "scheduled=true", "trainer.save.steps=1")
    whole = run_steps(tmp_path, 1, *words, name="whole")
    for size, step, signal, code in (
        (1, 3, "TERM", ExitCode.PREEMPTED),
        (3, 5, "KILL", -9),
        (2, 9, "TERM", ExitCode.PREEMPTED),
    ):
        fault = f"{size - 1}:{step}:{signal}"
        stopped = run_steps(tmp_path, size, *words, ECHELON_TEST_FAULT=fault)
        assert code in stopped.codes, stopped.said
    ended = run_steps(tmp_path, 3, *words)
    assert set(ended.codes) == {0}, ended.said
    assert losses(ended.run) == pytest.approx(losses(whole.run), rel=1e-5)
    require_close(ended, whole)
    assert read_best(ended) == read_best(whole)


@slow
def test_an_evaluation_that_fails_costs_no_step(tmp_path: Path) -> None:
    """The step is saved before it is evaluated, and evaluated when the run continues."""
    words = (*BATCHES, "trainer.sanity_steps=0")
    failed = run_steps(tmp_path, 2, *words, ECHELON_TEST_EVALUATION_FAILS_AT="8")
    assert set(failed.codes) == {ExitCode.FAILED}, failed.said
    assert snapshot_steps(failed.run)[-1] == 8
    resumed, whole = (run_steps(tmp_path, 2, *words, name=name) for name in ("a", "whole"))
    assert set(resumed.codes) == {0}, resumed.said
    assert metrics(resumed.run) == metrics(whole.run)


@slow
def test_an_evaluation_that_fails_is_seen_before_the_first_step(tmp_path: Path) -> None:
    failed = run_steps(tmp_path, 1, *BATCHES, ECHELON_TEST_EVALUATION_FAILS_AT="0")
    assert failed.codes == [ExitCode.FAILED]
    assert "this was the check of the evaluation before the first step" in failed.said
    assert steps_logged(failed.run) == []


@slow
def test_it_ends_early_and_goes_on_with_more_patience(tmp_path: Path) -> None:
    words = (*BATCHES, "trainer.evaluate.steps=1", "best_after=4")
    for size in (1, 2):
        stops = (*words, "trainer.early_stop.patience=2")
        ended = run_steps(tmp_path, size, *stops, name=f"of-{size}")
        assert set(ended.codes) == {0}, ended.said
        assert "finished early after step 6 of 12: error was not better than 0" in ended.said
        assert read_run_status(ended.run).state == "finished"
        assert snapshot_steps(ended.run)[-1] == 6
        assert read_best(ended) == "step-000000004"
    longer = run_steps(tmp_path, 1, *words, "trainer.early_stop.patience=4", name="of-1")
    assert longer.codes == [0], longer.said
    assert snapshot_steps(longer.run)[-1] == 8


@slow
def test_a_longer_training_has_a_longer_schedule(tmp_path: Path) -> None:
    run = partial(run_steps, tmp_path, 1, experiment=step_experiments.cycled)
    shorter = run(*BATCHES, "trainer.epochs=1")
    assert shorter.codes == [0], shorter.said
    longer = run(*BATCHES)
    assert longer.codes == [0], longer.said
    rates = [line["lr"] for line in metrics(longer.run) if "lr" in line]
    assert len(rates) == STEPS
    assert rates[-1] < rates[5]


@slow
def test_steps_without_data(tmp_path: Path) -> None:
    for size in (1, 2):
        ended = run_steps(
            *(tmp_path, size, "trainer.steps=7"),
            experiment=step_experiments.policy,
            name=f"of-{size}",
        )
        assert set(ended.codes) == {0}, ended.said
        rewards = [line["reward"] for line in metrics(ended.run) if "reward" in line]
        assert rewards == [3.0, 4.0, 5.0, 6.0, 7.0]
        assert snapshot_steps(ended.run) == [7]


@slow
def test_without_data_the_steps_are_counted(tmp_path: Path) -> None:
    ended = run_steps(tmp_path, 1, "trainer.epochs=2", experiment=step_experiments.policy)
    assert ended.codes == [ExitCode.USAGE]
    assert "set trainer.steps, or give it train_data" in ended.said


@slow
def test_a_run_goes_on_as_it_was_begun(tmp_path: Path) -> None:
    run = partial(
        run_steps, tmp_path, 1, "trainer.save.steps=1", experiment=step_experiments.either
    )
    for first, then in (("", "yes"), ("yes", "")):
        begun = run("trainer.steps=2", name=f"a{first}", ECHELON_TEST_HAS_STEP=first)
        assert begun.codes == [0], begun.said
        ended = run("trainer.steps=4", name=f"a{first}", ECHELON_TEST_HAS_STEP=then)
        assert ended.codes == [ExitCode.USAGE], ended.said
        assert "train it as it was begun, or start anew: trainer.resume=never" in ended.said


@slow
def test_the_models_are_loaded_by_name(tmp_path: Path) -> None:
    trained = run_steps(tmp_path, 1, "trainer.epochs=1", "trainer.best=error")
    assert trained.codes == [0], trained.said
    models = echelon.load(str(trained.run.folder))
    assert isinstance(models, torch.nn.ModuleDict)
    assert list(models) == ["maker", "judge"]
    saved = state_at(trained.run, 1)["model"]
    assert differing(dict(models.state_dict()), saved) == []


@slow
@pytest.mark.parametrize(
    ("mistake", "said"),
    [
        ("nothing", "the experiment's step trained nothing in 3 steps"),
        ("no backward", "the experiment's step returned loss_a, but trained nothing in step 1"),
        ("no step", "the experiment's step has computed gradients in step 1, but stepped no"),
        ("stranger", "session.step is given SGD, which is no optimizer that the session has"),
        ("tensor", "the experiment's step returned Tensor in step 1"),
        ("text", "loss_a is no number: list, ['high'] (rank 0, step 1)"),
    ],
)
def test_a_mistake_in_a_step_is_a_sentence(mistake: str, said: str, tmp_path: Path) -> None:
    words = ("trainer.batch_size=8", "trainer.epochs=1", f"mistake='{mistake}'")
    ended = run_steps(tmp_path, 1, *words, experiment=step_experiments.mistaken)
    assert ended.codes == [ExitCode.USAGE], ended.said
    assert said in ended.said
    assert "  hint: " in ended.said
    assert "Traceback" not in ended.said


@slow
def test_evaluated_and_saved_by_the_clock(tmp_path: Path) -> None:
    words = ("trainer.batch_size=5", "trainer.best=error", "trainer.steps=3")
    timers = ("trainer.evaluate.minutes=1e-9", "trainer.save.minutes=1e-9")
    ended = run_steps(tmp_path, 2, *words, *timers, "trainer.keep_last=9")
    assert ended.codes == [0, 0], ended.said
    evaluated = [line["step"] for line in metrics(ended.run) if "eval_error" in line]
    assert evaluated == snapshot_steps(ended.run) == [1, 2, 3]


@slow
def test_settings_that_a_step_does_not_read(tmp_path: Path) -> None:
    words = {
        "trainer.clip=1.0": "session.step(optimizer, clip=…)",
        "replica.kind=fsdp": "shards are gathered in one",
        "replica.shards=2": "shards are gathered in one",
        "trainer.accumulate=2": "for each piece of a batch",
        "trainer.schedule=cosine": "give the experiment a schedule",
    }
    ended = run_steps(tmp_path, 2, *BATCHES, *words)
    assert ended.codes == [ExitCode.USAGE] * 2
    for setting, remedy in words.items():
        found = setting.replace("=true", "=True")
        assert f"{found} has no effect on an experiment with a step of its own" in ended.said
        assert remedy in ended.said


# --- what is seen without training ---


def make_experiment(**fields: Any) -> echelon.Experiment:
    model = torch.nn.Linear(FEATURES, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    given: dict[str, Any] = {
        "model": model,
        "optimizer": optimizer,
        "step": lambda batch, session: None,
    }
    return echelon.Experiment(**given | fields)


def make_foreign() -> torch.optim.Optimizer:
    return torch.optim.SGD(torch.nn.Linear(2, 2).parameters(), lr=0.1)


@pytest.mark.parametrize(
    ("fields", "faults"),
    [
        ({}, []),
        ({"step": lambda batch: None}, ["does not take a batch and a session"]),
        ({"step": 3}, ["does not take a batch and a session: it is of type int"]),
        (
            {"loss": torch.nn.functional.mse_loss},
            ["step of its own, so nothing uses its loss"],
        ),
        (
            {"predict": print, "count": "sum", "metrics": print, "scaler": 1},
            [f"nothing uses its {name}" for name in ("predict", "metrics", "count", "scaler")],
        ),
        ({"eval_data": [1]}, ["eval_data, but no evaluate"]),
        ({"model": {}}, ["the experiment's model is an empty dict"]),
        ({"model": {"a": 1}}, ["the model 'a' of the experiment is of type int"]),
        ({"model": {"a.b": torch.nn.Linear(1, 1)}}, ["model has the name 'a.b'"]),
        ({"model": {"keys": torch.nn.Linear(1, 1)}}, ["model has the name 'keys'"]),
        ({"optimizer": torch.optim.SGD}, ["the optimizer of the experiment is the class SGD"]),
        (
            {"optimizer": {"a": make_foreign()}},
            ["the optimizer 'a' trains 2 tensor(s), and none is a parameter of the model"],
        ),
        (
            {"schedule": {"a": torch.optim.lr_scheduler.StepLR(make_foreign(), 2), "b": 3}},
            ["the schedule 'a', a StepLR, sets the learning rate", "the schedule 'b' of the exp"],
        ),
        ({"sampler": 3, "state": {"a": 1}}, ["sampler is of type int", "state 'a' is of type int"]),
    ],
)
def test_faults_of_an_experiment_with_a_step(fields: dict[str, Any], faults: list[str]) -> None:
    found = list(find_step_faults(make_experiment(**fields)))
    assert all(isinstance(fault, Fault) and fault.do for fault in found)
    assert len(found) == len(faults), found
    for part in faults:
        assert any(part in fault.what for fault in found), (part, found)


@slow
@pytest.mark.parametrize(("ranks", "then"), [(2, 2), (1, 3)])
def test_the_average_of_the_weights_is_evaluated(ranks: int, then: int, tmp_path: Path) -> None:
    words = (*BATCHES, "trainer.save.steps=1", "trainer.ema=0.9")
    killed = run_steps(tmp_path, ranks, *words, ECHELON_TEST_FAULT="0:6:KILL")
    assert 0 not in killed.codes, killed.said
    resumed = run_steps(tmp_path, then, *words)
    whole = run_steps(tmp_path, ranks, *words, name="whole")
    bare = run_steps(tmp_path, ranks, *BATCHES, name="bare")
    for trained in (resumed, whole, bare):
        assert set(trained.codes) == {0}, trained.said
    require_close(resumed, whole)
    average = echelon.load_weights(whole.run.folder)
    weights = state_at(whole.run, STEPS)["model"]
    assert differing(weights, state_at(bare.run, STEPS)["model"]) == []
    assert differing(average, state_at(whole.run, STEPS)["trainer.ema"]) == []
    assert differing(average, weights) != []
    errors = [line["eval_error"] for line in metrics(whole.run) if "eval_error" in line]
    assert errors != [line["eval_error"] for line in metrics(bare.run) if "eval_error" in line]
