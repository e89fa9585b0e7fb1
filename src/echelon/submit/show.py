"""A submission on the screen, before it happens."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Sequence

from echelon.launch.plan import columns
from echelon.submit.plan import Entry, Job, Submission
from echelon.utils.text import format_bytes


def show(submission: Submission, jobs: Sequence[Job], as_json: bool) -> None:
    if as_json:
        texts = [{"runs": [c.run.name for c in job.configs], "script": job.script} for job in jobs]
        print(json.dumps(submission.to_dict() | {"jobs": texts}, indent=2))
    else:
        print("\n".join(_lines(submission, jobs)))


def _lines(s: Submission, jobs: Sequence[Job]) -> Iterator[str]:
    count = len(s.entries)
    yield f"{count} command{'s' * (count > 1)} of {s.entries[0].command.file}, launch={s.kind}"
    yield from columns([("line", "run", "mode", "command"), *map(_row, s.entries)])
    yield from ("", *_reasons(s.entries))
    yield from ("", *_source_lines(s), *_environment_lines(s))
    for job in jobs:
        array = f" of an array of {len(job.configs)}" if job.array else ""
        yield from ("", f"script{array}:", *(f"  {line}" for line in job.script.splitlines()))


def _row(entry: Entry) -> tuple[str, ...]:
    return (
        str(entry.command.line),
        str(entry.config.run.name),
        entry.way.mode,
        exact([f"{n}={v.text}" for n, v in entry.command.variables] + entry.command.argv),
    )


def exact(words: Sequence[str]) -> str:
    """On one line, every word told from the next."""
    joined = shlex.join(words)
    return joined if joined.isprintable() else json.dumps(list(words), ensure_ascii=False)


def _reasons(entries: Sequence[Entry]) -> Iterator[str]:
    ways: dict[tuple[str, str], list[str]] = {}
    for entry in entries:
        ways.setdefault((entry.way.mode, entry.way.why), []).append(str(entry.command.line))
    for (mode, why), lines in ways.items():
        shown = ", ".join(lines[:8]) + ", …" * (len(lines) > 8)
        yield f"mode={mode}: {why} (line{'s' * (len(lines) > 1)} {shown})"


def _source_lines(s: Submission) -> Iterator[str]:
    commit = f"commit {s.source.commit[:12]}, " if s.source.commit else ""
    size = f"{len(s.source.files)} files, {format_bytes(s.source.size)}"
    yield f"source: {s.source.folder} ({commit}{size}), copied to {s.copy}"
    if s.source.links:
        yield f"  linked to: {', '.join(s.source.links)}"
    if s.source.left_out:
        yield f"  stays behind: {', '.join(s.source.left_out)} (--link NAME links to one)"


def _environment_lines(s: Submission) -> Iterator[str]:
    if s.environment is None:
        yield "environment: that of this shell; no requirements.txt, Pipfile or the like is used"
        return
    e = s.environment
    ready = (
        "ready" if e.ready else "is built " + ("in the job" if s.build == "job" else "first, here")
    )
    yield f"environment: {', '.join(map(str, e.files))} → {e.folder} ({e.builder}; {ready})"
    if e.ignored:
        yield f"  ignored: {', '.join(map(str, e.ignored))}"
    if not e.ready:
        yield from (f"  $ {command}" for command in e.commands)
