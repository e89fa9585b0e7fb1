"""The names of objects of Kubernetes, made from names of runs."""

from __future__ import annotations

import hashlib
import re

MAX_NAME_LENGTH = 40
"""Of a label's 63 characters. What Kubernetes appends to the name of a Job, for its pods and their
host names, needs the rest."""
_DIGEST_LENGTH = 7


def make_resource_name(run_name: str) -> str:
    """Return the name of a run's objects: a DNS label that begins with a letter.

    A name that is one already stays as it is. Of any other, upper-case letters become lower-case
    ones, other characters dashes, and the end of a long name is left out; then a digest of the
    whole name keeps apart what has become equal: `My_run` is `my-run-` and seven digits of a
    digest.
    """
    plain = re.sub(r"[^a-z0-9]+", "-", run_name.lower()).strip("-")
    if not plain[:1].isalpha():
        plain = f"run-{plain}".rstrip("-")
    if plain == run_name and len(plain) <= MAX_NAME_LENGTH:
        return plain
    digest = hashlib.sha256(run_name.encode()).hexdigest()[:_DIGEST_LENGTH]
    return f"{plain[: MAX_NAME_LENGTH - _DIGEST_LENGTH - 1].rstrip('-')}-{digest}"
