"""Makes the tables of README.md: our models, scikit-surprise and implicit on the same splits.

    python examples/movielens/compare.py --data data/ml-latest-small --peers PYTHON

PYTHON is an interpreter with the other libraries: pip install 'numpy<2' scikit-surprise implicit
pandas. Our settings are the defaults, which were chosen on validation parts of other splits.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from datetime import date
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np

from echelon.config.compose import compose
from echelon.recipes.movielens.data import Ratings, load_ratings, split_newest, split_randomly
from echelon.runs.find import find_run
from echelon.runs.metrics_file import read_metrics
from echelon.train.worker import train_in_process

HERE = Path(__file__).parent
RESULTS = HERE.parent.parent / "benchmarks" / "results" / "movielens.json"
OURS = {
    "ratings": {
        "echelon movielens": ["experiment=movielens"],
        "echelon movielens, ratings alone": ["experiment=movielens", "metadata=false"],
        "echelon movielens_dot": ["experiment=movielens_dot"],
    },
    "ranking": {"echelon movielens_ranking": ["experiment=movielens_ranking"]},
}
MEASURED = {"ratings": ("rmse", "mae"), "ranking": ("ndcg", "recall")}
UNITS = ("steps", "epochs")
TIMES = ("fit_s", "cpu_s")
"""Wall-clock seconds, and CPU seconds of all threads, which a busy machine does not increase."""

Line = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--data", default="data/ml-latest-small")
    parser.add_argument("--peers", help="the peers' interpreter; without it, ours alone")
    parser.add_argument("--task", choices=OURS, action="append")
    parser.add_argument("--seeds", type=int, default=5)
    given = parser.parse_args()
    found = json.loads(RESULTS.read_text())["lines"] if RESULTS.exists() else {}
    with tempfile.TemporaryDirectory() as folder:
        ratings = load_ratings(given.data)
        for task in given.task or OURS:
            splits = Path(folder) / task
            splits.mkdir()
            for seed in range(given.seeds):
                np.savez(splits / f"{task}-{seed}.npz", **SPLIT[task](ratings, seed))
            lines = list(ours(task, given.data, given.seeds, Path(folder)))
            lines += list(peers(given.peers, splits, task)) if given.peers else []
            names = {line["name"] for line in lines}
            kept = [line for line in found.get(task, []) if line["name"] not in names]
            found[task] = [*lines, *kept]
            print(table(found[task], (*MEASURED[task], *TIMES)))
    RESULTS.write_text(json.dumps({**circumstances(), "lines": found}, indent=1) + "\n")


# --- the splits, for programs that are not ours ---


def rating_split(ratings: Ratings, seed: int) -> dict[str, Any]:
    columns = np.stack([ratings.users, ratings.items, ratings.ratings.astype(float)], 1)
    train, held = split_randomly(len(columns), 0.1, seed)
    return {"train": columns[train], "held": columns[held]}


def ranking_split(ratings: Ratings, seed: int) -> dict[str, Any]:
    """Hold out each user's newest rating to test, and the second newest to choose settings by."""
    pairs = np.stack([ratings.users, ratings.items], 1)
    train, held = split_newest(ratings, seed)
    names = ("users", "items", "ratings", "times")
    rest = replace(ratings, **{name: getattr(ratings, name)[train] for name in names})
    inner, validation = split_newest(rest, seed)
    return {
        "users": ratings.num_users,
        "items": ratings.num_items,
        "test_train": pairs[train],
        "test_held": pairs[held],
        "validation_train": pairs[train][inner],
        "validation_held": pairs[train][validation],
    }


SPLIT = {"ratings": rating_split, "ranking": ranking_split}


# --- the contestants ---


def ours(task: str, data: str, seeds: int, folder: Path) -> Iterator[Line]:
    """Time a whole run: reading, training, evaluating, a snapshot. A run before has done the
    imports. The metrics are those of the last step, not of the best one."""
    first = next(iter(OURS[task].values()))
    _run([*first, f"data={data}", "trainer.epochs=1"], folder / "first", task)
    for name, words in OURS[task].items():
        for seed in range(seeds):
            measured = _run([*words, f"data={data}", f"split_seed={seed}"], folder / name, task)
            yield {"split": f"{task}-{seed}", "name": name, **measured}


def _run(words: list[str], runs: Path, task: str) -> dict[str, float]:
    never = [f"trainer.{what}.{unit}=null" for what in ("evaluate", "save") for unit in UNITS]
    config = compose([*words, f"run.dir='{runs}'", "track.progress=none", *never])
    begun, cpu = time.perf_counter(), time.process_time()
    if code := train_in_process(config):
        sys.exit(code)
    taken = {"fit_s": time.perf_counter() - begun, "cpu_s": time.process_time() - cpu}
    lines = read_metrics(find_run("latest", str(runs)).metrics_file)
    last = [line for line in lines if "eval_loss" in line][-1]
    return {key: last[f"eval_{key}"] for key in MEASURED[task]} | taken


def peers(python: str, splits: Path, task: str) -> Iterator[Line]:
    done = subprocess.run(
        [python, str(HERE / "peers.py"), str(splits), task],
        env=os.environ | {"OPENBLAS_NUM_THREADS": "1", "PYTHONPATH": ""},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    yield from map(json.loads, done.stdout.splitlines())


# --- the table ---


def table(lines: list[Line], keys: tuple[str, ...]) -> str:
    names = list(dict.fromkeys(line["name"] for line in lines))
    rows = [f"| {'model':<34} | " + " | ".join(f"{key:<15}" for key in keys) + " |"]
    rows.append(f"|{'-' * 36}|" + "|".join("-" * 17 for _ in keys) + "|")
    for name in names:
        of_name = [line for line in lines if line["name"] == name]
        cells = [_spread([line[key] for line in of_name if key in line], key) for key in keys]
        rows.append(f"| {name:<34} | " + " | ".join(f"{cell:<15}" for cell in cells) + " |")
    return "\n".join(rows)


def _spread(values: list[float], key: str) -> str:
    if not values:
        return "–"
    if key in TIMES:
        return f"{statistics.median(values):.2f}"
    deviation = statistics.stdev(values) if len(values) > 1 else 0.0
    return f"{statistics.mean(values):.4f} ± {deviation:.4f}"


def circumstances() -> dict[str, Any]:
    packages = ("echelon", "torch", "torchmetrics", "numpy")
    return {
        "benchmark": "movielens",
        "date": date.today().isoformat(),
        "command": "python examples/movielens/compare.py --peers PYTHON",
        "machine": {"cpu": platform.processor() or platform.machine(), "cores": os.cpu_count()},
        "versions": {
            "python": platform.python_version(),
            **{name: metadata.version(name) for name in packages},
            "peers": "scikit-surprise 1.1.5, implicit 0.7.3, numpy 1.26.4",
        },
    }


if __name__ == "__main__":
    main()
