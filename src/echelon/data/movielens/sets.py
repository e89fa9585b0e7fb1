"""GroupLens' sets: where they are, and how to know that what came is what they publish."""

from __future__ import annotations

import os
from dataclasses import dataclass

from echelon.errors import EchelonError, Fault

ADDRESS = "https://files.grouplens.org/datasets/movielens"
ADDRESS_VARIABLE = "ECHELON_MOVIELENS_URL"
CITE = (
    "F. M. Harper and J. A. Konstan, The MovieLens Datasets: History and Context, 2015, "
    "https://doi.org/10.1145/2827872"
)


@dataclass(frozen=True)
class Known:
    """A set as it was when this was written. GroupLens changes the `latest` ones."""

    megabytes: int
    """To download."""
    digest: str
    """Of the zip: a sha256, or the md5 that GroupLens publishes, by its length."""


SETS = {
    "latest-small": Known(1, "4412bda2958b6c3062d75fcbde7e7c686f6a34e3f323e42121e092531180b8e1"),
    "100k": Known(5, "0e33842e24a9c977be4e0107933c0723"),
    "1m": Known(6, "c4d9eecfca2ab87c1945afe126590906"),
    "25m": Known(262, "6b51fb2759a8657d3bfcbfc42b592ada"),
    "32m": Known(239, "d472be332d4daa821edc399621853b57"),
}


def folder_name(size: str) -> str:
    return f"ml-{size}"


def address(size: str) -> str:
    """Of the zip, at GroupLens or at a mirror."""
    base = os.environ.get(ADDRESS_VARIABLE) or ADDRESS
    if not base.startswith(("http://", "https://")):
        what = f"{ADDRESS_VARIABLE} is {base!r}"
        raise EchelonError(Fault(what, f"give an http or https address, such as {ADDRESS}"))
    return f"{base.rstrip('/')}/{folder_name(size)}.zip"
