"""The three experiments on MovieLens, as their `entry` names them: `taste` and `dot` predict
ratings, `ranking` predicts which movie a user rates next."""

from typing import TypeAlias

from echelon.recipes.movielens.matrix_factorization import MatrixFactorization
from echelon.recipes.movielens.matrix_factorization import experiment as dot
from echelon.recipes.movielens.next_item import NextItemModel
from echelon.recipes.movielens.next_item import experiment as ranking
from echelon.recipes.movielens.ridge_regression import UserRidgeModel
from echelon.recipes.movielens.ridge_regression import experiment as taste

MovieModel: TypeAlias = UserRidgeModel | MatrixFactorization | NextItemModel
"""Each has `from_weight_shapes` and `score_movies`, which `echelon recommend` calls."""

MODELS: dict[str, type[MovieModel]] = {
    "taste": UserRidgeModel,
    "dot": MatrixFactorization,
    "ranking": NextItemModel,
}
"""The model that each experiment function trains."""

__all__ = ["MODELS", "MovieModel", "dot", "ranking", "taste"]
