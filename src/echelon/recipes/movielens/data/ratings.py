"""Ratings by dense ids, and what the movies are called."""

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
    """In the order of the file. What `load` gives is mapped from disk: read-only, shared by the
    processes of a machine, in memory only as far as it was touched."""

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
    """int64 [I], likewise; movies that nobody rated have no dense id."""
    fingerprint: str
    """Of the files these came from: the same content has the same."""
    prepared: Path | None = None
    """The folder they are mapped from; none when they are made up."""

    @property
    def num_users(self) -> int:
        return len(self.user_ids)

    @property
    def num_items(self) -> int:
        return len(self.item_ids)

    def titles(self) -> list[str]:
        """By dense item; `movie 123` where the set does not name it."""
        names = self._movies
        return [names[i][0] if i in names else f"movie {i}" for i in self.item_ids.tolist()]

    def genres(self) -> list[list[str]]:
        """By dense item; none where the set lists none."""
        names = self._movies
        return [names[i][1] if i in names else [] for i in self.item_ids.tolist()]

    @cached_property
    def _movies(self) -> dict[int, tuple[str, list[str]]]:
        if self.prepared is None:
            return {}
        content: dict[str, Any] = json.loads(
            (self.prepared / MOVIES_FILE).read_text(encoding="utf-8")
        )
        return {int(number): (title, genres) for number, (title, genres) in content.items()}
