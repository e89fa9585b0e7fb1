"""What a step's code refers to: what stays as it is, and what a CUDA graph would not follow."""

from __future__ import annotations

import functools
import itertools
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from time import monotonic
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from echelon.cudagraph.host_state import find_host_change, read_host_state
from echelon.cudagraph.step_references import HostReference, find_step_references
from echelon.experiment.definition import Experiment

SCALE = 2.0
CLOCKS = {"now": time.monotonic}


@dataclass
class Settings:
    width: int = 3
    folder: Path = Path("a")


class Buffer:
    """As a replay buffer: its methods draw on the host."""

    def __init__(self) -> None:
        self.rows: list[int] = []

    def sample(self) -> int:
        return random.choice(self.rows)


class Clock:
    def read(self) -> float:
        return monotonic()


def score(x: Tensor, weight: float = 1.0) -> Tensor:
    return nn.functional.relu(x).mean() * weight * SCALE


def make_step() -> tuple[Callable[..., Any], nn.Module, torch.optim.Optimizer]:
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    cfg, weights, named = Settings(), torch.ones(3), {"a": [1, 2]}
    half = functools.partial(score, weight=0.5)

    def step(batch: Any, session: Any) -> dict[str, Any]:
        loss = sum(half(model(x * weights)) for x in batch) * cfg.width + len(named["a"])
        session.backward(loss)
        session.step(optimizer)
        return {"loss": loss}

    return step, model, optimizer


def test_the_usual_step_refers_to_what_stays() -> None:
    step, model, optimizer = make_step()
    found = find_step_references(step=step).found
    assert found["model"] is model
    assert found["optimizer"] is optimizer
    assert found["SCALE"] == 2.0
    assert found["cfg.width"] == 3


def test_a_method_refers_to_what_its_object_has() -> None:
    class Trainer:
        def __init__(self) -> None:
            self.model = nn.Linear(3, 1)
            self.ema = SimpleNamespace(decay=0.9)

        def step(self, batch: Any, session: Any) -> None:
            session.backward(self.model(batch).mean())

    trainer = Trainer()
    found = find_step_references(step=trainer.step).found
    assert found["step.model"] is trainer.model
    assert found["step.ema.decay"] == 0.9


def use_iterator() -> Any:
    labelled = itertools.cycle([1, 2])
    return lambda batch, session: session.backward(batch * labelled)


def use_generator_function() -> Any:
    def read_rows() -> Iterator[int]:
        yield from range(3)

    rows = read_rows()
    return lambda batch, session: session.backward(batch * rows)


def use_next() -> Any:
    return lambda batch, session: session.backward(batch * next(batch))


def use_clock() -> Any:
    clock = Clock()
    return lambda batch, session: session.backward(batch * clock.read())


def use_clock_of_a_dict() -> Any:
    return lambda batch, session: session.backward(batch * CLOCKS["now"]())


def use_print() -> Any:
    def show(x: Any) -> None:
        print(x)

    return lambda batch, session: show(batch)


def use_generator() -> Any:
    draws = torch.Generator()
    return lambda batch, session: session.backward(torch.rand(3, generator=draws))


def use_lock() -> Any:
    import threading

    lock = threading.Lock()
    return lambda batch, session: lock.locked()


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (use_iterator, "it uses labelled, a cycle, on the host"),
        (use_generator_function, "it uses rows, a generator, on the host"),
        (use_next, "it calls next()"),
        (use_clock, "it uses time, which a graph would ask only once"),
        (use_clock_of_a_dict, "it uses time, which a graph would ask only once"),
        (use_print, "it prints"),
        (use_generator, "it uses draws, a Generator, on the host"),
        (use_lock, "it uses lock, a lock, which may change on the host"),
    ],
)
def test_what_a_graph_would_not_follow(make: Callable[[], Any], reason: str) -> None:
    with pytest.raises(HostReference) as raised:
        find_step_references(step=make())
    assert str(raised.value) == reason


class Printing(nn.Module):
    """Its forward pass prints in a method of its own; another method, which no step calls, opens a
    file."""

    def forward(self, x: Tensor) -> Tensor:
        return self.show(x)

    def show(self, x: Tensor) -> Tensor:
        print(x.shape)
        return x

    def write(self) -> None:
        open("weights")  # noqa: SIM115


class Writing(Printing):
    def show(self, x: Tensor) -> Tensor:
        return x


def test_the_forward_pass_of_a_module_is_a_part_of_the_step() -> None:
    with pytest.raises(HostReference, match="it prints"):
        find_step_references(
            step=functools.partial(lambda model, batch, session: model(batch), Printing())
        )
    find_step_references(
        step=functools.partial(lambda model, batch, session: model(batch), Writing())
    )


def test_a_large_array_is_not_compared_and_so_refused() -> None:
    weights = np.ones(1000)
    with pytest.raises(HostReference, match="it uses weights, an array on the host"):
        find_step_references(step=lambda batch, session: session.backward(batch * weights))


def test_a_step_with_too_much_to_look_at() -> None:
    many = [[n] for n in range(10_000)]
    with pytest.raises(HostReference, match="more than 5000 values"):
        find_step_references(step=lambda batch, session: many)


# --- what a step changes ---


def find_change(step: Any, change: Callable[[], Any], model: nn.Module | None = None) -> str | None:
    experiment = Experiment(model or nn.Linear(3, 1), None, None, None, step=step)
    before = read_host_state(experiment, find_step_references(step=step).found)
    change()
    return find_host_change(
        before, read_host_state(experiment, find_step_references(step=step).found)
    )


def test_a_counter_behind_functions_is_seen() -> None:
    counts = {"steps": 0}

    def advance() -> None:
        counts["steps"] += 1

    def step(batch: Any, session: Any) -> None:
        advance()

    assert find_change(step, advance) == "the step's counts changes from step to step"
    assert find_change(step, lambda: None) is None


def test_an_optimizer_that_counts_or_replaces_its_state() -> None:
    _, model, optimizer = make_step()
    weight = next(model.parameters())
    optimizer.state[weight] |= {"count": 0, "mean": torch.zeros(3)}

    def step(batch: Any, session: Any) -> None:
        session.step(optimizer)

    def count() -> None:
        optimizer.state[weight]["count"] += 1

    def replace() -> None:
        optimizer.state[weight]["mean"] = optimizer.state[weight]["mean"] * 0.9

    def set_rate() -> None:
        optimizer.param_groups[0]["lr"] *= 0.5

    said = "the step's optimizer.state changes from step to step"
    assert find_change(step, count) == said
    assert find_change(step, replace) == said
    assert find_change(step, set_rate) == (
        "the step's optimizer.param_groups changes from step to step"
    )


def test_a_buffer_that_a_module_replaces() -> None:
    """A graph would go on with the tensor that stood there when it was captured."""
    model = nn.BatchNorm1d(3)

    def replace() -> None:
        model.running_mean = torch.ones(3)

    changed = find_change(lambda batch, session: None, replace, model)
    assert changed == "the model's running_mean changes from step to step"


def test_random_numbers_of_a_replay_buffer() -> None:
    buffer = Buffer()
    buffer.rows = [1, 2, 3]
    step = lambda batch, session: session.backward(batch * buffer.sample())  # noqa: E731
    assert find_change(step, buffer.sample) == "the step draws random numbers on the host"


# --- what is changed between two steps, by an evaluation or a transform ---


class Options:
    temperature = 1.0


class Scaling(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale, self.options = 1.0, Settings()
        self.register_buffer("mean", torch.zeros(3))


@dataclass
class Changeable:
    """All that a step may refer to, for tests that change one of it."""

    cfg: Settings
    named: dict[str, Any]
    weights: Tensor
    limits: Any
    model: Scaling
    rates: set[float]


def make_changeable() -> Changeable:
    return Changeable(
        cfg=Settings(),
        named={"a": [1, 2]},
        weights=torch.ones(3),
        limits=np.ones(3),
        model=Scaling(),
        rates={0.1},
    )


def set_item(container: Any, key: Any, value: Any) -> None:
    container[key] = value


@pytest.mark.parametrize(
    ("change", "name"),
    [
        (lambda c: setattr(c.cfg, "width", 4), "c.cfg.width"),
        (lambda c: setattr(c, "cfg", Settings()), "c.cfg"),
        (lambda c: set_item(c.named["a"], 0, 5), "c.named['a'][0]"),
        (lambda c: c.named["a"].append(5), "c.named['a']"),
        (lambda c: c.named.pop("a"), "c.named['a']"),
        (lambda c: c.weights.mul_(2), "c.weights"),
        (lambda c: c.limits.fill(2), "c.limits"),
        (lambda c: c.rates.add(0.2), "c.rates"),
        (lambda c: setattr(c.model, "scale", 0.5), "c.model.scale"),
        (lambda c: setattr(c.model.options, "width", 0), "c.model.options.width"),
        (lambda c: c.model.eval(), "c.model.training"),
        (lambda c: setattr(c.model, "mean", torch.ones(3)), "c.model.mean"),
        (lambda c: setattr(c, "extra", 1), "c"),
        (lambda c: setattr(Options, "temperature", 0.5), "Options.temperature"),
    ],
)
def test_what_is_changed_between_steps_is_named(
    change: Callable[[Any], Any], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Options, "temperature", 1.0)
    c = make_changeable()

    def step(batch: Any, session: Any) -> None:
        session.backward(c.model(batch) * Options.temperature)

    references = find_step_references(step=step)
    assert references.find_change() is None
    change(c)
    assert references.find_change() == name


def test_a_name_that_is_given_another_value(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = 1.0

    def step(batch: Any, session: Any) -> None:
        session.backward(batch * weight * SCALE)

    references = find_step_references(step=step)
    weight = float("1.0")  # an equal value is no change
    assert references.find_change() is None
    weight = 0.5
    assert references.find_change() == "weight"
    references = find_step_references(step=step)
    monkeypatch.setitem(globals(), "SCALE", 3.0)
    assert references.find_change() == "SCALE"


def test_training_changes_nothing_that_is_compared() -> None:
    step, model, optimizer = make_step()
    references = find_step_references(step=step)
    model(torch.ones(2, 3)).mean().backward()
    optimizer.step()
    assert references.find_change() is None
