"""`echelon recommend`: titles that a run's best snapshot recommends, without those the user has
rated."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from echelon.errors import EchelonError, ExitCode, Fault
from echelon.runs.run_folder import Run

if TYPE_CHECKING:
    from torch import Tensor

    from echelon.recipes.movielens.data import Ratings
    from echelon.recipes.movielens.experiments import MovieModel
    from echelon.snapshot.reader import Snapshot

_MOVIELENS_MODULE = "echelon.recipes.movielens.experiments"
"""The entry's module in the configuration of a run that this command can use."""


@dataclass(frozen=True)
class RecommendedMovie:
    """A movie and its score. The fields are keys of `--json`."""

    movie: int
    """The id in MovieLens."""
    title: str
    score: float


@dataclass(frozen=True)
class UserRecommendations:
    """The movies for one user. The fields are keys of `--json`."""

    user: int
    known: bool
    """Whether the data has ratings of the user; else these are the most rated movies."""
    movies: list[RecommendedMovie]


def print_recommendations(run: Run, users: Sequence[int], k: int, as_json: bool) -> int:
    """Print recommendations as JSON, as a table on a terminal, or as tab-separated lines."""
    recommendations = compute_recommendations(run, users, k)
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="replace")  # an ASCII stream cannot encode every title
    if as_json:
        print(
            json.dumps([_to_dict(recommendation) for recommendation in recommendations], indent=2)
        )
    elif sys.stdout.isatty():
        _print_table(recommendations)
    else:
        _print_tab_separated(recommendations)
    return ExitCode.OK


def compute_recommendations(run: Run, users: Sequence[int], k: int) -> list[UserRecommendations]:
    """Return the k best movies for each user by the run's best snapshot, or its newest if the best
    is damaged."""
    # The code is ours, whatever its settings name: anybody's model can be asked.
    config = run.read_config(runs_code=False)
    entry, _, kind = str(config.experiment.get("entry")).partition(":")
    if entry != _MOVIELENS_MODULE:
        raise EchelonError(
            Fault(
                f"run {run.name} was trained with {entry}, which is not an experiment on MovieLens",
                "give a run of experiment=movielens, movielens_dot or movielens_ranking",
            )
        )
    weights = _load_best_weights(run)
    ratings = _load_run_ratings(run, weights)
    import torch

    from echelon.recipes.movielens.experiments import MODELS

    model = MODELS[kind].from_weight_shapes(weights)
    model.load_state_dict(weights)
    model.eval()
    names = ratings.get_titles()
    with torch.inference_mode():
        return [_recommend_for_user(model, ratings, names, user, k) for user in users]


def _recommend_for_user(
    model: MovieModel, ratings: Ratings, names: list[str], user: int, k: int
) -> UserRecommendations:
    """Return the k best movies that the user has not rated; for an unknown user, the most rated
    ones."""
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
    """Return the k movies with the highest scores."""
    best = scores.topk(k)
    pairs = zip(best.indices.tolist(), best.values.tolist(), strict=True)
    return [
        RecommendedMovie(int(ratings.item_ids[item]), names[item], score) for item, score in pairs
    ]


# --- weights and ratings of the run ---


def _load_best_weights(run: Run) -> dict[str, Tensor]:
    """Return the model's weights from the best snapshot that is intact."""
    from echelon.snapshot.layout import find_best
    from echelon.snapshot.manifest import InvalidSnapshotError
    from echelon.snapshot.reader import find_newest, verify_snapshot

    folder = find_best(run.snapshots_folder)
    if folder is not None:
        try:
            return _load_model_weights(verify_snapshot(folder))
        except InvalidSnapshotError as error:
            print(f"warning: {folder} is damaged: {error}; using the newest one", file=sys.stderr)
    snapshot, damaged = find_newest(run.snapshots_folder)
    if snapshot is None:
        why = f"those there are damaged: {damaged[0].reason}" if damaged else "none was saved"
        raise EchelonError(
            Fault(
                f"run {run.name} has no snapshot to recommend from; {why}",
                f"train until one is saved: echelon resume {run.name}",
            ),
            exit=ExitCode.NOT_FOUND,
        )
    return _load_model_weights(snapshot)


def _load_model_weights(snapshot: Snapshot) -> dict[str, Tensor]:
    """Return the model's weights of a snapshot."""
    weights: dict[str, Tensor] = snapshot.load_part("model")
    return weights


def _load_run_ratings(run: Run, weights: dict[str, Tensor]) -> Ratings:
    """Return the ratings that the run was trained on, or raise if they have changed."""
    from echelon.recipes.movielens.data import load_ratings
    from echelon.recipes.movielens.experiment_data import decode_fingerprint

    folder = str(run.read_config(runs_code=False).experiment["data"])
    try:
        ratings = load_ratings(folder)
    except EchelonError as error:
        where = Fault(
            f"run {run.name} was trained on data={folder}, which cannot be read from here",
            "call this from the folder the training was started in",
        )
        raise EchelonError(*error.faults, where, exit=error.exit) from error
    if ratings.fingerprint != decode_fingerprint(weights):
        raise EchelonError(
            Fault(
                f"the ratings in {folder} are not those that run {run.name} was trained on",
                "restore the old files, or train again: the snapshot has ids of other movies",
            )
        )
    return ratings


# --- output ---


def _format_heading(recommendation: UserRecommendations) -> str:
    """Return the line above the movies of a user."""
    if recommendation.known:
        return f"for user {recommendation.user}"
    return f"user {recommendation.user} is not in the data: what most people rated"


def _print_table(recommendations: list[UserRecommendations]) -> None:
    """Print a table for each user."""
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False)
    for recommendation in recommendations:
        console.print(_format_heading(recommendation), style="bold")
        table = Table(box=None, pad_edge=False)
        table.add_column("", justify="right", style="dim")
        table.add_column("title", overflow="fold")
        table.add_column("score" if recommendation.known else "ratings", justify="right")
        for rank, movie in enumerate(recommendation.movies, 1):
            table.add_row(str(rank), movie.title, _format_score(recommendation, movie))
        console.print(table)


def _print_tab_separated(recommendations: list[UserRecommendations]) -> None:
    """Print a line for each movie to stdout; notes go to stderr."""
    for recommendation in recommendations:
        if not recommendation.known:
            print(_format_heading(recommendation), file=sys.stderr)
        for rank, movie in enumerate(recommendation.movies, 1):
            print(
                recommendation.user,
                rank,
                _format_score(recommendation, movie),
                movie.movie,
                movie.title,
                sep="\t",
            )


def _format_score(recommendation: UserRecommendations, movie: RecommendedMovie) -> str:
    """Return the score, or for an unknown user the number of ratings."""
    return f"{movie.score:.3f}" if recommendation.known else f"{movie.score:.0f}"


def _to_dict(recommendation: UserRecommendations) -> dict[str, Any]:
    """Return the recommendations of a user as plain data."""
    return {**vars(recommendation), "movies": [vars(movie) for movie in recommendation.movies]}
