"""The models of MovieLens against what they claim, on made-up ratings."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from torchmetrics.retrieval import RetrievalNormalizedDCG

from echelon.recipes.movielens.data import Ratings
from echelon.recipes.movielens.matrix_factorization import MatrixFactorization
from echelon.recipes.movielens.metrics import make_ranking_metrics
from echelon.recipes.movielens.ndcg import SingleTargetNDCG
from echelon.recipes.movielens.next_item import NextItemModel
from echelon.recipes.movielens.rating_histories import PAGE_LENGTH, RatingHistories
from echelon.recipes.movielens.ridge_regression import UserRidgeModel

_DATA = torch.zeros(4, dtype=torch.uint8)


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    """Small matrices: on a busy machine threads only wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def _ratings(counts: list[int], items: int = 300) -> Ratings:
    draw = np.random.default_rng(0)
    rated = [draw.permutation(items)[:count] for count in counts]
    users = np.repeat(np.arange(len(counts)), counts)
    order = draw.permutation(len(users))
    return Ratings(
        users=users[order].astype(np.int32),
        items=np.concatenate(rated)[order].astype(np.int32),
        ratings=draw.integers(1, 11, len(users)).astype(np.float32) / 2,
        times=draw.integers(0, 10**6, len(users)),
        user_ids=np.arange(len(counts)) + 1,
        item_ids=np.arange(items) + 1,
        fingerprint="made-up",
    )


@pytest.fixture
def taste() -> UserRidgeModel:
    torch.manual_seed(0)
    model = UserRidgeModel(torch.randn(300, 3), 3.5, 5, _DATA)
    for p in (model.biases.weight, model.common, model.mixing, model.vectors.weight):
        torch.nn.init.normal_(p, std=0.3)
    return model.double()


def test_pages_contain_every_rating_of_the_requested_users_once() -> None:
    ratings = _ratings([PAGE_LENGTH, 0, 1, 3 * PAGE_LENGTH + 5, PAGE_LENGTH + 1])
    histories = RatingHistories(ratings, np.arange(len(ratings.users)))
    asked = torch.tensor([4, 1, 3, 0])
    pages = histories.gather_pages(asked)
    assert len(pages.owner) == 2 + 0 + 4 + 1
    for place, user in enumerate(asked.tolist()):
        mine = pages.is_rating & (pages.owner == place)[:, None]
        of_user = ratings.users == user
        expected = dict(zip(ratings.items[of_user], ratings.ratings[of_user], strict=True))
        found = zip(pages.items[mine].tolist(), pages.ratings[mine].tolist(), strict=True)
        assert dict(found) == expected


def test_windows_contain_earlier_ratings_newest_first() -> None:
    ratings = _ratings([3, 5])
    histories = RatingHistories(ratings, np.arange(8))
    in_time = [
        ratings.items[
            np.flatnonzero(ratings.users == u)[np.argsort(ratings.times[ratings.users == u])]
        ]
        for u in (0, 1)
    ]
    windows = histories.gather_windows(torch.tensor([0, 3]), torch.tensor([2, 8]), 4, filler=-1)
    assert windows.tolist() == [
        [in_time[0][1], in_time[0][0], -1, -1],
        in_time[1][::-1][:4].tolist(),
    ]


def test_the_closed_form_equals_leaving_each_rating_out(taste: UserRidgeModel) -> None:
    ratings = _ratings([PAGE_LENGTH + 9, 4])
    everything = np.arange(len(ratings.users))
    histories = RatingHistories(ratings, everything)
    histories.ratings = histories.ratings.double()
    pages = histories.gather_pages(torch.tensor([0, 1]))
    errors = taste.compute_leave_one_out_errors(pages)
    assert errors[~pages.is_rating].abs().max() == 0
    for row in (0, 3, len(everything) - 1):
        user, item = int(ratings.users[row]), int(ratings.items[row])
        rest = RatingHistories(ratings, np.delete(everything, row))
        rest.ratings = rest.ratings.double()
        tastes = taste.solve_tastes(rest.gather_pages(torch.tensor([user])))
        expected = float(ratings.ratings[row]) - taste.predict_ratings(tastes, torch.tensor([item]))
        at = pages.is_rating & (pages.owner == user)[:, None] & (pages.items == item)
        torch.testing.assert_close(errors[at], expected)


def test_a_taste_is_a_ridge_regression(taste: UserRidgeModel) -> None:
    items, rated = torch.arange(40), torch.linspace(0.5, 5, 40, dtype=torch.double)
    design, offset = taste.describe_movies(items)
    gram = design.T @ design + torch.eye(design.shape[1])
    expected = offset[7] + design[7] @ torch.linalg.solve(gram, design.T @ (rated - offset))
    torch.testing.assert_close(taste.score_movies(0, items, rated)[7], expected)


def test_ndcg_equals_torchmetrics() -> None:
    torch.manual_seed(0)
    scores, target = torch.randn(50, 30), torch.randint(0, 30, (50,))
    ours, theirs = SingleTargetNDCG(10), RetrievalNormalizedDCG(top_k=10)
    for part in (slice(0, 20), slice(20, 50)):
        ours.update(scores[part], target[part])
    users = torch.arange(50)[:, None].expand(50, 30)
    relevant = torch.nn.functional.one_hot(target, 30)
    theirs.update(scores.flatten(), relevant.flatten(), indexes=users.flatten())
    assert float(ours.compute()) == pytest.approx(float(theirs.compute()), abs=1e-6)


@pytest.mark.parametrize("score", [float("nan"), 0.0])
def test_constant_scores_have_no_gain(score: float) -> None:
    gain = SingleTargetNDCG(10)
    gain.update(torch.full((4, 30), score), torch.tensor([0, 1, 2, 29]))
    assert float(gain.compute()) == 0


def test_recall_is_the_share_of_users_whose_movie_is_among_the_first_ten() -> None:
    scores = torch.arange(30.0).repeat(4, 1)
    recall = make_ranking_metrics(30)["recall"]
    recall.update(scores, torch.tensor([29, 20, 19, 0]))
    assert float(recall.compute()) == 0.5


def test_fewer_movies_than_k() -> None:
    recall = make_ranking_metrics(4)["recall"]
    recall.update(torch.randn(3, 4), torch.tensor([0, 1, 3]))
    assert float(recall.compute()) == 1


def test_diverged_parameters_give_a_loss_that_is_not_finite(taste: UserRidgeModel) -> None:
    ratings = _ratings([9, 4])
    histories = RatingHistories(ratings, np.arange(13))
    torch.nn.init.constant_(taste.vectors.weight, 1e200)
    assert (
        not taste.compute_leave_one_out_errors(histories.gather_pages(torch.tensor([0, 1])))
        .isfinite()
        .all()
    )


@pytest.mark.parametrize(
    "model",
    [
        UserRidgeModel(torch.randn(9, 2), 3.0, 4, _DATA),
        MatrixFactorization((5, 9), 4, [], _DATA),
        MatrixFactorization((5, 9), 4, [8, 3], _DATA),
        NextItemModel(9, 4, 6, _DATA),
    ],
    ids=["taste", "dot", "tower", "next"],
)
def test_a_model_is_restored_from_its_weights(
    model: UserRidgeModel | MatrixFactorization | NextItemModel,
) -> None:
    again = type(model).from_weight_shapes(model.state_dict())
    again.load_state_dict(model.state_dict())
    history = torch.tensor([1, 2, 3]), torch.tensor([4.0, 3.0, 5.0])
    torch.testing.assert_close(again.score_movies(2, *history), model.score_movies(2, *history))
    assert model.score_movies(2, *history).shape == (9,)
