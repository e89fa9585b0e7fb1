"""Runs scikit-surprise and implicit on the splits of compare.py, in an interpreter that has them.

python peers.py SPLITS ratings|ranking  →  one JSON object per line
"""

import json
import sys
import time
import warnings
from pathlib import Path

import numpy as np


def ratings(split):
    """surprise's algorithms with the settings of its documentation: RMSE, MAE, seconds to fit."""
    import surprise
    from surprise import SVD, BaselineOnly, KNNBaseline, SVDpp

    similarity = {"name": "pearson_baseline", "user_based": False}
    algorithms = {
        "surprise BaselineOnly": BaselineOnly(verbose=False),
        "surprise SVD": SVD(random_state=0),
        "surprise KNNBaseline": KNNBaseline(sim_options=similarity, verbose=False),
        "surprise SVDpp": SVDpp(random_state=0),
    }
    train, held = split["train"], split["held"]
    data = surprise.Dataset.load_from_df(_frame(train), surprise.Reader(rating_scale=(0.5, 5)))
    known = data.build_full_trainset()
    for name, algorithm in algorithms.items():
        taken = _timed(lambda algorithm=algorithm: algorithm.fit(known))
        guess = np.array([algorithm.predict(int(u), int(i)).est for u, i, _ in held])
        error = guess - held[:, 2]
        rmse, mae = np.sqrt(np.mean(error**2)), np.mean(np.abs(error))
        yield {"name": name, "rmse": float(rmse), "mae": float(mae), **taken}


def _frame(rows):
    import pandas

    return pandas.DataFrame(
        {"user": rows[:, 0].astype(int), "item": rows[:, 1].astype(int), "r": rows[:, 2]}
    )


def ranking(split):
    """implicit's item neighbours and ALS; settings are chosen on the validation split alone."""
    for family, candidates in _candidates().items():
        judged = [
            (_judge(make, split, "validation")["ndcg"], n) for n, (make, _) in enumerate(candidates)
        ]
        make, settings = candidates[max(judged)[1]]
        yield {"name": f"implicit {family}", "settings": settings, **_judge(make, split, "test")}


def _candidates():
    from implicit.als import AlternatingLeastSquares
    from implicit.nearest_neighbours import BM25Recommender, CosineRecommender, TFIDFRecommender

    neighbours = [
        (lambda kind=kind, k=k: kind(K=k), f"{kind.__name__} K={k}")
        for kind in (CosineRecommender, TFIDFRecommender, BM25Recommender)
        for k in (20, 50, 100, 200, 500)
    ]
    als = [
        (
            lambda f=f, reg=reg, alpha=alpha: AlternatingLeastSquares(
                factors=f, regularization=reg, alpha=alpha, iterations=15, random_state=0
            ),
            f"factors={f} regularization={reg} alpha={alpha}",
        )
        for f in (16, 32, 64, 128)
        for reg in (0.01, 0.1, 1.0)
        for alpha in (1.0, 5.0, 20.0)
    ]
    return {"item KNN": neighbours, "ALS": als}


def _judge(make, split, part):
    """Every item that the user has not rated yet is a candidate."""
    import scipy.sparse

    train, held = split[f"{part}_train"], split[f"{part}_held"]
    shape = (int(split["users"]), int(split["items"]))
    seen = scipy.sparse.csr_matrix((np.ones(len(train), np.float32), train.T), shape)
    model = make()
    taken = _timed(lambda: model.fit(seen, show_progress=False))
    found, _ = model.recommend(held[:, 0], seen[held[:, 0]], N=10, filter_already_liked_items=True)
    hits = found == held[:, 1:]
    return {
        "recall": float(hits.any(1).mean()),
        "ndcg": float((hits / np.log2(np.arange(10) + 2)).sum(1).mean()),
        **taken,
    }


def _timed(fit):
    begun, cpu = time.perf_counter(), time.process_time()
    fit()
    return {"fit_s": time.perf_counter() - begun, "cpu_s": time.process_time() - cpu}


if __name__ == "__main__":
    warnings.filterwarnings("ignore")
    folder, task = Path(sys.argv[1]), sys.argv[2]
    for file in sorted(folder.glob(f"{task}-*.npz")):
        for line in {"ratings": ratings, "ranking": ranking}[task](np.load(file)):
            print(json.dumps({"split": file.stem, **line}), flush=True)
