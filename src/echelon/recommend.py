"""`echelon recommend`: titles from a run's best snapshot, without what the user has rated."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from echelon.errors import EchelonError, Exit, Fault
from echelon.runs import Run

if TYPE_CHECKING:
    from torch import Tensor

    from echelon.data.movielens import Ratings
    from echelon.train.snapshots import Snapshot

_OURS = "echelon.experiments.movielens"


@dataclass(frozen=True)
class Movie:
    movie: int
    """MovieLens' own number."""
    title: str
    score: float


@dataclass(frozen=True)
class Recommended:
    user: int
    known: bool
    movies: list[Movie]


def recommend(run: Run, users: Sequence[int], k: int, as_json: bool) -> int:
    found = recommended(run, users, k)
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="replace")  # titles have letters that not every stream has
    if as_json:
        print(json.dumps([_plain(one) for one in found], indent=2))
    elif sys.stdout.isatty():
        _draw(found)
    else:
        _tell(found)
    return Exit.OK


def recommended(run: Run, users: Sequence[int], k: int) -> list[Recommended]:
    """The k best for each user by the run's best snapshot, else its newest."""
    entry, _, kind = str(run.config().experiment.get("entry")).partition(":")
    if entry != _OURS:
        raise EchelonError(
            Fault(
                f"run {run.name} is of the experiment {entry}, which knows no movies",
                "give a run of experiment=movielens, movielens_dot or movielens_ranking",
            )
        )
    weights = _weights(run)
    ratings = _ratings(run, weights)
    import torch

    from echelon.experiments.movielens import MODELS

    model = MODELS[kind].of(weights)
    model.load_state_dict(weights)
    model.eval()
    names = ratings.titles()
    with torch.inference_mode():
        return [_for_one(model, ratings, names, user, k) for user in users]


def _for_one(model: Any, ratings: Ratings, names: list[str], user: int, k: int) -> Recommended:
    import numpy as np
    import torch

    dense = int(np.searchsorted(ratings.user_ids, user))
    known = dense < ratings.num_users and int(ratings.user_ids[dense]) == user
    if known:
        rows = np.flatnonzero(ratings.users == dense)
        rows = rows[np.argsort(ratings.times[rows], kind="stable")]
        rated = torch.from_numpy(ratings.items[rows]).long()
        scores = model.scores(dense, rated, torch.from_numpy(ratings.ratings[rows]))
        scores[rated] = -torch.inf
        k = min(k, ratings.num_items - len(np.unique(ratings.items[rows])))
    else:
        scores = torch.from_numpy(np.bincount(ratings.items, minlength=ratings.num_items))
        k = min(k, ratings.num_items)
    return Recommended(user, known, _first(scores, ratings, names, k))


def _first(scores: Tensor, ratings: Ratings, names: list[str], k: int) -> list[Movie]:
    best = scores.topk(k)
    pairs = zip(best.indices.tolist(), best.values.tolist(), strict=True)
    return [Movie(int(ratings.item_ids[item]), names[item], score) for item, score in pairs]


# --- what a run left ---


def _weights(run: Run) -> dict[str, Tensor]:
    from echelon.train.snapshots import SnapshotDamaged, best, newest, verify

    folder = best(run.snapshots)
    if folder is not None:
        try:
            return _model_of(verify(folder))
        except SnapshotDamaged as error:
            print(f"warning: {folder} is damaged: {error}; the newest is taken", file=sys.stderr)
    snapshot, damaged = newest(run.snapshots)
    if snapshot is None:
        why = f"those there are damaged: {damaged[0].reason}" if damaged else "none was saved"
        raise EchelonError(
            Fault(
                f"run {run.name} has no snapshot to recommend from; {why}",
                f"train on until one is saved: echelon resume {run.name}",
            ),
            exit=Exit.NOT_FOUND,
        )
    return _model_of(snapshot)


def _model_of(snapshot: Snapshot) -> dict[str, Tensor]:
    weights: dict[str, Tensor] = snapshot.load("model")
    return weights


def _ratings(run: Run, weights: dict[str, Tensor]) -> Ratings:
    from echelon.data.movielens import load
    from echelon.experiments.movielens.opened import fingerprint_of

    folder = str(run.config().experiment["data"])
    try:
        ratings = load(folder)
    except EchelonError as error:
        where = Fault(
            f"run {run.name} was trained on data={folder}, which is not to be read from here",
            "call this from the folder the training was started in",
        )
        raise EchelonError(*error.faults, where, exit=error.exit) from error
    if ratings.fingerprint != fingerprint_of(weights):
        raise EchelonError(
            Fault(
                f"the ratings in {folder} are not those that run {run.name} was trained on",
                "put the old files back, or train again: its numbers stand for other movies now",
            )
        )
    return ratings


# --- on the screen ---


def _heading(one: Recommended) -> str:
    if one.known:
        return f"for user {one.user}"
    return f"user {one.user} is not in the data: what most people rated"


def _draw(found: list[Recommended]) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False)
    for one in found:
        console.print(_heading(one), style="bold")
        table = Table(box=None, pad_edge=False)
        table.add_column("", justify="right", style="dim")
        table.add_column("title", overflow="fold")
        table.add_column("score" if one.known else "ratings", justify="right")
        for place, movie in enumerate(one.movies, 1):
            table.add_row(str(place), movie.title, _score(one, movie))
        console.print(table)


def _tell(found: list[Recommended]) -> None:
    """A line for each movie, for other programs; what is not one goes beside."""
    for one in found:
        if not one.known:
            print(_heading(one), file=sys.stderr)
        for place, movie in enumerate(one.movies, 1):
            print(one.user, place, _score(one, movie), movie.movie, movie.title, sep="\t")


def _score(one: Recommended, movie: Movie) -> str:
    return f"{movie.score:.3f}" if one.known else f"{movie.score:.0f}"


def _plain(one: Recommended) -> dict[str, Any]:
    return {**vars(one), "movies": [vars(movie) for movie in one.movies]}
