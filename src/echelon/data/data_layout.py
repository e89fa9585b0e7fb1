"""What decides the order of samples besides the seed: the number of samples, and where their chunks
begin.

A run that went on over data of another layout would repeat some samples of its epoch and leave out
others. So a snapshot says what the layout was, and ranks compare theirs.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import xxhash

from echelon.data.chunk_order import ChunkWindows
from echelon.errors import EchelonError, Fault
from echelon.utils.text import format_count

LAYOUT_KEY = "data"
"""Of a snapshot's info."""


class DataLayout(NamedTuple):
    """The layout of data, small enough for a snapshot's info and a message between ranks."""

    samples: int
    chunks: int = 0
    """0 where all samples are shuffled together."""
    window_bytes: int = 0
    digest: str = ""
    """Of where chunks begin and how large they are, and of a Subset, which samples they have."""
    mixture: str = ""
    """The sources of a mixture, with weights and sizes."""
    grouping: str = ""
    """How documents were packed into samples, or samples into batches."""


def describe_layout(samples: int, windows: ChunkWindows | None) -> DataLayout:
    """Return the layout of data that is shuffled in windows of chunks, or all together."""
    if windows is None:
        return DataLayout(samples)
    digest = xxhash.xxh3_128()
    columns = [windows.chunks.starts, windows.chunks.sizes_bytes]
    if windows.rows is not None:
        columns.append(windows.rows)
    for column in columns:
        digest.update(column.astype("<i8").tobytes())
    return DataLayout(
        samples, len(windows.chunks.sizes_bytes), windows.window_bytes, digest.hexdigest()
    )


def find_layout_change(then: DataLayout, now: DataLayout) -> str | None:
    """Return what differs between two layouts, the second one first; None where nothing does."""
    if now.grouping != then.grouping:  # it also changes the numbers below
        return f"it has {now.grouping or 'plain samples'}, not {then.grouping or 'plain samples'}"
    for name, old, new in zip(DataLayout._fields, then, now, strict=True):
        if old == new:
            continue
        if name == "samples":
            return f"{format_count(now.samples, 'sample')}, not {then.samples:,}"
        if name == "chunks":
            counts = [f"in {n:,} chunks" if n else "all together" for n in (now[1], then[1])]
            return f"its samples are shuffled {counts[0]}, not {counts[1]}"
        if name == "mixture":
            return f"it mixes {now.mixture or 'nothing'}, not {then.mixture or 'nothing'}"
        if name == "window_bytes":
            return f"window_bytes={now.window_bytes}, not {then.window_bytes}"
        return "its chunks begin at other samples or have other sizes"
    return None


def require_same_layout(info: Mapping[str, Any], now: DataLayout, resume: str) -> str | None:
    """Raise where the data of a run that resumes is not laid out as in its snapshot.

    Of a snapshot that the user has given by its path (`trainer.resume`) the data may be another
    one: then a note is returned. Snapshots of older versions do not say what it was.
    """
    if (stored := info.get(LAYOUT_KEY)) is None:
        return None
    change = find_layout_change(DataLayout(**stored), now)
    if change is None:
        return None
    if resume not in ("auto", "never"):
        return f"note: train_data is not laid out as it was for the snapshot: {change}"
    raise EchelonError(
        Fault(
            f"train_data has changed since the snapshot of step {info['step']}: {change}; "
            "the run would go on in another order, with some samples of the epoch twice and some "
            "never",
            "bring the data back, or start anew: trainer.resume=never, or another run.name; the "
            "path of a snapshot as trainer.resume goes on all the same",
        )
    )
