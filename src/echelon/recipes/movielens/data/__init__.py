"""MovieLens as data: downloading a release, reading it, and splitting its ratings."""

from echelon.recipes.movielens.data.prepared_cache import load_ratings
from echelon.recipes.movielens.data.ratings import Ratings
from echelon.recipes.movielens.data.splits import split_newest, split_randomly

__all__ = ["Ratings", "load_ratings", "split_newest", "split_randomly"]
