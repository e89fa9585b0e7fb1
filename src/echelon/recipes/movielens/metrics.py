"""The metrics of the experiments. torchmetrics is slow to import, so it is imported when they are
made."""

from __future__ import annotations

from typing import Any

TOP_K = 10
"""Recommendations that count."""


def make_rating_metrics() -> dict[str, Any]:
    """Return RMSE and MAE."""
    from torchmetrics import MeanAbsoluteError, MeanSquaredError

    return {"rmse": MeanSquaredError(squared=False), "mae": MeanAbsoluteError()}


def make_ranking_metrics(items: int) -> dict[str, Any]:
    """Return NDCG@k and recall@k. With one held-out movie per user, recall@k is whether it is among
    the first k."""
    from torchmetrics.classification import MulticlassAccuracy

    from echelon.recipes.movielens.ndcg import SingleTargetNDCG

    recall = MulticlassAccuracy(
        items, top_k=min(TOP_K, items), average="micro", validate_args=False
    )
    return {"ndcg": SingleTargetNDCG(TOP_K), "recall": recall}
