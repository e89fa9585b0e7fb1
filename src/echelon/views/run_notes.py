"""`echelon note RUN`: tags and notes, changed and shown."""

from __future__ import annotations

import json
from collections.abc import Sequence

from echelon.errors import ExitCode
from echelon.runs.annotations import annotate_run, read_annotations, require_valid_tags
from echelon.runs.run_folder import Run

JSON_VERSION = 1
"""Of what --json prints."""


def annotate_and_show(
    runs: Sequence[Run],
    note: str | None,
    add_tags: Sequence[str],
    remove_tags: Sequence[str],
    as_json: bool,
) -> int:
    """Change the annotations of the runs, if anything is to be changed, and print them."""
    require_valid_tags([*add_tags, *remove_tags])
    is_changed = note is not None or bool(add_tags or remove_tags)
    found = [
        annotate_run(run, note, add_tags, remove_tags) if is_changed else read_annotations(run)
        for run in runs
    ]
    if as_json:
        listed = [
            {
                "run": run.name,
                "folder": str(run.folder),
                "tags": list(one.tags),
                "user_note": one.note,
            }
            for run, one in zip(runs, found, strict=True)
        ]
        print(json.dumps({"version": JSON_VERSION, "runs": listed}, indent=2))
        return ExitCode.OK
    for run, one in zip(runs, found, strict=True):
        tags = f" [{', '.join(one.tags)}]" if one.tags else ""
        print(f"{run.name}{tags}: {one.note or 'no note'}")
    return ExitCode.OK
