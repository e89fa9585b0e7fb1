"""A submission on the screen before it happens: `echelon submit --dry-run`."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Sequence

from echelon.launch.plan import render_columns
from echelon.submission.plan import PlannedCommand, SbatchJob, Submission
from echelon.utils.text import format_bytes, format_count


def print_submission(submission: Submission, jobs: Sequence[SbatchJob], as_json: bool) -> None:
    """Print the commands, their modes, the source, the environment and the scripts."""
    if as_json:
        texts = [{"runs": [c.run.name for c in job.configs], "script": job.script} for job in jobs]
        print(json.dumps(submission.to_dict() | {"jobs": texts}, indent=2))
    else:
        print("\n".join(_render_lines(submission, jobs)))


def _render_lines(s: Submission, jobs: Sequence[SbatchJob]) -> Iterator[str]:
    commands = format_count(len(s.commands), "command")
    yield f"{commands} of {s.commands[0].command.file}, launch={s.launcher_kind}"
    if s.name_note:
        yield s.name_note
    yield from render_columns([("line", "run", "mode", "command"), *map(_render_row, s.commands)])
    yield from ("", *_render_reasons(s.commands))
    yield from ("", *_render_source(s), *_render_work_folders(s), *_render_environment(s))
    for job in jobs:
        array = f" of an array of {len(job.configs)}" if job.array else ""
        yield from ("", f"script{array}:", *(f"  {line}" for line in job.script.splitlines()))


def _render_row(entry: PlannedCommand) -> tuple[str, ...]:
    return (
        str(entry.command.line),
        str(entry.config.run.name),
        entry.launch_mode.mode,
        format_words([f"{n}={v.text}" for n, v in entry.command.variables] + entry.command.argv),
    )


def format_words(words: Sequence[str]) -> str:
    """Return words on one line, in which every word can be distinguished from the next."""
    joined = shlex.join(words)
    return joined if joined.isprintable() else json.dumps(list(words), ensure_ascii=False)


def _render_reasons(entries: Sequence[PlannedCommand]) -> Iterator[str]:
    """Yield each mode with its reason, and the lines that have it."""
    lines_by_reason: dict[tuple[str, str], list[str]] = {}
    for entry in entries:
        key = (entry.launch_mode.mode, entry.launch_mode.reason)
        lines_by_reason.setdefault(key, []).append(str(entry.command.line))
    for (mode, reason), lines in lines_by_reason.items():
        shown = ", ".join(lines[:8]) + ", …" * (len(lines) > 8)
        yield f"mode={mode}: {reason} (line{'s' * (len(lines) > 1)} {shown})"


def _render_source(s: Submission) -> Iterator[str]:
    commit = f"commit {s.source.commit[:12]}, " if s.source.commit else ""
    size = f"{len(s.source.files)} files, {format_bytes(s.source.size_bytes)}"
    yield f"source: {s.source.folder} ({commit}{size}), copied to {s.source_copy}"
    if s.source.links:
        yield f"  linked to: {', '.join(s.source.links)}"
    if s.source.left_out:
        yield f"  not copied: {', '.join(s.source.left_out)} (--link NAME links to one)"


def _render_work_folders(s: Submission) -> Iterator[str]:
    first = s.runs[0].work_folder
    place = first if len(s.runs) == 1 else f"{first} … {s.runs[-1].work_folder}"
    whose = "the command" if len(s.runs) == 1 else "each command"
    yield f"work: {place}"
    yield f"  {whose} runs in a copy of its own, which is kept with all that it writes there"


def _render_environment(s: Submission) -> Iterator[str]:
    if s.environment is None:
        yield "environment: that of this shell; no requirements.txt, Pipfile or the like is used"
        return
    e = s.environment
    place = "in the job" if s.build_place == "job" else "first, here"
    ready = "ready" if e.ready else f"is built {place}"
    yield f"environment: {', '.join(map(str, e.files))} → {e.folder} ({e.builder}; {ready})"
    if e.ignored:
        yield f"  ignored: {', '.join(map(str, e.ignored))}"
    if not e.ready:
        yield from (f"  $ {command}" for command in e.commands)
