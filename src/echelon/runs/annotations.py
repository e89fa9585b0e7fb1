"""The tags and the note that a person gives a run. They change nothing about it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from echelon.errors import EchelonError, Fault
from echelon.runs.run_folder import Run
from echelon.utils.files import read_json_object, write_json_atomically
from echelon.utils.locks import FileLock
from echelon.utils.os_errors import format_os_error_reason

_TAG = re.compile(r"[^\s,=*?\[\]]{1,60}")
"""A tag is typed on the command line, and listed with commas."""


@dataclass(frozen=True)
class Annotations:
    """What a person said about a run."""

    tags: tuple[str, ...] = ()
    """In the order in which they were given."""
    note: str = ""


def read_annotations(run: Run) -> Annotations:
    """Return the tags and the note of a run; what is damaged is missing."""
    data = read_json_object(run.annotations_file) or {}
    tags, note = data.get("tags"), data.get("note")
    known = [tag for tag in tags if isinstance(tag, str)] if isinstance(tags, list) else []
    return Annotations(tuple(known), note if isinstance(note, str) else "")


def annotate_run(
    run: Run, note: str | None, add_tags: Sequence[str], remove_tags: Sequence[str]
) -> Annotations:
    """Add and remove tags, replace the note unless it is None, and return what the run has then."""
    try:
        with FileLock(run.folder / ".annotations.lock"):  # two who tag at once must both be heard
            known = read_annotations(run)
            kept = [tag for tag in known.tags if tag not in remove_tags]
            tags = tuple(dict.fromkeys([*kept, *add_tags]))
            changed = Annotations(tags, known.note if note is None else note)
            write_json_atomically(run.annotations_file, asdict(changed))
            return changed
    except OSError as error:
        raise EchelonError(
            Fault(
                f"{run.annotations_file} cannot be written: {format_os_error_reason(error)}",
                "a note is kept in the run folder, so it takes the right to write there",
            )
        ) from error


def require_valid_tags(tags: Sequence[str]) -> None:
    """Raise EchelonError for words that cannot be tags, all at once."""
    faults = [
        Fault(
            f"--tag {tag!r} cannot be a tag",
            "a tag is one word of at most 60 characters without , = * ? [ ], such as baseline",
        )
        for tag in tags
        if not _TAG.fullmatch(tag)
    ]
    if faults:
        raise EchelonError(*faults)
