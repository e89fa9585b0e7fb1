"""A linear regression on synthetic data that trains in a second."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from echelon.data.toy import make_linear_data
from echelon.experiment.definition import Experiment


def experiment(cfg: Any) -> Experiment:
    """Return the experiment; its settings are documented in conf/experiment/toy.yaml."""
    model = _make_model(cfg.features, cfg.hidden)
    x, y = make_linear_data(cfg.samples + cfg.eval_samples, cfg.features, cfg.noise, cfg.data_seed)
    return Experiment(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=cfg.lr),
        loss=nn.functional.mse_loss,
        train_data=(x[: cfg.samples], y[: cfg.samples]),
        eval_data=(x[cfg.samples :], y[cfg.samples :]) if cfg.eval_samples else None,
        metrics=_make_metrics,
    )


def _make_model(features: int, hidden: int) -> nn.Module:
    """Return a linear model, or one with a hidden layer of the given width."""
    if not hidden:
        return nn.Linear(features, 1)
    return nn.Sequential(nn.Linear(features, hidden), nn.ReLU(), nn.Linear(hidden, 1))


def _make_metrics() -> dict[str, Any]:
    from torchmetrics import MeanAbsoluteError  # slow to import: only when we evaluate

    return {"mae": MeanAbsoluteError()}
