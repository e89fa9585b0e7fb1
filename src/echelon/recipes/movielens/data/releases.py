"""GroupLens' releases: their addresses, and how to verify a download."""

from __future__ import annotations

import os
from dataclasses import dataclass

from echelon.errors import EchelonError, Fault

BASE_URL = "https://files.grouplens.org/datasets/movielens"
BASE_URL_VARIABLE = "ECHELON_MOVIELENS_URL"
CITATION = (
    "F. M. Harper and J. A. Konstan, The MovieLens Datasets: History and Context, 2015, "
    "https://doi.org/10.1145/2827872"
)


@dataclass(frozen=True)
class Release:
    """A release as it was when this was written. GroupLens updates the `latest` ones."""

    megabytes: int
    """The size of the download."""
    digest: str
    """Checksum of the zip file: a sha256, or the md5 that GroupLens publishes; the length tells
    which."""


RELEASES = {
    "latest-small": Release(1, "4412bda2958b6c3062d75fcbde7e7c686f6a34e3f323e42121e092531180b8e1"),
    "100k": Release(5, "0e33842e24a9c977be4e0107933c0723"),
    "1m": Release(6, "c4d9eecfca2ab87c1945afe126590906"),
    "25m": Release(262, "6b51fb2759a8657d3bfcbfc42b592ada"),
    "32m": Release(239, "d472be332d4daa821edc399621853b57"),
}


def get_folder_name(size: str) -> str:
    """Return the name of the folder inside the zip file."""
    return f"ml-{size}"


def get_zip_url(size: str) -> str:
    """Return the address of the zip file, at GroupLens or at a mirror."""
    base = os.environ.get(BASE_URL_VARIABLE) or BASE_URL
    if not base.startswith(("http://", "https://")):
        what = f"{BASE_URL_VARIABLE} is {base!r}"
        raise EchelonError(Fault(what, f"give an http or https address, such as {BASE_URL}"))
    return f"{base.rstrip('/')}/{get_folder_name(size)}.zip"
