"""Finding the wrong lines of a file of ratings; slow, used only after fast reading has failed."""

from __future__ import annotations

import csv
import re
from collections.abc import Iterator
from itertools import islice

from echelon.errors import Fault
from echelon.recipes.movielens.data.formats import FIX_FILE_HINT, RATING_COLUMNS, RatingsFolder

LARGEST_ID = (1 << 28) - 1
"""A thousand times the largest of MovieLens, so that tables by original id stay small."""
_LARGEST_RATING = 3.4e38
_MAX_TIMESTAMP = 1 << 63
_MAX_FAULTS = 5
_INTEGER_PATTERN = re.compile(r"[+-]?\d+")
_DECIMAL_PATTERN = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?")


def find_bad_rows(source: RatingsFolder, good_rows: int, names: list[str]) -> list[Fault]:
    """Return faults for the first few wrong lines. The first `good_rows` rows are known to be right
    and are skipped."""
    skipped = good_rows + int(source.format.has_header)
    faults: list[Fault] = []
    with source.ratings.open("rb") as file:
        for number, line in islice(enumerate(file, 1), skipped, None):
            faults += [
                Fault(f"{source.ratings}, line {number}: {wrong}", FIX_FILE_HINT)
                for wrong in _find_row_problems(line, source, names)
            ]
            if len(faults) >= _MAX_FAULTS:
                break
    return faults[:_MAX_FAULTS]


def _find_row_problems(line: bytes, source: RatingsFolder, names: list[str]) -> Iterator[str]:
    """Yield what is wrong with a line."""
    try:
        text = line.decode(source.format.encoding).rstrip("\r\n")
    except UnicodeDecodeError as error:
        yield f"byte {error.object[error.start]:#04x} is not UTF-8"
        return
    if not text:
        return
    fields = _split_row(text, source)
    named = [name for name in names if name]
    if len(fields) != len(named):
        yield f"{len(fields)} values where {len(named)} belong: {_shorten(text)}"
        return
    values = dict(zip(named, fields, strict=True))
    for name in RATING_COLUMNS:
        wrong = _find_value_problem(name, values[name].strip())
        if wrong:
            yield wrong


def _split_row(text: str, source: RatingsFolder) -> list[str]:
    """Return the fields of a line."""
    if source.format.has_header:
        return next(csv.reader([text]))
    return text.split(source.format.separator)


def _find_value_problem(name: str, value: str) -> str | None:
    """Return what is wrong with a value, or None."""
    if not value:
        return f"no {name}"
    if name == "rating":
        if not _DECIMAL_PATTERN.fullmatch(value):
            return f"{name} is {_shorten(value)}, not a number"
        return None if abs(float(value)) <= _LARGEST_RATING else f"{name} is {value}, too large"
    if not _INTEGER_PATTERN.fullmatch(value):
        return f"{name} is {_shorten(value)}, not a whole number"
    number = float(value)  # an int of thousands of digits is refused by Python
    if name == "timestamp":
        return None if abs(number) < _MAX_TIMESTAMP else f"{name} is {value[:60]}, too large"
    if not 0 <= number <= LARGEST_ID:
        return f"{name} is {value[:60]}; ids reach from 0 to {LARGEST_ID:,}"
    return None


def _shorten(text: str) -> str:
    """Return the text in quotes, cut to 60 characters."""
    return repr(text if len(text) <= 60 else text[:60] + "…")
