"""The three file formats that GroupLens has used, and finding which one a folder has."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from echelon.errors import EchelonError, ExitCode, Fault
from echelon.utils.os_errors import format_os_error_reason

RATING_COLUMNS = ("userId", "movieId", "rating", "timestamp")
"""Columns of ratings.csv; the other formats have the same, without a header."""
FIX_FILE_HINT = "correct the file, or get the data set again: echelon data movielens"


@dataclass(frozen=True)
class FileFormat:
    """How one generation of releases stores ratings and movies."""

    ratings: str
    movies: str
    separator: str
    encoding: str
    has_header: bool = False
    optional_files: tuple[str, ...] = ()
    """Further files that are read if they exist."""


FORMATS = (
    FileFormat("ratings.csv", "movies.csv", ",", "utf-8", has_header=True),
    FileFormat("ratings.dat", "movies.dat", "::", "latin-1"),
    FileFormat("u.data", "u.item", "\t", "latin-1", optional_files=("u.genre",)),
)


@dataclass(frozen=True)
class RatingsFolder:
    """A folder with ratings in one of the formats."""

    folder: Path
    format: FileFormat

    @property
    def ratings(self) -> Path:
        """The file of ratings."""
        return self.folder / self.format.ratings

    @property
    def movies(self) -> Path:
        """The file of movies, which may not exist."""
        return self.folder / self.format.movies

    def list_files(self) -> list[Path]:
        """Return all files that the prepared form is made from."""
        names = (self.format.movies, *self.format.optional_files)
        return [self.ratings, *(p for p in map(self.folder.joinpath, names) if p.is_file())]


def find_ratings_folder(folder: Path) -> RatingsFolder | None:
    """Return the folder with its format, or None if it has no ratings."""
    for format in FORMATS:
        if (folder / format.ratings).is_file():
            return RatingsFolder(folder, format)
    return None


def require_ratings_folder(folder: Path) -> RatingsFolder:
    """Return the folder with its format, or raise with a suggestion."""
    try:
        source = find_ratings_folder(folder)
        inside = sorted(folder.iterdir()) if source is None and folder.is_dir() else []
        nearby = [path for path in inside if path.is_dir() and find_ratings_folder(path)]
    except PermissionError as error:
        raise make_unreadable_error(error) from error
    if source:
        return source
    names = ", ".join(format.ratings for format in FORMATS)
    what = f"no ratings in {folder}: looked for {names}"
    if not folder.is_dir():
        what = (
            f"there is no folder {folder}" if not folder.exists() else f"{folder} is not a folder"
        )
    do = "get the data set: echelon data movielens (--from FILE without internet access)"
    if nearby:
        do = f"did you mean {' or '.join(map(str, nearby))}?"
    raise EchelonError(Fault(what, do), exit=ExitCode.NOT_FOUND)


def make_unreadable_error(error: OSError) -> EchelonError:
    """Return the error for a file without read permission."""
    what = f"{error.filename} cannot be read: {format_os_error_reason(error)}"
    return EchelonError(
        Fault(what, "make it readable for this user, or copy the data set to another folder")
    )
