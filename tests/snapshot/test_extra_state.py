"""What modules return from `get_extra_state` is saved, and comes back on every rank."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from toy_experiments import trace
from worlds import differing, state_at, traced_lines, train_world

import echelon
from echelon.errors import EchelonError
from echelon.snapshot.state import require_savable

WORDS = ("trainer.batch_size=5", "trainer.save.steps=1", "trainer.keep_last=99")


class Counter(nn.Module):
    """Keeps what it has seen beside its weights, in every type that is allowed."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 1)
        self.seen: dict[Any, Any] = {"calls": 0}
        self.mean = torch.zeros(2, dtype=torch.bfloat16)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            calls = self.seen["calls"] + 1
            self.seen = {"calls": calls, 7: None, "steps": [[calls, 0.5], ("a", True)]}
            self.mean = self.mean + 1
        output: Tensor = self.layer(x).squeeze(-1)
        return output

    def get_extra_state(self) -> Any:
        return {**self.seen, "mean": self.mean, "none": torch.empty(0)}

    def set_extra_state(self, state: Any) -> None:
        self.mean = state["mean"]
        assert state["none"].shape == (0,)
        self.seen = {k: v for k, v in state.items() if k not in ("mean", "none")}
        trace(calls=self.seen["calls"], mean=self.mean.tolist(), steps=str(self.seen.get("steps")))


class Scale(nn.Module):
    """Its extra state is a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.ones(())

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.scale = self.scale * 0.5
        return x * (1 + self.scale)

    def get_extra_state(self) -> Tensor:
        return self.scale

    def set_extra_state(self, state: Tensor) -> None:
        self.scale = state
        trace(scale=float(state))


@dataclass
class Settings:
    samples: int = 15


def counting(cfg: Settings) -> echelon.Experiment:
    model = nn.Sequential(Scale(), Counter())
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(cfg.samples, 3, generator=generator)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    return echelon.Experiment(model, optimizer, nn.functional.mse_loss, (x, x.sum(1)))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "then", "words"),
    [(1, 1, ()), (2, 2, ()), (1, 3, ()), (3, 1, ()), (2, 2, ("replica.kind=fsdp",))],
)
def test_it_comes_back_on_every_rank(
    tmp_path: Path, traced: Path, ranks: int, then: int, words: tuple[str, ...]
) -> None:
    first = train_world(tmp_path, ranks, *WORDS, *words, "trainer.steps=4", experiment=counting)
    assert first.codes == [0] * ranks, first.said
    saved = state_at(first.run, 4)["model"]
    assert saved["0._extra_state"] == 0.5**4
    assert saved["1._extra_state"]["steps"] == [[4, 0.5], ("a", True)]
    env = {"ECHELON_TEST_TRACE": str(traced)}
    again = train_world(tmp_path, then, *WORDS, *words, experiment=counting, env=env)
    assert again.codes == [0] * then, again.said
    calls = traced_lines(traced, "calls")
    assert sorted(line["rank"] for line in calls) == list(range(then))
    assert {line["calls"] for line in calls} == {4}
    assert {tuple(line["mean"]) for line in calls} == {(4.0, 4.0)}
    assert {line["steps"] for line in calls} == {"[[4, 0.5], ('a', True)]"}
    assert [line["scale"] for line in traced_lines(traced, "scale")] == [0.5**4] * then
    if ranks == then:
        whole = train_world(tmp_path, ranks, *WORDS, *words, name="whole", experiment=counting)
        assert differing(state_at(again.run, 9), state_at(whole.run, 9)) == []


@pytest.mark.slow
def test_a_model_with_it_is_loaded_for_use(tmp_path: Path) -> None:
    done = train_world(tmp_path, 1, *WORDS, "trainer.steps=2", experiment=counting)
    assert done.codes == [0], done.said
    model = echelon.load(done.run.folder)
    assert type(model[1]).__name__ == "Counter"  # type: ignore[index]
    assert model[1].seen["calls"] == 2  # type: ignore[index]


class Keeper(nn.Module):
    def __init__(self, kept: Any) -> None:
        super().__init__()
        self.kept = kept

    def get_extra_state(self) -> Any:
        return self.kept

    def set_extra_state(self, state: Any) -> None:
        self.kept = state


class Forgetful(nn.Module):
    def get_extra_state(self) -> Any:
        return {"a": 1}


def test_what_cannot_be_saved_is_refused_at_once() -> None:
    model = nn.Sequential(
        nn.Linear(1, 1), Keeper({"a": [1, {2}]}), Forgetful(), Keeper(b"x"), Keeper({"b": None})
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(EchelonError) as caught:
        require_savable(echelon.Experiment(model, optimizer, nn.functional.mse_loss, ()))
    assert [fault.what for fault in caught.value.faults] == [
        "the state to save holds a builtins.set at model/1._extra_state/a/1.",
        "Forgetful has get_extra_state but no set_extra_state, so a snapshot of it could never be "
        "loaded",
        "the state to save holds a builtins.bytes at model/3._extra_state.",
    ]


def unsavable(cfg: Settings) -> echelon.Experiment:
    experiment = counting(cfg)
    experiment.model.append(Keeper(object()))
    return experiment


@pytest.mark.slow
def test_the_first_step_is_not_made(tmp_path: Path) -> None:
    ended = train_world(tmp_path, 2, *WORDS, experiment=unsavable)
    assert ended.codes == [2, 2], ended.said
    assert "the state to save holds a builtins.object at model/2._extra_state" in ended.said
    assert "Traceback" not in ended.said
