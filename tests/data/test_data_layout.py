"""Data that changed since a snapshot is named; a snapshot given by its path may have other data."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from echelon.data.chunk_order import ChunkWindows
from echelon.data.data_layout import DataLayout, describe_layout, require_same_layout
from echelon.data.formats.reader import ChunkTable
from echelon.errors import EchelonError


def describe(lengths: Sequence[int], window_bytes: int = 4) -> DataLayout:
    starts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    windows = ChunkWindows(ChunkTable(starts, np.array(lengths, np.int64)), window_bytes)
    return describe_layout(int(starts[-1]), windows)


def make_info(layout: DataLayout) -> dict[str, object]:
    return {"step": 7, "data": layout._asdict()}


@pytest.mark.parametrize(
    ("then", "now", "change"),
    [
        (DataLayout(10), DataLayout(11), "11 samples, not 10"),
        (DataLayout(10), describe([5, 5]), "shuffled in 2 chunks, not all together"),
        (describe([5, 5]), describe([4, 4, 2]), "shuffled in 3 chunks, not in 2 chunks"),
        (describe([5, 5]), describe([5, 5], 5), "window_bytes=5, not 4"),
        (describe([5, 5]), describe([6, 4]), "its chunks begin at other samples"),
        (DataLayout(10), DataLayout(11, grouping="rows"), "it has rows, not plain samples"),
    ],
)
def test_what_changed_is_named(then: DataLayout, now: DataLayout, change: str) -> None:
    with pytest.raises(EchelonError, match=change) as caught:
        require_same_layout(make_info(then), now, "auto")
    [fault] = caught.value.faults
    assert "since the snapshot of step 7" in fault.what
    assert "trainer.resume=never" in fault.do
    note = require_same_layout(make_info(then), now, "runs/other/snapshots/best")
    assert note is not None
    assert change in note


def test_the_same_layout_and_an_old_snapshot_say_nothing() -> None:
    assert require_same_layout(make_info(describe([5, 5])), describe([5, 5]), "auto") is None
    assert require_same_layout({"step": 7}, describe([5, 5]), "auto") is None
