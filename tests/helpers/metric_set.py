"""Metrics of every kind of state torchmetrics knows."""

from __future__ import annotations

from typing import Any

import torchmetrics
from torch import Tensor
from torchmetrics import classification


class PositiveAUROC(classification.BinaryAUROC):
    """Keeps all it saw, as a list that is joined at the end."""

    def update(self, output: Tensor, target: Tensor) -> None:
        super().update(output, (target > 0).long())


class Largest(torchmetrics.Metric):
    """A metric of a user's own whose states are merged by their maximum."""

    full_state_update = False

    def __init__(self) -> None:
        super().__init__()
        import torch

        self.add_state("most", default=torch.tensor(-1e9), dist_reduce_fx="max")

    def update(self, output: Tensor, target: Tensor) -> None:
        self.most = self.most.maximum((output - target).abs().max())  # type: ignore[has-type]

    def compute(self) -> Tensor:
        return self.most  # type: ignore[no-any-return]


def metric_set() -> dict[str, Any]:
    return {
        "mae": torchmetrics.MeanAbsoluteError(),  # sums
        "mse": torchmetrics.MeanSquaredError(),
        "mean": torchmetrics.MeanMetric(),  # weighted by the target
        "spearman": torchmetrics.SpearmanCorrCoef(),  # keeps everything
        "auroc": PositiveAUROC(thresholds=None),
        "pearson": torchmetrics.PearsonCorrCoef(),  # full_state_update=True: replayed
        "largest": Largest(),
    }
