"""MovieLens, three ways: ratings from a taste that is solved for, ratings from plain embeddings,
and what a user rates next."""

from echelon.experiments.movielens.dots import Dot
from echelon.experiments.movielens.dots import experiment as dot
from echelon.experiments.movielens.nexts import Next
from echelon.experiments.movielens.nexts import experiment as ranking
from echelon.experiments.movielens.tastes import Taste
from echelon.experiments.movielens.tastes import experiment as taste

MODELS: dict[str, type[Taste | Dot | Next]] = {"taste": Taste, "dot": Dot, "ranking": Next}
"""By the function that trains them."""

__all__ = ["MODELS", "dot", "ranking", "taste"]
