"""Which lines of a file of ratings are wrong, and how: read slowly, once reading fast failed."""

from __future__ import annotations

import csv
import re
from collections.abc import Iterator
from itertools import islice

from echelon.data.movielens.formats import AGAIN, COLUMNS, Source
from echelon.errors import Fault

LARGEST_ID = (1 << 28) - 1
"""A thousand times MovieLens' own; tables by original id stay small."""
_LARGEST_RATING = 3.4e38
_TOO_LATE = 1 << 63
_MOST_TOLD = 5
_WHOLE = re.compile(r"[+-]?\d+")
_DECIMAL = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?")


def faults_after(source: Source, good: int, names: list[str]) -> list[Fault]:
    """The first few, by line. The first `good` rows are known to be: they are at least as many
    lines."""
    skipped = good + int(source.format.has_header)
    found: list[Fault] = []
    with source.ratings.open("rb") as file:
        for number, line in islice(enumerate(file, 1), skipped, None):
            found += [
                Fault(f"{source.ratings}, line {number}: {wrong}", AGAIN)
                for wrong in _wrong(line, source, names)
            ]
            if len(found) >= _MOST_TOLD:
                break
    return found[:_MOST_TOLD]


def _wrong(line: bytes, source: Source, names: list[str]) -> Iterator[str]:
    try:
        text = line.decode(source.format.encoding).rstrip("\r\n")
    except UnicodeDecodeError as error:
        yield f"byte {error.object[error.start]:#04x} is not UTF-8"
        return
    if not text:
        return
    fields = _fields(text, source)
    named = [name for name in names if name]
    if len(fields) != len(named):
        yield f"{len(fields)} values where {len(named)} belong: {_short(text)}"
        return
    values = dict(zip(named, fields, strict=True))
    for name in COLUMNS:
        wrong = _value_wrong(name, values[name].strip())
        if wrong:
            yield wrong


def _fields(text: str, source: Source) -> list[str]:
    if source.format.has_header:
        return next(csv.reader([text]))
    return text.split(source.format.separator)


def _value_wrong(name: str, value: str) -> str | None:
    if not value:
        return f"no {name}"
    if name == "rating":
        if not _DECIMAL.fullmatch(value):
            return f"{name} is {_short(value)}, not a number"
        return None if abs(float(value)) <= _LARGEST_RATING else f"{name} is {value}, too large"
    if not _WHOLE.fullmatch(value):
        return f"{name} is {_short(value)}, not a whole number"
    number = float(value)  # an int of thousands of digits is refused by Python
    if name == "timestamp":
        return None if abs(number) < _TOO_LATE else f"{name} is {value[:60]}, too large"
    if not 0 <= number <= LARGEST_ID:
        return f"{name} is {value[:60]}; ids reach from 0 to {LARGEST_ID:,}"
    return None


def _short(text: str) -> str:
    return repr(text if len(text) <= 60 else text[:60] + "…")
