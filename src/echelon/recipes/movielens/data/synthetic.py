"""Synthetic ratings of MovieLens' shape, for benchmarks and tests: skewed, sorted by user, no pair
twice. A model can learn nothing but biases from them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from echelon.recipes.movielens.data.ratings import Array, Ratings

if TYPE_CHECKING:
    import pyarrow

_FIRST_TIME, _SPAN_S = 789_652_004, 25 * 365 * 86_400
"""The range of MovieLens' own timestamps, from 1995."""
_BLOCK_ROWS = 1 << 20


def make_synthetic(n: int, users: int, items: int, seed: int) -> Ratings:
    """Return n ratings in memory.

    Popularity decreases about as in MovieLens: a tenth of the movies has most of the ratings,
    unless there are so few users that they must rate all movies.
    """
    if not 0 < n <= users * items // 2:
        raise ValueError(f"{n} ratings do not fit {users} users and {items} items; at most half")
    rng = np.random.default_rng(seed)
    user, item = np.divmod(_draw_pairs(n, users, items, rng), items)
    score = rng.standard_normal(n, dtype=np.float32)
    score *= 1.6
    score += (7 + rng.normal(0, 0.8, users).astype(np.float32))[user]
    score += rng.normal(0, 1.0, items).astype(np.float32)[item]
    stars = np.rint(score, out=score).clip(1, 10, out=score)
    stars *= 0.5
    user_ids, dense_users = _renumber_densely(user, users)
    item_ids, dense_items = _renumber_densely(item, items)
    return Ratings(
        users=dense_users,
        items=dense_items,
        ratings=stars,
        times=_FIRST_TIME + rng.integers(0, _SPAN_S, n),
        user_ids=user_ids + 1,
        item_ids=item_ids + 1,
        fingerprint=f"synthetic-{n}-{users}-{items}-{seed}",
    )


def _draw_pairs(n: int, users: int, items: int, rng: np.random.Generator) -> Array:
    """Return n distinct pairs as user * items + item, ascending.

    Popular pairs are drawn repeatedly, so drawing continues until there are enough distinct ones;
    the later draws are uniform.
    """
    movie_at = rng.permutation(items)
    pairs = np.empty(0, np.int64)
    skewed = 3
    while (missing := n - len(pairs)) > 0:
        draws = missing + missing // 4 + 16
        user, item = rng.integers(0, users, draws), rng.integers(0, items, draws)
        if skewed:
            rank = 0.04 * items * rng.standard_exponential(draws) ** 1.3
            item = movie_at[rank.astype(np.int64) % items]
            skewed -= 1
        pairs = np.concatenate([pairs, user * items + item])
        pairs.sort()  # np.unique takes several times as long on 20 million
        pairs = pairs[np.append(True, pairs[1:] != pairs[:-1])]
    is_kept = np.ones(len(pairs), bool)
    is_kept[rng.choice(len(pairs), len(pairs) - n, replace=False, shuffle=False)] = False
    return pairs[is_kept]


def _renumber_densely(numbers: Array, size: int) -> tuple[Array, Array]:
    """Return the original ids that occur, and every number as an index into them."""
    is_present = np.zeros(size, bool)
    is_present[numbers] = True
    ids = np.flatnonzero(is_present)
    dense = np.zeros(size, np.int32)
    dense[ids] = np.arange(len(ids), dtype=np.int32)
    return ids, dense[numbers]


def write_csv(ratings: Ratings, folder: Path) -> Path:
    """Write ratings.csv and movies.csv as GroupLens does, with their quotes; return the folder."""
    import pyarrow as pa
    from pyarrow import csv

    folder.mkdir(parents=True, exist_ok=True)
    columns = {"userId": pa.int64(), "movieId": pa.int64(), "rating": pa.decimal128(2, 1)}
    schema = pa.schema({**columns, "timestamp": pa.int64()})
    options = csv.WriteOptions(quoting_style="none")
    with csv.CSVWriter(folder / "ratings.csv", schema, write_options=options) as file:
        for start in range(0, len(ratings.users), _BLOCK_ROWS):
            file.write_table(_to_arrow_table(ratings, slice(start, start + _BLOCK_ROWS), schema))
    with (folder / "movies.csv").open("w", encoding="utf-8") as movies:
        movies.write("movieId,title,genres\n")
        for number in ratings.item_ids:
            movies.write(f'{number},"Movie {number}, The (1999)",Comedy|Drama\n')
    return folder


def _to_arrow_table(ratings: Ratings, rows: slice, schema: pyarrow.Schema) -> pyarrow.Table:
    """Return some rows as a pyarrow table."""
    import pyarrow as pa

    columns = (
        ratings.user_ids[ratings.users[rows]],
        ratings.item_ids[ratings.items[rows]],
        ratings.ratings[rows],
        ratings.times[rows],
    )
    arrays = [pa.array(c).cast(f.type) for c, f in zip(columns, schema, strict=True)]
    return pa.table(arrays, schema=schema)
