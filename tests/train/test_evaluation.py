"""An evaluation loses nothing when it fails, leaves no trace, and takes any metric."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torchmetrics
import toy_experiments
from torch import Tensor, nn
from torchmetrics.wrappers import ClasswiseWrapper, MinMaxMetric
from worlds import Trained, differing, metrics, snapshot_steps, state_at, train_world

import echelon
from echelon.parallel.packed_tree import UnpackableValueError, pack_tree, unpack_tree
from echelon.runs.run_folder import Run
from echelon.snapshot.layout import find_best
from echelon.snapshot.reader import verify_snapshot
from echelon.train.evaluate import can_merge_states

SHORT = (
    "trainer.batch_size=5",  # four steps per epoch
    "trainer.epochs=3",
    "trainer.keep_last=99",
    "eval_samples=7",
    "trainer.eval_batch_size=2",
    "dropout=0.3",
    "lr=0.05",
)


# --- an evaluation that fails ---


class Fragile(torchmetrics.MeanMetric):
    """Ends the rank ECHELON_TEST_EVALUATION="RANK:STEP:raise|KILL" names, at its evaluation after
    this step."""

    step = 0

    def update(self, output: Tensor, target: Tensor) -> None:  # type: ignore[override]
        rank, step, how = os.environ.get("ECHELON_TEST_EVALUATION", "-1:0:").split(":")
        if toy_experiments.own_rank() == int(rank) and Fragile.step == int(step):
            if how == "KILL":
                os.kill(os.getpid(), signal.SIGKILL)
            raise ValueError("this metric has met a sample that it does not like")
        super().update(output - target)


def fragile(cfg: toy_experiments.Settings) -> echelon.Experiment:
    experiment = toy_experiments.regression(cfg)

    def count_step(*_: Any) -> None:
        Fragile.step += 1

    experiment.optimizer.register_step_post_hook(count_step)
    experiment.metrics = {"difference": Fragile()}
    return experiment


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Run]:
    """The run whose evaluations all pass, by world size."""
    folder = tmp_path_factory.mktemp("whole")
    found = {}
    for ranks in (1, 3):
        ended = train_world(folder, ranks, *SHORT, name=f"whole-{ranks}", experiment=fragile)
        assert ended.codes == [0] * ranks, ended.said
        found[ranks] = ended.run
    return found


def train_fragile(folder: Path, ranks: int, evaluation: str = "", *words: str) -> Trained:
    env = {"ECHELON_TEST_EVALUATION": evaluation} if evaluation else {}
    is_killed = evaluation.endswith("KILL")  # a rank that raises tells the others itself
    return train_world(
        folder, ranks, *SHORT, *words, experiment=fragile, env=env, end_together=is_killed
    )


def require_equal(run: Run, whole: Run) -> None:
    """The same lines, each once, the same states, and the same word on them."""
    assert metrics(run) == metrics(whole)
    assert snapshot_steps(run) == snapshot_steps(whole) == [4, 8, 12]
    for step in snapshot_steps(whole):
        assert differing(state_at(run, step), state_at(whole, step)) == []
        infos = [
            verify_snapshot(r.snapshots_folder / f"step-{step:09d}").info for r in (run, whole)
        ]
        for key in ("best", "results", "evaluated_step", "evaluation_left", "losses"):
            assert infos[0][key] == infos[1][key]
    bests = [find_best(r.snapshots_folder) for r in (run, whole)]
    assert bests[0] is not None
    assert bests[1] is not None
    assert bests[0].name == bests[1].name


@pytest.mark.slow
@pytest.mark.parametrize("how", ["raise", "KILL"])
@pytest.mark.parametrize(("ranks", "rank", "step"), [(1, 0, 4), (3, 0, 8), (3, 2, 12)])
def test_an_evaluation_that_fails_loses_no_step(
    tmp_path: Path, whole: dict[int, Run], ranks: int, rank: int, step: int, how: str
) -> None:
    failed = train_fragile(tmp_path, ranks, f"{rank}:{step}:{how}")
    assert failed.codes[rank] == (1 if how == "raise" else -signal.SIGKILL), failed.said
    assert snapshot_steps(failed.run)[-1] == step
    again = train_fragile(tmp_path, ranks)
    assert again.codes == [0] * ranks, again.said
    assert f"resuming run a after step {step}" in again.said
    assert f"evaluated after step {step}: " in again.said
    require_equal(again.run, whole[ranks])


@pytest.mark.slow
def test_shards_are_saved_before_their_evaluation(tmp_path: Path) -> None:
    failed = train_fragile(tmp_path, 2, "1:8:KILL", "replica.kind=fsdp")
    assert failed.codes[1] == -signal.SIGKILL, failed.said
    assert snapshot_steps(failed.run) == [4, 8]
    again = train_fragile(tmp_path, 2, "", "replica.kind=fsdp")
    assert again.codes == [0, 0], again.said
    whole = train_world(tmp_path, 2, *SHORT, "replica.kind=fsdp", name="whole", experiment=fragile)
    require_equal(again.run, whole.run)


@pytest.mark.slow
def test_killed_before_the_snapshot_knows_of_its_evaluation(
    tmp_path: Path, whole: dict[int, Run]
) -> None:
    """Its line is in metrics.jsonl already, and stands there once in the end."""
    failed = train_fragile(tmp_path, 1, "0:8:raise")
    with failed.run.metrics_file.open("a") as file:
        file.write(json.dumps({"step": 8, "epoch": 2, "eval_loss": 0.5, "eval_difference": 1.0}))
        file.write("\n")
    assert train_fragile(tmp_path, 1).codes == [0]
    require_equal(failed.run, whole[1])


@pytest.mark.slow
def test_a_snapshot_that_was_evaluated_is_not_evaluated_again(
    tmp_path: Path, whole: dict[int, Run]
) -> None:
    """Its random numbers are those of before the evaluation, as are those of the run itself."""
    first = train_world(tmp_path, 1, *SHORT, "trainer.steps=8", experiment=restless)
    assert first.codes == [0], first.said
    again = train_world(tmp_path, 1, *SHORT, experiment=restless)
    assert "evaluated after step 8: " not in again.said
    at_once = train_world(tmp_path, 1, *SHORT, name="at-once", experiment=restless)
    assert at_once.codes == again.codes == [0], again.said
    assert metrics(again.run) == metrics(at_once.run)
    assert differing(state_at(again.run, 12), state_at(at_once.run, 12)) == []


class Restless(nn.Module):
    """Draws random numbers and changes a buffer in eval mode too."""

    calls: Tensor

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.register_buffer("calls", torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        noisy: Tensor = self.model(x) + torch.rand(()) * 1e-2
        return noisy


def restless(cfg: toy_experiments.Settings) -> echelon.Experiment:
    experiment = toy_experiments.regression(cfg)
    experiment.model = Restless(experiment.model)
    return experiment


# --- metrics of every kind ---


class Detections(torchmetrics.Metric):
    """Keeps boxes as mean average precision does: lists of tensors of unequal sizes, which are
    not joined, updated with lists of dicts."""

    full_state_update = True
    boxes: list[Tensor]
    labels: list[Tensor]

    def __init__(self) -> None:
        super().__init__()
        self.add_state("boxes", default=[], dist_reduce_fx=None)
        self.add_state("labels", default=[], dist_reduce_fx=None)

    def update(self, output: Any, target: Any) -> None:
        assert [found["name"] for found in output] == [f"{len(f['boxes'])} boxes" for f in output]
        self.boxes += [found["boxes"] for found in output]
        self.labels += [wanted["labels"] for wanted in target]

    def compute(self) -> dict[str, Any]:
        areas = [boxes.prod(1).sum() * (i + 1) for i, boxes in enumerate(self.boxes)]
        joined = torch.cat(self.labels)
        return {"map": torch.stack(areas).sum(), "per_class": joined.bincount(minlength=3)}


class MergedDetections(Detections):
    """The same; its states are merged after each batch."""

    full_state_update = False


class MeanOfBatches(torchmetrics.Metric):
    """Has a state that torchmetrics averages over processes, which is no mean over samples."""

    full_state_update = False
    mean: Tensor
    count: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.add_state("mean", default=torch.tensor(0.0), dist_reduce_fx="mean")
        self.add_state("count", default=torch.tensor(0), dist_reduce_fx="sum")

    def update(self, output: Any, target: Any) -> None:
        values = torch.stack([found["boxes"].sum() for found in output])
        total = self.count + len(values)
        self.mean = (self.mean * self.count + values.sum()) / total
        self.count = total

    def compute(self) -> Tensor:
        return self.mean


class Share(torchmetrics.MeanMetric):
    def update(self, output: Any, target: Any) -> None:  # type: ignore[override]
        for found in output:
            super().update(found["boxes"].sum())


class Shares(torchmetrics.Metric):
    full_state_update = False
    sums: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.add_state("sums", default=torch.zeros(2), dist_reduce_fx="sum")

    def update(self, output: Any, target: Any) -> None:
        for found in output:
            self.sums = self.sums + found["boxes"].sum(0)[:2]

    def compute(self) -> Tensor:
        return self.sums


@dataclass
class DetectionSettings:
    odd: bool = False


def detection(cfg: DetectionSettings) -> echelon.Experiment:
    model = nn.Linear(4, 4)
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(11, 4, generator=generator)

    def predict(model: nn.Module, batch: Any) -> tuple[Any, Any]:
        numbers, x = batch
        rows = model(x)
        output = [
            {"boxes": row.expand(n % 3, 4), "name": f"{n % 3} boxes", "odd": object()}
            for row, n in zip(rows, numbers.tolist(), strict=True)
        ]
        if not cfg.odd:
            output = [{k: v for k, v in found.items() if k != "odd"} for found in output]
        return output, [{"labels": torch.arange(n % 4) % 3} for n in numbers.tolist()]

    def loss(output: Any, target: Any) -> Tensor:
        return torch.stack([found["boxes"].sum() for found in output]).mean()

    return echelon.Experiment(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.01),
        loss=loss,
        train_data=(torch.arange(11), x),
        eval_data=(torch.arange(11), x),
        metrics={
            "detections": Detections(),
            "merged": MergedDetections(),
            "mean": MeanOfBatches(),
            "range": MinMaxMetric(Share()),
            "shares": ClasswiseWrapper(Shares()),
            "sum": Share() + Share(),
        },
        predict=predict,
    )


@pytest.mark.slow
def test_any_metric_gives_the_same_at_any_world_size(tmp_path: Path) -> None:
    words = ("trainer.epochs=0", "trainer.eval_batch_size=2")
    found = {}
    for ranks in (1, 2, 3):
        ended = train_world(tmp_path, ranks, *words, name=f"of-{ranks}", experiment=detection)
        assert ended.codes == [0] * ranks, ended.said
        [found[ranks]] = metrics(ended.run)
    assert found[1] == found[2] == found[3]
    assert found[1].keys() == {
        "step",
        "epoch",
        "eval_loss",
        *(f"eval_{name}_map" for name in ("detections", "merged")),
        *(f"eval_{name}_per_class_{i}" for name in ("detections", "merged") for i in range(3)),
        "eval_mean",
        *(f"eval_range_{key}" for key in ("raw", "min", "max")),
        *(f"eval_shares_shares_{i}" for i in range(2)),
        "eval_sum",
    }
    assert found[1]["eval_detections_map"] == found[1]["eval_merged_map"]
    assert found[1]["eval_mean"] == pytest.approx(found[1]["eval_loss"], rel=1e-5)
    assert found[1]["eval_detections_per_class_0"] == sum((n % 4) > 0 for n in range(11))


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_an_output_that_cannot_be_sent_is_named_before_the_first_step(
    tmp_path: Path, ranks: int
) -> None:
    ended = train_world(tmp_path, ranks, "odd=true", experiment=detection)
    assert ended.codes == [2] * ranks, ended.said
    assert "but these hold a builtins.object" in ended.said
    assert "let predict return tensors, numbers and texts" in ended.said
    assert "Traceback" not in ended.said


@pytest.mark.parametrize(
    ("metric", "can_merge"),
    [
        (torchmetrics.MeanAbsoluteError(), True),
        (MergedDetections(), True),
        (Detections(), False),
        (torchmetrics.PearsonCorrCoef(), False),
        (MeanOfBatches(), False),
        (MinMaxMetric(Share()), False),
        (Share() + Share(), False),
    ],
    ids=lambda value: type(value).__name__,
)
def test_only_sums_extremes_and_lists_are_merged(
    metric: torchmetrics.Metric, can_merge: bool
) -> None:
    assert can_merge_states(metric) is can_merge


# --- what is sent between ranks ---


def test_a_tree_comes_back_as_it_was() -> None:
    tree: Mapping[Any, Any] = {
        "list": [1, 2.5, None, True, "ü", float("inf")],
        "tuple": (torch.tensor(3, dtype=torch.int16), torch.empty(0, 4)),
        5: {"half": torch.randn(2, 3).bfloat16(), "flags": torch.tensor([True, False])},
        "complex": torch.tensor([1 + 2j]).conj(),
        "slice": torch.arange(12).reshape(3, 4)[:, 1],
    }
    assert differing(unpack_tree(pack_tree(tree)), tree) == []


@pytest.mark.parametrize("value", [{1}, b"bytes", object(), os.terminal_size((1, 2))])
def test_a_value_of_another_type_is_named(value: Any) -> None:
    with pytest.raises(UnpackableValueError, match=type(value).__name__):
        pack_tree({"a": [value]})
