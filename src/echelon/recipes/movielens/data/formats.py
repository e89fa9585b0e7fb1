"""The three ways in which GroupLens has packed ratings, and finding which one a folder holds."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from echelon.errors import EchelonError, Exit, Fault
from echelon.utils.os_errors import describe_os_error

RATING_COLUMNS = ("userId", "movieId", "rating", "timestamp")
FIX_FILE_HINT = "correct the file, or get the set again: echelon data movielens"


@dataclass(frozen=True)
class FileFormat:
    ratings: str
    movies: str
    separator: str
    encoding: str
    has_header: bool = False
    optional_files: tuple[str, ...] = ()
    """What else is read where it is there."""


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
        return self.folder / self.format.ratings

    @property
    def movies(self) -> Path:
        return self.folder / self.format.movies

    def list_files(self) -> list[Path]:
        """All that the prepared form is made from."""
        names = (self.format.movies, *self.format.optional_files)
        return [self.ratings, *(p for p in map(self.folder.joinpath, names) if p.is_file())]


def detect_format(folder: Path) -> RatingsFolder | None:
    for format in FORMATS:
        if (folder / format.ratings).is_file():
            return RatingsFolder(folder, format)
    return None


def find_ratings(folder: Path) -> RatingsFolder:
    try:
        source = detect_format(folder)
        inside = sorted(folder.iterdir()) if source is None and folder.is_dir() else []
        nearby = [path for path in inside if path.is_dir() and detect_format(path)]
    except PermissionError as error:
        raise unreadable_error(error) from error
    if source:
        return source
    names = ", ".join(format.ratings for format in FORMATS)
    what = f"no ratings in {folder}: looked for {names}"
    if not folder.is_dir():
        what = f"there is no folder {folder}" if not folder.exists() else f"{folder} is no folder"
    do = "get the set: echelon data movielens (--from FILE where there is no internet)"
    if nearby:
        do = f"did you mean {' or '.join(map(str, nearby))}?"
    raise EchelonError(Fault(what, do), exit=Exit.NOT_FOUND)


def unreadable_error(error: OSError) -> EchelonError:
    what = f"{error.filename} cannot be read: {describe_os_error(error)}"
    return EchelonError(Fault(what, "let this user read it, or copy the set to another folder"))
