"""Ratings by dense ids, and the titles of the movies."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

Array: TypeAlias = "np.ndarray[Any, Any]"

MOVIES_FILE = "movies.json"


@dataclass(frozen=True, eq=False)
class Ratings:
    """All ratings in the order of the file.

    From `load_ratings`, the arrays are memory-mapped: read-only, shared by the processes of a
    machine, and in memory only as far as they were read.
    """

    users: Array
    """int32 [n], dense."""
    items: Array
    """int32 [n], dense."""
    ratings: Array
    """float32 [n]."""
    times: Array
    """int64 [n], seconds since 1970."""
    user_ids: Array
    """int64 [U]: the original id of each dense one, ascending."""
    item_ids: Array
    """int64 [I]: the original id of each dense one, ascending; movies without ratings have no dense
    id."""
    fingerprint: str
    """A hash of the files these were read from; equal content has an equal fingerprint."""
    prepared: Path | None = None
    """The folder they are mapped from; None for synthetic ratings."""

    @property
    def num_users(self) -> int:
        """The number of users with ratings."""
        return len(self.user_ids)

    @property
    def num_items(self) -> int:
        """The number of movies with ratings."""
        return len(self.item_ids)

    def get_titles(self) -> list[str]:
        """Return the title of each dense item; `movie 123` if the data set does not name it."""
        names = self._titles_and_genres
        return [names[i][0] if i in names else f"movie {i}" for i in self.item_ids.tolist()]

    def get_genres(self) -> list[list[str]]:
        """Return the genres of each dense item; empty if the data set lists none."""
        names = self._titles_and_genres
        return [names[i][1] if i in names else [] for i in self.item_ids.tolist()]

    @cached_property
    def _titles_and_genres(self) -> dict[int, tuple[str, list[str]]]:
        if self.prepared is None:
            return {}
        content: dict[str, Any] = json.loads(
            (self.prepared / MOVIES_FILE).read_text(encoding="utf-8")
        )
        return {int(number): (title, genres) for number, (title, genres) in content.items()}
