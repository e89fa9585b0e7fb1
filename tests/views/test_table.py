"""The renderer of tables: alignment, and what it does where the terminal is narrow."""

from __future__ import annotations

import pytest

from echelon.views.table import RowNote, Table, TableColumn, choose_table

NAMES = TableColumn("NAME", ["first", "another-one"], min_width=4)
STATES = TableColumn("STATE", ["ok", "failed"], styles=["green", "red"], priority=1)
TIMES = TableColumn("TIME", ["1s", "12m"], is_right_aligned=True, priority=2)
TABLE = Table([NAMES, STATES, TIMES])


def draw(table: Table, width: int) -> list[str]:
    return [line.plain for line in table.render(width)]


def test_words_are_left_and_numbers_right() -> None:
    assert draw(TABLE, 80) == [
        "NAME         STATE   TIME",
        "first        ok        1s",
        "another-one  failed   12m",
    ]
    assert TABLE.width == 25


def test_no_line_ends_in_spaces() -> None:
    assert draw(Table([TIMES, NAMES]), 80) == ["TIME  NAME", "  1s  first", " 12m  another-one"]


@pytest.mark.parametrize(
    ("width", "titles"),
    [
        (25, ["NAME", "STATE", "TIME"]),
        (24, ["NAME", "STATE"]),
        (19, ["NAME", "STATE"]),
        (18, ["NAME", "TIME"]),
        (16, ["NAME"]),
    ],
)
def test_columns_that_do_not_fit_go_by_priority(width: int, titles: list[str]) -> None:
    lines = draw(TABLE, width)
    assert lines[0].split() == titles
    assert "another-one" in lines[2], "the others stay whole"


def test_a_column_shrinks_no_further_than_it_may() -> None:
    pair = Table([NAMES, TableColumn("SIZE", ["1", "22"])])
    assert draw(pair, 13) == ["NAME     SIZE", "first    1", "anothe…  22"]
    assert draw(pair, 10) == ["NAME  SIZE", "fir…  1", "ano…  22"]
    assert draw(pair, 9) == ["NAME  SI…", "fir…  1", "ano…  22"]


def test_the_widest_column_shrinks_first() -> None:
    wide = TableColumn("a", ["0.123456"], min_width=1)
    less = TableColumn("b", ["0.12"], min_width=1)
    assert draw(Table([wide, less]), 10) == ["a     b", "0.1…  0.12"]
    assert draw(Table([wide, less]), 8) == ["a    b", "0.…  0.…"]


def test_what_can_neither_go_nor_shrink_is_cut() -> None:
    assert draw(Table([TableColumn("A", ["abcdef"]), TableColumn("B", ["x"])]), 4) == [
        "A  …",
        "abc…",
    ]


def test_a_table_may_leave_long_lines_to_the_terminal() -> None:
    columns = [TableColumn("A", ["abcdef"]), TableColumn("B", ["x"])]
    assert draw(Table(columns, is_cut=False), 4) == ["A       B", "abcdef  x"]


def test_notes_are_below_their_rows() -> None:
    noted = Table([NAMES], [None, RowNote("it broke in the night", "red")], indent=1)
    lines = noted.render(16)
    assert [line.plain for line in lines] == [
        " NAME",
        " first",
        " another-one",
        "  └ it broke in…",
    ]
    assert lines[-1].style == "red"


def test_styles_are_those_of_cells() -> None:
    header, first, second = TABLE.render(80)
    assert [(span.start, span.style) for span in header.spans] == [(0, "bold")]
    assert [(span.start, span.style) for span in first.spans] == [(13, "green")]
    assert [(span.start, span.style) for span in second.spans] == [(13, "red")]


def test_the_first_table_that_fits_is_taken() -> None:
    narrow, narrowest = Table([NAMES, TIMES]), Table([NAMES])
    tables = [TABLE, narrow, narrowest]
    assert [choose_table(tables, width) for width in (25, 24, 12, 3)] == [
        TABLE,
        narrow,
        narrowest,
        narrowest,
    ]


def test_ascii_is_enough_for_a_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LC_ALL", "C")
    table = Table([TableColumn("SIZE", ["2×4 and more"])], [RowNote("–", "")])
    assert draw(table, 5) == ["SIZE", "2x4 ~", "  ` -"]
