"""Experiments with a step of their own that the tests train."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import session_loops
import torch
from session_loops import make_data, make_model
from torch import Tensor, nn
from toy_experiments import FEATURES, Life

import echelon


@dataclass
class Settings(session_loops.Settings):
    scheduled: bool = False
    best_after: int = 0


class Counter:
    """A part with a state of its own."""

    def __init__(self) -> None:
        self.steps = 0

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self.steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.steps = state["steps"]


def adversaries(cfg: Settings) -> echelon.Experiment:
    """The loop `session_loops.adversaries` as an experiment, and an evaluation."""
    maker, judge = nn.Linear(3, FEATURES), nn.Linear(FEATURES, 1)
    makes, judges = (torch.optim.Adam(m.parameters(), lr=cfg.lr) for m in (maker, judge))
    schedules = {
        "maker": torch.optim.lr_scheduler.ExponentialLR(makes, 0.9),
        "judge": torch.optim.lr_scheduler.StepLR(judges, 5),
    }
    counter, life = Counter(), Life(makes)
    score = nn.functional.binary_cross_entropy_with_logits

    def draw(numbers: Tensor) -> Tensor:
        return torch.sin(numbers.unsqueeze(1) * torch.arange(1.0, 4.0, device=numbers.device))

    def step(batch: Any, session: echelon.Session) -> dict[str, Any]:
        numbers, x, _ = batch
        counter.steps += 1
        life.steps = session.completed_steps
        real, fake = judge(x).squeeze(1), judge(maker(draw(numbers)).detach()).squeeze(1)
        loss_real = score(real, torch.ones_like(real))
        session.backward(loss_real)
        loss_fake = score(fake, torch.zeros_like(fake))
        session.backward(loss_fake)
        session.step(judges)
        fooled = judge(maker(draw(numbers))).squeeze(1)
        loss = score(fooled, torch.ones_like(fooled))
        session.backward(loss)
        session.step(makes)
        return {"loss": loss, "judge_loss": loss_real + loss_fake}

    def evaluate(models: nn.Module, batches: Iterator[Any]) -> dict[str, Any]:
        assert isinstance(models, nn.ModuleDict)
        assert not models["maker"].training
        trained = counter.steps
        if trained == int(os.environ.get("ECHELON_TEST_EVALUATION_FAILS_AT", "-1")):
            raise ValueError("in an evaluation")
        error, samples = 0.0, 0
        for numbers, x, _ in batches:
            error += float((models["maker"](draw(numbers)) - x).abs().sum())
            samples += len(x)
        if cfg.best_after:
            error = float(samples * abs(trained - cfg.best_after))
        return {"error": (error, samples)}

    return echelon.Experiment(
        model={"maker": maker, "judge": judge},
        optimizer={"makes": makes, "judges": judges},
        schedule=schedules if cfg.scheduled else None,
        step=step,
        train_data=make_data(cfg.samples),
        eval_data=make_data(11),
        evaluate=evaluate,
        state={"counter": counter},
    )


def sampled(cfg: Settings) -> echelon.Experiment:
    """The loop `session_loops.sampled` as an experiment: one model and one optimizer."""
    model = nn.Linear(FEATURES, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=cfg.lr)
    weights = torch.arange(1.0, cfg.samples + 1).tolist()

    def step(batch: Any, session: echelon.Session) -> dict[str, Any]:
        loss = nn.functional.mse_loss(model(batch["x"]).squeeze(1), batch["y"])
        session.backward(loss)
        session.step(optimizer)
        return {"loss": loss}

    return echelon.Experiment(
        model=model,
        optimizer=optimizer,
        step=step,
        train_data=session_loops.Rows(cfg.samples),
        collate_fn=session_loops.join_rows,
        sampler=torch.utils.data.WeightedRandomSampler(weights, cfg.samples),
        loader={"prefetch_factor": 2},
    )


def regression(cfg: Settings) -> echelon.Experiment:
    """With dropout and a batch norm, whose numbers a resumed run has to go on with."""
    model = make_model(cfg)
    optimizer = torch.optim.Adam(model.parameters(), lr=cfg.lr)
    life = Life(optimizer)

    def step(batch: Any, session: echelon.Session) -> dict[str, Any]:
        assert model.training
        _, x, y = batch
        life.steps = session.completed_steps
        loss = nn.functional.mse_loss(model(x).squeeze(1), y)
        session.backward(loss)
        session.step(optimizer, clip=5.0)
        return {"loss": loss, "grad_norm": session.grad_norm}

    def evaluate(model: nn.Module, batches: Iterator[Any]) -> dict[str, Any]:
        found = [(float((model(x).squeeze(1) - y).abs().sum()), len(y)) for _, x, y in batches]
        return {"error": (sum(e for e, _ in found), sum(n for _, n in found))}

    return echelon.Experiment(
        model=model,
        optimizer=optimizer,
        step=step,
        train_data=make_data(cfg.samples),
        eval_data=make_data(7),
        evaluate=evaluate,
    )


def either(cfg: Settings) -> echelon.Experiment:
    """With a step or with a loss, as a variable says."""
    experiment = regression(cfg)
    experiment.eval_data = experiment.evaluate = None
    if not os.environ["ECHELON_TEST_HAS_STEP"]:
        experiment.step, experiment.loss = None, nn.functional.mse_loss
        experiment.predict = lambda model, batch: (model(batch[1]).squeeze(1), batch[2])
    return experiment


def cycled(cfg: Settings, training: echelon.TrainingInfo) -> echelon.Experiment:
    """With a schedule that is as long as the training."""
    experiment = regression(cfg)
    experiment.schedule = torch.optim.lr_scheduler.OneCycleLR(
        experiment.optimizer, cfg.lr, total_steps=training.count_total_steps(cfg.samples)
    )
    return experiment


def policy(cfg: Settings) -> echelon.Experiment:
    """No data: every rank plays for itself, and the first steps only fill a buffer."""
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=cfg.lr)

    def step(number: int, session: echelon.Session) -> dict[str, Any] | None:
        if number < 3:
            return None
        session.backward(model(torch.full((1, 2), float(number))).square().mean())
        session.step(optimizer)
        return {"reward": float(number)}

    return echelon.Experiment(model=model, optimizer=optimizer, step=step)


def mistaken(cfg: Settings) -> echelon.Experiment:
    """What a person may get wrong in a step, by name."""
    model, other = nn.Linear(FEATURES, 1), nn.Linear(FEATURES, 1)
    optimizer, stranger = (torch.optim.SGD(m.parameters(), lr=cfg.lr) for m in (model, other))

    def step(batch: Any, session: echelon.Session) -> Any:
        loss = nn.functional.mse_loss(model(batch[1]).squeeze(1), batch[2])
        if cfg.mistake == "nothing":
            return None
        if cfg.mistake == "no backward":
            return {"loss_a": loss}
        session.backward(loss)
        if cfg.mistake == "no step":
            return {"loss_a": loss}
        session.step(stranger if cfg.mistake == "stranger" else optimizer)
        return loss if cfg.mistake == "tensor" else {"loss_a": ["high"]}

    return echelon.Experiment(
        model=model, optimizer=optimizer, step=step, train_data=make_data(cfg.samples)
    )
