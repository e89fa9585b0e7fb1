"""Reading titles and genres of movies, by original movie id, from each of the formats."""

from __future__ import annotations

import csv
import re
from collections.abc import Iterator

from echelon.errors import EchelonError, Fault
from echelon.recipes.movielens.data.formats import FIX_FILE_HINT, RatingsFolder

MovieRow = tuple[int, str, list[str]]
"""Id, title and genres."""

_NO_GENRES = "(no genres listed)"
_FIRST_GENRE_COLUMN = 5
"""u.item has id, title, two dates and an address; then 0 or 1 for each line of u.genre."""


def read_movies(source: RatingsFolder) -> Iterator[MovieRow]:
    """Yield the movies; none if the data set lists none, as training needs no titles."""
    if not source.movies.is_file():
        return
    line = 0
    try:
        with source.movies.open(encoding=_get_file_encoding(source), newline="") as file:
            genres = _read_genre_names(source)
            for line, fields in _iter_numbered_rows(source, file):  # noqa: B007 – used in messages below
                if fields:
                    yield _parse_movie(source, fields, genres)
    except UnicodeDecodeError as error:
        what = f"{source.movies} is not UTF-8 at byte {error.start} after line {line}"
        raise EchelonError(Fault(what, "save the file as UTF-8")) from error
    except (ValueError, IndexError, csv.Error) as error:
        what = f"{source.movies}, line {line} is not a movie: it needs an id, a title and genres"
        raise EchelonError(Fault(what, FIX_FILE_HINT)) from error


def _get_file_encoding(source: RatingsFolder) -> str:
    """Return the encoding; UTF-8 files may have a byte-order mark."""
    return "utf-8-sig" if source.format.encoding == "utf-8" else source.format.encoding


def _iter_numbered_rows(
    source: RatingsFolder, file: Iterator[str]
) -> Iterator[tuple[int, list[str]]]:
    """Yield line number and fields of each row."""
    if source.format.has_header:
        reader = csv.reader(file)
        next(reader, None)
        for fields in reader:
            yield reader.line_num, fields
        return
    separator = "::" if source.format.separator == "::" else "|"
    for row, line in enumerate(file, 1):
        text = line.rstrip("\r\n")
        yield row, _split_fields(text, separator) if text else []


def _split_fields(text: str, separator: str) -> list[str]:
    """Split a line; a title may contain `::` itself."""
    fields = text.split(separator)
    if separator != "::" or len(fields) <= 3:
        return fields
    return [fields[0], separator.join(fields[1:-1]), fields[-1]]


def _parse_movie(source: RatingsFolder, fields: list[str], genres: list[str]) -> MovieRow:
    """Return one movie from its fields."""
    number, title = int(fields[0]), fields[1]
    if source.format.movies == "u.item":
        flags = fields[_FIRST_GENRE_COLUMN:]
        names = genres or [f"genre {i}" for i in range(len(flags))]
        return number, title, [n for n, flag in zip(names, flags, strict=False) if flag == "1"]
    genre_text = fields[2]
    return number, title, [] if genre_text in ("", _NO_GENRES) else genre_text.split("|")


def _read_genre_names(source: RatingsFolder) -> list[str]:
    """Return the genres of u.genre (`Action|1`), in the order of the flags in u.item."""
    listed = source.folder / "u.genre"
    if source.format.movies != "u.item" or not listed.is_file():
        return []
    lines = re.split(r"\r?\n", listed.read_text(encoding="latin-1"))
    return [line.split("|")[0] for line in lines if line]
