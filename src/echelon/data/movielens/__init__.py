"""MovieLens: getting a set, reading it, and splitting its ratings."""

from echelon.data.movielens.cache import load
from echelon.data.movielens.ratings import Ratings
from echelon.data.movielens.splits import last_out_split, random_split

__all__ = ["Ratings", "last_out_split", "load", "random_split"]
