"""What is said of a run's speed: the split of sampled steps, MFU, who is behind, and profiles."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from echelon.data.batches import Batch
from echelon.errors import EchelonError
from echelon.experiment.definition import Experiment
from echelon.monitoring.flops import FlopsCounter, get_peak_flops
from echelon.monitoring.profiler import (
    WARMUP_STEPS,
    StepProfiler,
    create_profiler,
    render_costliest_operators,
)
from echelon.monitoring.speed import SpeedMonitor, StepTimestamps
from echelon.monitoring.stragglers import OwnTime, StragglerDetector
from echelon.recipes.transformer import (
    Transformer,
    compute_token_loss,
    experiment,
    predict_next_tokens,
)

CPU = torch.device("cpu")
BATCHES = [Batch((torch.ones(2),), 2)] * 40


class Stepper:
    """Passes the borders of a step as a replica does."""

    def __init__(self) -> None:
        self.step_timer: StepTimestamps | None = None
        self.seen = 0

    def step(self) -> None:
        if self.step_timer is not None:
            self.seen += 1
            self.step_timer.record("reduced")
            self.step_timer.record("stepped")


# --- the split ---


@pytest.mark.parametrize("turns", [2, 3, 8])
def test_the_wait_for_batches_that_are_late_in_turns_is_that_of_all(
    monkeypatch: pytest.MonkeyPatch, turns: int
) -> None:
    """As with loader processes that end their batches together: one is waited for, the others are
    there."""
    clock = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: clock[0])

    def load() -> Iterator[Batch]:
        for number in range(4000):
            clock[0] += 0.004 * turns if number % turns == 0 else 0.0
            yield BATCHES[0]

    speed, replica = SpeedMonitor([CPU]), Stepper()
    splits = []
    for number, _ in enumerate(speed.sample_batches(load(), replica)):
        clock[0] += 0.001
        replica.step()
        if number % 10 == 9:
            splits.append(speed.measure_interval(number, number).get("data_ms"))
    waits = [split for split in splits[2:] if split is not None]
    assert len(waits) > 10
    assert sum(waits) / len(waits) == pytest.approx(4.0, rel=0.1)


def test_some_steps_are_sampled_and_every_batch_comes_through() -> None:
    speed, replica = SpeedMonitor([CPU]), Stepper()
    came = []
    for batch in speed.sample_batches(iter(BATCHES), replica):
        replica.step()
        came.append(batch)
    assert came == BATCHES
    assert 1 <= replica.seen < 37, "never the first three, and seldom such short ones"
    line = speed.measure_interval(40, 80)
    assert line.keys() == {
        *("samples_per_s", "step_ms", "data_ms", "compute_ms", "optimizer_ms", "memory_gb"),
    }
    assert all(value >= 0 for value in line.values())
    assert line["samples_per_s"] * line["step_ms"] == pytest.approx(2000, rel=0.1)


def test_a_line_has_what_was_measured_since_the_last() -> None:
    speed = SpeedMonitor([CPU])
    speed.measure_interval(1, 2)
    assert speed.measure_interval(2, 4).keys() == {"samples_per_s", "step_ms"}


def test_what_was_no_training_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr("echelon.monitoring.speed.time.monotonic", lambda: clock.now)
    speed = SpeedMonitor([CPU])
    clock.now = 5.0
    speed.exclude_time(4.0)
    assert speed.measure_interval(10, 20)["samples_per_s"] == 20
    assert speed.measure_interval(10, 20)["step_ms"] == 0


def test_a_step_without_borders_within_is_not_split() -> None:
    """As one that is captured as a CUDA graph."""
    moments = StepTimestamps(CPU)
    moments.record("given")
    assert not moments.has_completed()
    moments.record("stepped")
    assert moments.has_completed()
    data, *others = moments.compute_split()
    assert data is not None
    assert others == [None, None, None]


def test_the_own_gradients_are_there_before_other_callbacks_of_the_backward_pass() -> None:
    moments = StepTimestamps(CPU)
    weight = torch.ones(3, requires_grad=True)
    order: list[bool] = []

    def as_ddp_does(grad: Tensor) -> None:
        engine = torch.autograd.Variable._execution_engine
        engine.queue_callback(lambda: order.append("own" in moments._times))

    weight.register_hook(as_ddp_does)
    loss = (2 * weight).sum()
    moments.watch_backward(loss)
    loss.backward()
    assert order == [True]


# --- MFU ---


def test_operations_are_counted_without_touching_the_model() -> None:
    model = nn.Sequential(nn.Linear(8, 4), nn.Dropout(0.5), nn.BatchNorm1d(4), nn.Linear(4, 2))
    given = Experiment(model, torch.optim.SGD(model.parameters(), lr=1), nn.MSELoss(), None)
    before = [t.clone() for t in model.state_dict().values()]
    random = torch.get_rng_state()
    flops = FlopsCounter(given, peak=1e6)
    for samples in (5, 3):
        flops.keep_shapes(Batch((torch.ones(samples, 8), torch.ones(samples, 2)), samples))
    assert not flops.is_counted
    flops.ensure_counted()
    # Forward, gradient of the weights, and gradient of the input where there is one to train.
    assert flops.flops_per_sample == 2 * (2 * 8 * 4 + 3 * 4 * 2)
    assert flops.compute_mfu(1000.0) == pytest.approx(1000 * flops.flops_per_sample / 1e6)
    assert torch.equal(random, torch.get_rng_state())
    assert all(torch.equal(a, b) for a, b in zip(before, model.state_dict().values(), strict=True))
    assert all(p.grad is None for p in model.parameters())


def test_a_transformer_has_six_operations_per_parameter_and_token_beside_attention() -> None:
    layers, width, context, vocabulary = 2, 32, 16, 50
    model = Transformer(layers, width, 4, context, vocabulary)
    given = Experiment(
        model,
        torch.optim.SGD(model.parameters(), lr=1),
        compute_token_loss,
        None,
        predict=predict_next_tokens,
    )
    flops = FlopsCounter(given, peak=1.0)
    flops.keep_shapes(Batch((torch.zeros(3, context + 1, dtype=torch.int32),), 3))
    flops.ensure_counted()
    matrices = layers * 12 * width**2 + vocabulary * width
    attention = layers * 3 * 2 * 2 * context**2 * width
    assert flops.flops_per_sample == 6 * matrices * context + attention


def test_a_model_that_looks_at_its_numbers_has_no_mfu() -> None:
    class Curious(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * (2.0 if x.sum() > 0 else 1.0)

    model = Curious(2, 1)
    given = Experiment(model, torch.optim.SGD(model.parameters(), lr=1), nn.MSELoss(), None)
    flops = FlopsCounter(given, peak=1.0)
    flops.keep_shapes(Batch((torch.ones(2, 2), torch.ones(2, 1)), 2))
    flops.ensure_counted()
    assert flops.compute_mfu(1.0) is None


def test_what_an_experiment_keeps_and_moves_to_its_batch_stays_real() -> None:
    kept = {"scale": torch.full((1,), 2.0)}

    def predict(model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
        x, y = batch
        kept["scale"] = kept["scale"].to(x.device)
        return model(x) * kept["scale"], y

    model = nn.Linear(2, 1)
    given = Experiment(
        model, torch.optim.SGD(model.parameters(), lr=1), nn.MSELoss(), None, predict=predict
    )
    flops = FlopsCounter(given, peak=1.0)
    flops.keep_shapes(Batch((torch.ones(2, 2), torch.ones(2, 1)), 2))
    flops.ensure_counted()
    assert flops.compute_mfu(1.0) is None
    assert kept["scale"].item() == 2.0


@pytest.mark.parametrize(
    ("name", "precision", "peak"),
    [
        ("NVIDIA H200", "bf16", 989.4e12),
        ("NVIDIA H100 80GB HBM3", "tf32", 494.7e12),
        ("NVIDIA H100 PCIe", "fp16", 756e12),
        ("NVIDIA A100-SXM4-80GB", "float32", 19.5e12),
        ("NVIDIA L40S", "bf16", 362e12),
        ("NVIDIA L4", "bf16", 121e12),
        ("Tesla V100-SXM2-16GB", "tf32", 15.7e12),
        ("NVIDIA GH200 480GB", "bf16", 989.4e12),
        ("NVIDIA H200 NVL", "bf16", 835.5e12),
        ("NVIDIA H200 MIG 1g.18gb", "bf16", None),
        # Others than those whose names theirs begin or end with: slower, or faster.
        ("NVIDIA A10G", "bf16", None),
        ("NVIDIA RTX A4000", "bf16", None),
        ("NVIDIA T400 4GB", "fp16", None),
        ("NVIDIA GB200", "bf16", None),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", "bf16", None),
        ("NVIDIA Quadro K600", "bf16", None),
    ],
)
def test_peaks(name: str, precision: str, peak: float | None) -> None:
    assert get_peak_flops(name, precision) == peak


# --- stragglers ---


def test_who_is_behind_is_said_once_per_change() -> None:
    said: list[str] = []
    recorded: list[tuple[int, str, float | None]] = []
    judge = StragglerDetector(said.append, 1.5, 1.0, lambda *found: recorded.append(found))
    usual = {0: OwnTime(1.0, 18.0), 1: OwnTime(1.0, 19.0), 2: OwnTime(1.0, 17.0)}
    slow = usual | {2: OwnTime(1.0, 40.0)}
    starved = usual | {1: OwnTime(60.0, 19.0)}
    seen = (usual, slow, usual, slow, slow, slow, starved, starved, usual, usual, usual)
    for now, all_ in enumerate(seen):
        judge(all_, "node-{}".format, now)
    assert [text.partition(" (")[0] for text in said] == [
        "rank 2 on node-2 takes 2.1 × the median",
        "rank 1 on node-1 takes 4.3 × the median",
        "rank 1 on node-1 keeps up again",
    ]
    assert "(41 ms beside 19.5) and all wait for it: of these it computes 40 ms" in said[0]
    assert "it waits for its data 60 ms" in said[1]
    assert recorded == [
        *((2, "node-2", 2.1), (2, "node-2", None)),
        *((1, "node-1", 4.27), (1, "node-1", None)),
    ]
    assert judge(slow, str, 99.0) == {"slowest_rank": 2, "slowest_x": 2.1}


def test_who_is_behind_for_the_set_time_by_the_set_factor_is_named() -> None:
    said: list[str] = []
    judge = StragglerDetector(said.append, 3.0, 10.0, lambda *found: None)
    usual, slow = {0: OwnTime(1.0, 19.0), 1: OwnTime(1.0, 19.0)}, {1: OwnTime(1.0, 69.0)}
    behind = [(now, usual | slow) for now in range(10)]
    for now, all_ in [*behind, (10, usual), *((now + 11, all_) for now, all_ in behind)]:
        judge(all_, "node-{}".format, now)
    for now in range(30, 50):
        judge(usual | {1: OwnTime(1.0, 49.0)}, "node-{}".format, now)
    assert said == []
    for now in range(50, 62):
        judge(usual | slow, "node-{}".format, now)
    assert [text.partition(" (")[0] for text in said] == ["rank 1 on node-1 takes 3.5 × the median"]


def test_of_a_sharded_model_only_the_wait_for_data_is_a_ranks_own() -> None:
    said: list[str] = []
    judge = StragglerDetector(said.append, 1.5, 0.0, lambda *found: None)
    for _ in range(2):
        assert judge({0: OwnTime(0.2, 0.0), 1: OwnTime(30.0, 0.0)}, str, 0.0) == {}
    assert [text.partition(";")[0] for text in said] == [
        "rank 1 on 1 waits for its data 30 ms a step (the others 0.2) and all wait for it"
    ]


def test_little_differences_of_little_steps_are_none() -> None:
    said: list[str] = []
    judge = StragglerDetector(said.append, 1.5, 0.0, lambda *found: None)
    for _ in range(5):
        told = judge({0: OwnTime(0.01, 0.1), 1: OwnTime(0.01, 0.3)}, str, 0.0)
    assert told == {"slowest_rank": 1, "slowest_x": 2.82}
    assert said == []
    assert judge({0: OwnTime(1.0, 1.0)}, str, 0.0) == {}, "one alone is not behind"


# --- profiles ---


def test_a_profile_has_to_fit_into_the_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert create_profiler(None, 0, 1, tmp_path, 0, CPU) is None
    assert isinstance(create_profiler(95, 0, 100, tmp_path, 0, CPU), StepProfiler)
    with pytest.raises(EchelonError, match=f"after {WARMUP_STEPS} steps .* has 100 steps") as error:
        create_profiler(96, 0, 100, tmp_path, 0, CPU)
    assert error.value.faults[0].do == "set trainer.profile to 95 or less"
    assert create_profiler(10, 90, 100, tmp_path, 0, CPU) is None, "a restart is not to fail for it"
    assert "only 10 steps are left" in capsys.readouterr().err


def test_the_costliest_operators_first() -> None:
    def operator(key: str, micro: float) -> Any:
        return SimpleNamespace(key=key, count=10, self_cpu_time_total=micro)

    found = [operator(f"aten::op{i}", 100.0 * i) for i in range(12)]
    table = render_costliest_operators(
        [*found, operator("ProfilerStep#3", 1e9), operator("x" * 99, 1e4)], False
    )
    head, *rows = table.splitlines()
    assert head.split() == ["OPERATOR", "CALLS", "CPU", "MS", "SHARE"]
    assert len(rows) == 8
    assert rows[0].startswith("  xxx")
    assert rows[1].split() == ["aten::op11", "10", "1.100", "6.6%"]
    assert all(len(row) <= 80 for row in table.splitlines())


# --- the transformer ---

TINY = {"layers": 2, "width": 32, "heads": 4, "context": 16, "vocabulary": 64, "samples": 8}
REST = {"eval_samples": 0, "feed": "gelu", "tied": True, "lr": 0.01, "weight_decay": 0.1}


def made(**other: Any) -> Experiment:
    return experiment(SimpleNamespace(**{**TINY, **REST, "data_seed": 0, **other}))


@pytest.mark.parametrize(("feed", "tied"), [("gelu", True), ("swiglu", False)])
def test_a_transformer_learns_its_tokens_by_heart(feed: str, tied: bool) -> None:
    torch.manual_seed(0)
    given = made(feed=feed, tied=tied)
    losses = []
    for _ in range(60):
        loss = given.loss(*predict_next_tokens(given.model, (given.train_data,)))
        loss.backward()
        given.optimizer.step()
        given.optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[0] == pytest.approx(4.16, abs=0.1), "the logarithm of 64: it knows nothing"
    assert losses[-1] < 1.5


def test_a_token_is_told_by_those_before_it_alone() -> None:
    model = Transformer(2, 32, 4, 16, 64)
    rows = torch.randint(0, 64, (1, 16))
    other = rows.clone()
    other[0, 9] = (other[0, 9] + 1) % 64
    a, b = model(rows), model(other)
    assert torch.allclose(a[0, :9], b[0, :9], atol=1e-5)
    assert not torch.allclose(a[0, 9:], b[0, 9:], atol=1e-3)


def test_its_size() -> None:
    with torch.device("meta"):
        model = Transformer(24, 2048, 16, 2048, 50304)
    assert sum(p.numel() for p in model.parameters()) == pytest.approx(1.3e9, rel=0.02)
    assert len(model.blocks) == 24


def test_settings_that_make_no_transformer() -> None:
    with pytest.raises(EchelonError) as error:
        made(feed="gelo", layers=0)
    assert [fault.what for fault in error.value.faults] == [
        "layers=0 is below 1",
        "feed=gelo: there is no such layer",
    ]
    with pytest.raises(EchelonError, match="width=33 is not divisible by heads=4") as error:
        made(width=33)
    assert error.value.faults[0].do == "set width=36, or other heads"
