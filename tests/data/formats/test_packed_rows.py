"""Which columns are packed, and where there is room for them."""

from __future__ import annotations

import numpy as np
import pytest

from echelon.data.formats.packed_rows import TEXT_VIEW, FreeRows, PackedRows, choose_packed


def test_numbers_and_texts_of_one_type_are_packed() -> None:
    types = [
        {"x": "float", "text": "string", "list": "list<item: int64>", "i": "int64", "y": "double"},
        {"x": "float", "text": "string", "list": "list<item: int64>", "i": "", "y": "double"},
    ]
    columns = ["x", "text", "list", "i"]
    wide = choose_packed(types, columns, row_bytes=100, may_view=True)
    assert wide == {"x": np.float32, "text": TEXT_VIEW}
    assert choose_packed(types, columns, row_bytes=40, may_view=True) == {"x": np.float32}
    assert choose_packed(types, columns, row_bytes=100, may_view=False) == {"x": np.float32}


@pytest.mark.parametrize("names", [["i8", "f4", "i2"], ["f8", "b1"], ["u1"], ["f4"] * 9 + ["c16"]])
def test_taken_columns_are_those_that_were_written(names: list[str]) -> None:
    rows, rng = 300, np.random.default_rng(0)
    columns = {
        f"{place}": rng.integers(0, 100, rows).astype(name) for place, name in enumerate(names)
    }
    packed = PackedRows({name: each.dtype for name, each in columns.items()}, rows)
    true_bytes = sum(each.itemsize for each in columns.values())
    assert true_bytes <= packed.row_bytes <= true_bytes * 9 // 8
    for name, values in columns.items():
        packed.write(0, name, values[:100])
        packed.write(100, name, values[100:])
    wanted = rng.integers(0, rows, 20_000)
    taken = packed.take(wanted)
    for name, values in columns.items():
        np.testing.assert_array_equal(taken[name], values[wanted])
        assert taken[name].dtype == values.dtype
        assert taken[name].flags.c_contiguous
        assert taken[name].ctypes.data % 64 == 0


def test_rows_that_are_free_again_are_found() -> None:
    free = FreeRows(100)
    assert [free.find(40), free.find(40), free.find(40), free.find(20)] == [0, 40, None, 80]
    assert free.find(1) is None
    free.release(80, 20)
    free.release(0, 40)
    assert [free.find(50), free.find(10), free.find(30)] == [None, 0, 10]
    for first, rows in ((0, 10), (40, 40), (10, 30)):
        free.release(first, rows)
    assert free.find(100) == 0
    assert FreeRows(0).find(1) is None
