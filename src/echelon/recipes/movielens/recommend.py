"""`echelon recommend`: titles from a run's best snapshot, without what the user has rated."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from echelon.errors import EchelonError, Exit, Fault
from echelon.runs.run_folder import Run

if TYPE_CHECKING:
    from torch import Tensor

    from echelon.recipes.movielens.data import Ratings
    from echelon.recipes.movielens.experiments import MovieModel
    from echelon.snapshot.reader import Snapshot

_MOVIELENS_MODULE = "echelon.recipes.movielens.experiments"


@dataclass(frozen=True)
class RecommendedMovie:
    movie: int
    """MovieLens' own number."""
    title: str
    score: float


@dataclass(frozen=True)
class UserRecommendations:
    user: int
    known: bool
    movies: list[RecommendedMovie]


def print_recommendations(run: Run, users: Sequence[int], k: int, as_json: bool) -> int:
    recommendations = compute_recommendations(run, users, k)
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="replace")  # titles have letters that not every stream has
    if as_json:
        print(json.dumps([_to_dict(one) for one in recommendations], indent=2))
    elif sys.stdout.isatty():
        _print_table(recommendations)
    else:
        _print_tab_separated(recommendations)
    return Exit.OK


def compute_recommendations(run: Run, users: Sequence[int], k: int) -> list[UserRecommendations]:
    """The k best for each user by the run's best snapshot, else its newest."""
    entry, _, kind = str(run.read_config().experiment.get("entry")).partition(":")
    if entry != _MOVIELENS_MODULE:
        raise EchelonError(
            Fault(
                f"run {run.name} is of the experiment {entry}, which knows no movies",
                "give a run of experiment=movielens, movielens_dot or movielens_ranking",
            )
        )
    weights = _load_best_weights(run)
    ratings = _load_run_ratings(run, weights)
    import torch

    from echelon.recipes.movielens.experiments import MODELS

    model = MODELS[kind].from_weights(weights)
    model.load_state_dict(weights)
    model.eval()
    names = ratings.titles()
    with torch.inference_mode():
        return [_recommend_for_user(model, ratings, names, user, k) for user in users]


def _recommend_for_user(
    model: MovieModel, ratings: Ratings, names: list[str], user: int, k: int
) -> UserRecommendations:
    import numpy as np
    import torch

    dense = int(np.searchsorted(ratings.user_ids, user))
    is_known = dense < ratings.num_users and int(ratings.user_ids[dense]) == user
    if is_known:
        rows = np.flatnonzero(ratings.users == dense)
        rows = rows[np.argsort(ratings.times[rows], kind="stable")]
        rated = torch.from_numpy(ratings.items[rows]).long()
        scores = model.score_movies(dense, rated, torch.from_numpy(ratings.ratings[rows]))
        scores[rated] = -torch.inf
        k = min(k, ratings.num_items - len(np.unique(ratings.items[rows])))
    else:
        scores = torch.from_numpy(np.bincount(ratings.items, minlength=ratings.num_items))
        k = min(k, ratings.num_items)
    return UserRecommendations(user, is_known, _take_best(scores, ratings, names, k))


def _take_best(
    scores: Tensor, ratings: Ratings, names: list[str], k: int
) -> list[RecommendedMovie]:
    best = scores.topk(k)
    pairs = zip(best.indices.tolist(), best.values.tolist(), strict=True)
    return [
        RecommendedMovie(int(ratings.item_ids[item]), names[item], score) for item, score in pairs
    ]


# --- what a run left ---


def _load_best_weights(run: Run) -> dict[str, Tensor]:
    from echelon.snapshot.reader import (
        InvalidSnapshotError,
        find_best,
        find_newest,
        verify_snapshot,
    )

    folder = find_best(run.snapshots_folder)
    if folder is not None:
        try:
            return _load_model_weights(verify_snapshot(folder))
        except InvalidSnapshotError as error:
            print(f"warning: {folder} is damaged: {error}; the newest is taken", file=sys.stderr)
    snapshot, damaged = find_newest(run.snapshots_folder)
    if snapshot is None:
        why = (
            f"those there are damaged: {damaged[0].describe_os_error}"
            if damaged
            else "none was saved"
        )
        raise EchelonError(
            Fault(
                f"run {run.name} has no snapshot to recommend from; {why}",
                f"train on until one is saved: echelon resume {run.name}",
            ),
            exit=Exit.NOT_FOUND,
        )
    return _load_model_weights(snapshot)


def _load_model_weights(snapshot: Snapshot) -> dict[str, Tensor]:
    weights: dict[str, Tensor] = snapshot.load_part("model")
    return weights


def _load_run_ratings(run: Run, weights: dict[str, Tensor]) -> Ratings:
    from echelon.recipes.movielens.data import load_ratings
    from echelon.recipes.movielens.split_ratings import decode_fingerprint

    folder = str(run.read_config().experiment["data"])
    try:
        ratings = load_ratings(folder)
    except EchelonError as error:
        where = Fault(
            f"run {run.name} was trained on data={folder}, which is not to be read from here",
            "call this from the folder the training was started in",
        )
        raise EchelonError(*error.faults, where, exit=error.exit) from error
    if ratings.fingerprint != decode_fingerprint(weights):
        raise EchelonError(
            Fault(
                f"the ratings in {folder} are not those that run {run.name} was trained on",
                "put the old files back, or train again: its numbers stand for other movies now",
            )
        )
    return ratings


# --- on the screen ---


def _format_heading(recommendation: UserRecommendations) -> str:
    if recommendation.known:
        return f"for user {recommendation.user}"
    return f"user {recommendation.user} is not in the data: what most people rated"


def _print_table(recommendations: list[UserRecommendations]) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False)
    for one in recommendations:
        console.print(_format_heading(one), style="bold")
        table = Table(box=None, pad_edge=False)
        table.add_column("", justify="right", style="dim")
        table.add_column("title", overflow="fold")
        table.add_column("score" if one.known else "ratings", justify="right")
        for place, movie in enumerate(one.movies, 1):
            table.add_row(str(place), movie.title, _format_score(one, movie))
        console.print(table)


def _print_tab_separated(recommendations: list[UserRecommendations]) -> None:
    """A line for each movie, for other programs; what is not one goes beside."""
    for one in recommendations:
        if not one.known:
            print(_format_heading(one), file=sys.stderr)
        for place, movie in enumerate(one.movies, 1):
            print(one.user, place, _format_score(one, movie), movie.movie, movie.title, sep="\t")


def _format_score(recommendation: UserRecommendations, movie: RecommendedMovie) -> str:
    return f"{movie.score:.3f}" if recommendation.known else f"{movie.score:.0f}"


def _to_dict(recommendation: UserRecommendations) -> dict[str, Any]:
    return {**vars(recommendation), "movies": [vars(movie) for movie in recommendation.movies]}
