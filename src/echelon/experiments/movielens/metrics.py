"""What is measured; torchmetrics is slow to import, so only when something is evaluated."""

from __future__ import annotations

from typing import Any

K = 10


def rating_metrics() -> dict[str, Any]:
    from torchmetrics import MeanAbsoluteError, MeanSquaredError

    return {"rmse": MeanSquaredError(squared=False), "mae": MeanAbsoluteError()}


def ranking_metrics(items: int) -> dict[str, Any]:
    """With one movie held out per user, recall in the first k is whether it is among them."""
    from torchmetrics.classification import MulticlassAccuracy

    from echelon.experiments.movielens.gain import DiscountedGain

    recall = MulticlassAccuracy(items, top_k=min(K, items), average="micro", validate_args=False)
    return {"ndcg": DiscountedGain(K), "recall": recall}
