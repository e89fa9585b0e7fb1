"""An evaluation and state of the experiment's own, the average of weights, and an early end."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import toy_experiments
from torch import Tensor, nn
from toy_experiments import trace
from worlds import (
    differing,
    losses,
    metrics,
    snapshot_steps,
    state_at,
    steps_logged,
    traced_lines,
    train_world,
    verb,
)

import echelon
from echelon.config.schema import Config, EarlyStopConfig, ReplicaConfig, TrainerConfig
from echelon.config.validate import find_faults
from echelon.errors import EchelonError
from echelon.experiment.checks import find_part_faults
from echelon.runs.run_folder import Run
from echelon.snapshot.layout import find_best
from echelon.train.early_stop import EarlyStop
from echelon.train.own_evaluation import convert_to_totals, join_totals
from echelon.train.weight_average import WeightAverage

SHORT = ("trainer.batch_size=5", "trainer.epochs=3", "trainer.keep_last=99", "dropout=0.3")
"""Four steps per epoch."""


def read_evaluations(run: Run, name: str) -> dict[int, float]:
    return {line["step"]: line[name] for line in metrics(run) if name in line}


# --- evaluate ---


@dataclass
class Settings(toy_experiments.Settings):
    eval_samples: int = 7
    returns: str = "pairs"
    has_data: bool = True


def evaluated(cfg: Settings) -> echelon.Experiment:
    experiment = toy_experiments.regression(cfg)
    if not cfg.has_data:
        experiment.eval_data = None

    def evaluate(model: nn.Module, batches: Iterator[Any]) -> Any:
        assert not model.training
        assert not torch.is_grad_enabled()
        error, samples = torch.zeros(()), 0
        for _, x, y in batches:
            error += ((model(x) + model(-x).neg()).squeeze(-1) / 2 - y).abs().sum()
            samples += len(y)
        if cfg.returns == "numbers":
            return {"error": float(error) / max(1, samples), "loss": (error, samples)}
        if not cfg.has_data:
            return {"loss": (1.0 + toy_experiments.own_rank(), 1)}
        return {"loss": (error, samples), "largest_error": (error * 2, samples)}

    experiment.evaluate = evaluate
    return experiment


@pytest.mark.slow
def test_an_evaluation_of_ones_own_is_over_all_samples(tmp_path: Path) -> None:
    """With three ranks and four batches the shares are unequal; a mean of means would show it."""
    found = {}
    for ranks in (1, 2, 3):
        words = (*SHORT, "trainer.eval_batch_size=2", "trainer.epochs=0")
        ended = train_world(tmp_path, ranks, *words, name=f"of-{ranks}", experiment=evaluated)
        assert ended.codes == [0] * ranks, ended.said
        [found[ranks]] = metrics(ended.run)
    assert found[1]["eval_largest_error"] == pytest.approx(2 * found[1]["eval_loss"])
    for ranks in (2, 3):
        assert found[ranks] == pytest.approx(found[1], rel=1e-6)


@pytest.mark.slow
def test_it_decides_the_best_and_needs_no_data(tmp_path: Path) -> None:
    words = (*SHORT, "trainer.best=largest_error", "trainer.evaluate.steps=1")
    ended = train_world(tmp_path, 1, *words, experiment=evaluated)
    assert ended.codes == [0], ended.said
    values = read_evaluations(ended.run, "eval_largest_error")
    best = find_best(ended.run.snapshots_folder)
    assert best is not None
    assert best.name == f"step-{min(values, key=lambda step: values[step]):09d}"
    empty = train_world(tmp_path, 2, *SHORT, "has_data=false", name="b", experiment=evaluated)
    assert empty.codes == [0, 0], empty.said
    assert set(read_evaluations(empty.run, "eval_loss").values()) == {1.5}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("returns=numbers",), "{'error': (total, count)}"),
        (("trainer.best=accuracy",), "trainer.best=accuracy, but no such number is evaluated"),
        (("trainer.best=curious",), "neither function nor the name says"),
        (("replica.kind=fsdp",), "the experiment has an evaluate of its own, but with"),
    ],
)
def test_what_it_cannot_give_costs_no_step(
    tmp_path: Path, words: tuple[str, ...], said: str
) -> None:
    ended = train_world(tmp_path, 2, *SHORT, *words, experiment=evaluated)
    assert ended.codes == [2, 2], ended.said
    assert said in ended.said
    assert "Traceback" not in ended.said
    assert metrics(ended.run) == []


@pytest.mark.parametrize("returned", [None, {}, 0.5, {"a": 0.5}, {"a": (1, 2, 3)}, {"a": "ab"}])
def test_what_is_no_sum_with_a_count_is_refused(returned: Any) -> None:
    with pytest.raises(EchelonError, match="the experiment's evaluate returned"):
        convert_to_totals(returned)


def test_sums_and_counts_are_joined() -> None:
    one = convert_to_totals({"a": (torch.tensor(3.0), torch.tensor(4)), "b": [1, 1]})
    two = convert_to_totals({"a": (1, 1), "b": (0.0, 0)})
    assert join_totals([one, two]) == {"a": 0.8, "b": 1.0}
    with pytest.raises(EchelonError, match="returned a on rank 1, but a, b on rank 0"):
        join_totals([one, {"a": [1.0, 1.0]}])
    with pytest.raises(EchelonError, match="over 0 samples on every rank"):
        join_totals([{"a": [0.0, 0.0]}])


# --- state ---


class Memory:
    """What was seen so far: a buffer of tensors and a count, as a replay buffer has."""

    def __init__(self, is_of_rank: bool) -> None:
        self.is_of_rank = is_of_rank
        self.rows: list[Tensor] = []
        self.count = 0

    def add_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        self.count += 1 + toy_experiments.own_rank() * self.is_of_rank
        weight = optimizer.param_groups[0]["params"][0]
        self.rows = [*self.rows[-2:], weight.detach().flatten()[:2].clone()]

    def state_dict(self) -> dict[str, Any]:
        return {"rows": list(self.rows), "count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.rows, self.count = list(state["rows"]), state["count"]
        trace(count=self.count, rows=[row.tolist() for row in self.rows])


@dataclass
class MemorySettings(toy_experiments.Settings):
    name: str = "replay"
    is_of_rank: bool = False


def remembering(cfg: MemorySettings) -> echelon.Experiment:
    experiment = toy_experiments.regression(cfg)
    memory = Memory(cfg.is_of_rank)
    experiment.optimizer.register_step_post_hook(memory.add_step)
    experiment.state = {os.environ.get("ECHELON_TEST_NAME", cfg.name): memory}
    return experiment


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "then"), [(1, 1), (2, 2), (1, 3), (3, 2)])
def test_state_is_saved_and_restored_on_every_rank(
    tmp_path: Path, traced: Path, ranks: int, then: int
) -> None:
    words = (*SHORT, "trainer.save.steps=1")
    env = {"ECHELON_TEST_FAULT": f"{ranks - 1}:6:KILL"}
    killed = train_world(
        tmp_path, ranks, *words, experiment=remembering, env=env, end_together=True
    )
    assert killed.codes[-1] == -signal.SIGKILL, killed.said
    step = snapshot_steps(killed.run)[-1]
    saved = state_at(killed.run, step)["state"]["replay"]
    assert (saved["count"], len(saved["rows"])) == (step, min(step, 3))
    env = {"ECHELON_TEST_TRACE": str(traced)}
    again = train_world(tmp_path, then, *words, experiment=remembering, env=env)
    assert again.codes == [0] * then, again.said
    lines = traced_lines(traced, "count")
    assert sorted(line["rank"] for line in lines) == list(range(then))
    assert {line["count"] for line in lines} == {step}
    assert all(line["rows"] == [row.tolist() for row in saved["rows"]] for line in lines)
    assert state_at(again.run, 12)["state"]["replay"]["count"] == 12
    if ranks == then:
        whole = train_world(tmp_path, ranks, *words, name="whole", experiment=remembering)
        assert differing(state_at(again.run, 12), state_at(whole.run, 12)) == []


@pytest.mark.slow
def test_state_that_differs_between_ranks_is_refused(tmp_path: Path) -> None:
    ended = train_world(tmp_path, 2, *SHORT, "is_of_rank=true", experiment=remembering)
    assert ended.codes == [1, 1], ended.said
    assert "the experiment's state 'replay' differs between the ranks" in ended.said
    assert "Traceback" not in ended.said


@pytest.mark.slow
def test_state_that_was_renamed_is_named(tmp_path: Path) -> None:
    words = (*SHORT, "trainer.steps=2")
    assert train_world(tmp_path, 1, *words, experiment=remembering).codes == [0]
    env = {"ECHELON_TEST_NAME": "replays"}
    ended = train_world(tmp_path, 1, *SHORT, experiment=remembering, env=env)
    assert ended.codes == [2], ended.said
    assert "the snapshot has no state 'replays', which the experiment has now" in ended.said
    assert "the snapshot has state 'replay', which the experiment no longer has" in ended.said


def test_parts_of_a_wrong_kind_are_all_named() -> None:
    model = nn.Linear(1, 1)
    experiment = echelon.Experiment(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        nn.functional.mse_loss,
        (torch.zeros(1, 1), torch.zeros(1, 1)),
        metrics={},
        evaluate=lambda model: {},  # type: ignore[arg-type, misc]
        state={"a": 5, "trainer.ema": model},
    )
    found = [fault.what for fault in find_part_faults(experiment)]
    assert len(found) == 4
    assert "evaluate does not take a model and batches" in found[0]
    assert "metrics and an evaluate of its own" in found[1]
    assert "the experiment's state 'a' is of type int" in found[2]
    assert "a part named 'trainer.ema'" in found[3]


# --- the average of the weights ---


def plain(cfg: toy_experiments.Settings) -> echelon.Experiment:
    return toy_experiments.regression(cfg)


@pytest.mark.slow
def test_the_average_is_evaluated_saved_and_loaded(tmp_path: Path) -> None:
    words = (*SHORT, "eval_samples=7", "trainer.save.steps=1", "lr=0.05", "dropout=0")
    ended = train_world(tmp_path, 1, *words, "trainer.ema=0.5", experiment=plain)
    bare = train_world(tmp_path, 1, *words, name="bare", experiment=plain)
    assert ended.codes == bare.codes == [0], ended.said
    assert losses(ended.run) == losses(bare.run), "the training itself is the same"
    weights = [state_at(ended.run, step)["model"] for step in range(1, 13)]
    torch.manual_seed(0)
    expected = toy_experiments.regression(toy_experiments.Settings()).model.state_dict()
    for state in weights:
        expected = {key: torch.lerp(expected[key], state[key], 0.5) for key in expected}
    average = state_at(ended.run, 12)["state"]["trainer.ema"]
    loaded = echelon.load(ended.run.folder, "latest")
    alone = echelon.load_weights(ended.run.snapshots_folder / "step-000000012")
    for key, value in expected.items():
        torch.testing.assert_close(average[key], value)
        assert torch.equal(loaded.state_dict()[key], average[key])
        assert torch.equal(alone[key], average[key])
    _, x, y = toy_experiments._data(7, seed=2)
    with torch.no_grad():
        error = nn.functional.mse_loss(loaded(x).squeeze(-1), y)
    assert read_evaluations(ended.run, "eval_loss")[12] == pytest.approx(float(error), rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "then"), [(2, 2), (1, 3)])
def test_the_average_goes_on_where_it_was(tmp_path: Path, ranks: int, then: int) -> None:
    words = (*SHORT, "eval_samples=7", "trainer.save.steps=1", "trainer.ema=0.9", "dropout=0")
    env = {"ECHELON_TEST_FAULT": "0:6:KILL"}
    killed = train_world(tmp_path, ranks, *words, experiment=plain, env=env, end_together=True)
    assert killed.codes[0] == -signal.SIGKILL, killed.said
    again = train_world(tmp_path, then, *words, experiment=plain)
    assert again.codes == [0] * then, again.said
    whole = train_world(tmp_path, ranks, *words, name="whole", experiment=plain)
    states = [state_at(run, 12)["state"]["trainer.ema"] for run in (again.run, whole.run)]
    if ranks == then:
        assert differing(*states) == []
    for key, value in states[1].items():
        torch.testing.assert_close(states[0][key], value)


def test_weights_that_layers_share_have_one_average() -> None:
    first, second = nn.Linear(2, 2), nn.Linear(2, 2)
    second.weight = first.weight
    average = WeightAverage(nn.Sequential(first, second), 0.5)
    average.begin()
    before = first.weight.detach().clone()
    with torch.no_grad():
        first.weight.add_(1.0)
    average.update()
    state = average.state_dict()
    assert state.keys() == {"0.weight", "0.bias", "1.weight", "1.bias"}
    torch.testing.assert_close(state["1.weight"], before + 0.5)
    with average.use_averages():
        torch.testing.assert_close(second.weight.detach(), before + 0.5)
    torch.testing.assert_close(second.weight.detach(), before + 1)


# --- an early end ---


@pytest.mark.slow
def test_a_run_that_gets_no_better_is_finished(tmp_path: Path) -> None:
    """With a rate of 0 no evaluation is better than the first, at step 2."""
    words = (*SHORT, "eval_samples=7", "lr=0", "trainer.evaluate.steps=2")
    stops = ("trainer.evaluate.epochs=null", "trainer.early_stop.patience=2")
    ended = train_world(tmp_path, 2, *words, *stops, experiment=plain)
    assert ended.codes == [0, 0], ended.said
    assert "finished early after step 6 of 12: loss was not better than" in ended.said
    assert steps_logged(ended.run) == list(range(1, 7))
    assert snapshot_steps(ended.run) == [2, 4, 6]
    assert ended.run.read_status_file()["state"] == "finished"
    again = train_world(tmp_path, 2, *words, *stops, experiment=plain)
    assert again.codes == [0, 0], again.said
    assert steps_logged(ended.run) == list(range(1, 7)), "it stays finished"
    longer = verb(tmp_path, "resume", str(ended.run.folder), "trainer.early_stop.patience=4")
    assert longer.code == 0, longer.output
    assert steps_logged(ended.run) == list(range(1, 11))
    assert list(read_evaluations(ended.run, "eval_loss")) == [2, 4, 6, 8, 10]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("eval_samples=0",), "trainer.early_stop.patience=1, but the experiment has no eval_data"),
        (("trainer.early_stop.metric=los",), "trainer.early_stop.metric=los, but no such number"),
        (
            ("metrics=true", "trainer.early_stop.metric=mae_0"),  # known when it was evaluated
            "trainer.early_stop.metric=mae_0, but no such number",
        ),
    ],
)
def test_an_early_end_by_what_is_not_evaluated(
    tmp_path: Path, words: tuple[str, ...], said: str
) -> None:
    common = (*SHORT, "eval_samples=7", "trainer.early_stop.patience=1")
    ended = train_world(tmp_path, 1, *common, *words, experiment=plain)
    assert ended.codes == [2], ended.said
    assert said in ended.said
    assert metrics(ended.run) == []


def test_settings_that_cannot_hold_are_all_named() -> None:
    trainer = TrainerConfig(ema=1.0, early_stop=EarlyStopConfig(patience=0))
    config = Config(trainer=trainer, replica=ReplicaConfig(kind="fsdp"))
    found = [fault.what for fault in find_faults(config)]
    assert "trainer.early_stop.patience=0 is below 1" in found
    assert "trainer.ema=1.0 is not between 0 and 1" in found
    assert any(what.startswith("trainer.ema=1.0, but replica.kind=fsdp") for what in found)


def test_an_average_is_a_setting_that_changes_numbers() -> None:
    bare, averaged = Config(), Config(trainer=TrainerConfig(ema=0.9))
    assert bare.compute_numerics_fingerprint() != averaged.compute_numerics_fingerprint()
    assert "trainer.ema" not in bare.select_numerics_settings(), "as in snapshots of before"


def test_what_is_counted() -> None:
    stop = EarlyStop("score", "max", patience=2)
    for value, is_reached in ((1.0, False), (0.5, False), (2.0, False), (2.0, False)):
        stop.record_results({"score": value})
        assert stop.is_reached is is_reached
    again = EarlyStop("score", "max", patience=2)
    again.load_state_dict(stop.state_dict())
    again.record_results({"score": float("nan")})
    assert again.is_reached
    assert again.describe() == "score was not better than 2 in the last 2 evaluations"
    other = EarlyStop("loss", "min", patience=1)
    other.load_state_dict(stop.state_dict())
    assert not other.is_reached
