"""What is measured; torchmetrics is slow to import, so only when something is evaluated."""

from __future__ import annotations

from typing import Any

TOP_K = 10


def make_rating_metrics() -> dict[str, Any]:
    from torchmetrics import MeanAbsoluteError, MeanSquaredError

    return {"rmse": MeanSquaredError(squared=False), "mae": MeanAbsoluteError()}


def make_ranking_metrics(items: int) -> dict[str, Any]:
    """With one movie held out per user, recall in the first k is whether it is among them."""
    from torchmetrics.classification import MulticlassAccuracy

    from echelon.recipes.movielens.ndcg import SingleTargetNDCG

    recall = MulticlassAccuracy(
        items, top_k=min(TOP_K, items), average="micro", validate_args=False
    )
    return {"ndcg": SingleTargetNDCG(TOP_K), "recall": recall}
