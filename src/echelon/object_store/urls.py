"""The addresses of objects: `s3://bucket/key`, `gs://bucket/key`, `https://host/path`."""

from __future__ import annotations

from typing import NamedTuple
from urllib.parse import unquote

from echelon.errors import EchelonError, Fault

SCHEMES = ("s3", "gs", "https", "http")


class ObjectUrl(NamedTuple):
    """The address of an object, or of all whose keys begin with `key`."""

    scheme: str
    bucket: str
    """For https, the host and its port."""
    key: str
    """Without a slash at its beginning."""

    def __str__(self) -> str:
        return f"{self.scheme}://{self.bucket}/{self.key}"

    @property
    def name(self) -> str:
        """What follows the last slash."""
        return self.key.rpartition("/")[2]

    @property
    def can_list(self) -> bool:
        """Whether the store says which objects it has. A web server does not."""
        return self.scheme in ("s3", "gs")

    def join(self, name: str) -> ObjectUrl:
        """Return the address of an object below this one."""
        return self._replace(key=f"{self.key.rstrip('/')}/{name}".lstrip("/"))


class ObjectInfo(NamedTuple):
    """What a store says of an object."""

    url: str
    size: int
    etag: str
    """Changes when the object does. Where a server has none, the time of its last change."""


def is_url(text: str) -> bool:
    """Return whether a text is an address rather than a path."""
    return "://" in text


def parse_url(text: str) -> ObjectUrl:
    """Return an address in its parts. Raises EchelonError for one that is not known, and for one
    with a secret in it, which the message does not repeat."""
    scheme, _, rest = text.partition("://")
    scheme = scheme.lower()
    if scheme not in SCHEMES:
        known = ", ".join(f"{each}://" for each in SCHEMES)
        what = f"{_hide_secrets(text)} is of no store that is known"
        raise EchelonError(Fault(what, f"known: {known}; copy or mount it, and give the path here"))
    host = rest.partition("/")[0]
    if "@" in host:
        raise EchelonError(
            Fault(
                f"{_hide_secrets(text)} has a user or a password in it",
                "leave it out: credentials come from the environment (AWS_ACCESS_KEY_ID, "
                "GOOGLE_APPLICATION_CREDENTIALS, …) or the store's own configuration files",
            )
        )
    if scheme in ("https", "http") and ("?" in rest or "#" in rest):
        raise EchelonError(
            Fault(
                f"{_hide_secrets(text)} is followed by a query, which may be a signature",
                "give the address without it; signed addresses expire while a training reads them",
            )
        )
    if not host or any(sign in host for sign in "?#*[ "):
        what = f"{_hide_secrets(text)} names no bucket"
        raise EchelonError(Fault(what, "write s3://bucket/key, gs://bucket/key or https://host/…"))
    key = rest.partition("/")[2].lstrip("/")
    if scheme in ("https", "http"):
        key = unquote(key)
    return ObjectUrl(scheme, host, key)


def _hide_secrets(text: str) -> str:
    """Return an address without user, password, query and fragment."""
    scheme, _, rest = text.partition("://")
    host, slash, path = rest.partition("/")
    for sign in "?#":
        host, path = host.partition(sign)[0], path.partition(sign)[0]
    return f"{scheme}://{host.rpartition('@')[2]}{slash}{path}"
