"""`echelon data look`, `check` and `pack`: what is in files, what cannot be read, shards."""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from echelon.data.check_files import BadSamples, FileCheck
from echelon.data.inspect_files import FilesSummary, ShownSample, inspect_files
from echelon.data.pack_files import ShardPacking
from echelon.errors import EchelonError, ExitCode, Fault, escape_controls
from echelon.utils.files import write_text_atomically
from echelon.utils.os_errors import format_os_error_reason
from echelon.utils.text import (
    convert_for_terminal,
    format_bytes,
    format_count,
    format_elapsed,
    join_names,
    print_to_stderr,
    truncate_text,
)
from echelon.views.html_page import fill_page_template
from echelon.views.table import Table, TableColumn, get_width
from echelon.views.terminal import create_console

_MAX_LISTED = 10_000
"""Lines of what cannot be read. A file of other data than expected has millions."""


# --- look ---


def show_files(
    paths: list[str],
    format: str | None,
    token_type: str,
    shown: int,
    page: Path | None,
    json_wanted: bool,
) -> int:
    """Print what is in files, and write the page if one is asked for."""
    summary = inspect_files(
        paths, format, shown, with_pictures=page is not None, token_type=token_type
    )
    if page is not None:
        _write_page(page, paths, summary)
    if json_wanted:
        print(json.dumps(_to_json(summary), indent=2))
        return ExitCode.OK
    console = create_console()
    width = get_width(console)
    for line in _render_summary(summary, width):
        console.print(line)
    if page is not None:
        print_to_stderr(f"the page is {page}")
        return ExitCode.OK
    for sample in summary.first_samples:
        console.print()
        for line in _render_sample(sample, width):
            console.print(line)
    return ExitCode.OK


def _render_facts(summary: FilesSummary) -> list[str]:
    if summary.format == "tokens":
        return [
            f"{format_count(summary.samples, 'token')} in {format_count(summary.files, 'file')}, "
            f"{format_bytes(summary.size_bytes)}",
            f"read as {summary.columns[0].type}: the files do not say it, --dtype does",
        ]
    about = "about " if summary.format == "images" else ""
    facts = [
        f"{format_count(summary.samples, 'sample')} in {format_count(summary.files, 'file')} "
        f"({summary.format}), {about}{format_bytes(summary.size_bytes)}"
    ]
    if summary.class_names:
        classes = escape_controls(join_names(summary.class_names))
        facts.append(f"{len(summary.class_names):,} classes: {classes}")
    else:
        chunk = format_bytes(summary.median_chunk_bytes)
        facts.append(f"read in {format_count(summary.chunks, 'chunk')} of about {chunk}")
    return facts


def _render_summary(summary: FilesSummary, width: int) -> Iterator[Text]:
    for fact in _render_facts(summary):
        yield Text(convert_for_terminal(truncate_text(fact, width)))
    yield Text()
    columns = summary.columns
    table = Table(
        [
            TableColumn(
                "COLUMN", [escape_controls(column.name) for column in columns], min_width=8
            ),
            TableColumn("TYPE", [column.type for column in columns], min_width=12),
            TableColumn(
                "TYPICAL SIZE",
                [format_bytes(column.median_bytes) for column in columns],
                is_right_aligned=True,
            ),
            TableColumn(
                "LARGEST SEEN",
                [format_bytes(column.max_bytes) for column in columns],
                is_right_aligned=True,
                priority=2,
            ),
            TableColumn(
                "SAMPLES",
                [f"{column.samples:,}" for column in columns],
                is_right_aligned=True,
                priority=1,
            ),
        ]
    )
    yield from table.render(width)


def _render_sample(sample: ShownSample, width: int) -> Iterator[Text]:
    yield Text(convert_for_terminal(truncate_text(str(sample.place), width)), "bold")
    if sample.fault:
        yield Text(convert_for_terminal(f"  {escape_controls(sample.fault)}"), "red")
    names = [escape_controls(value.column) for value in sample.values]
    column_width = max(map(len, names), default=0)
    for name, value in zip(names, sample.values, strict=True):
        line = f"  {name:<{column_width}}  {value.text}"
        yield Text(convert_for_terminal(truncate_text(line, width)))


def _to_json(summary: FilesSummary) -> dict[str, Any]:
    return {
        "version": 1,
        **summary._asdict(),
        "columns": [column._asdict() for column in summary.columns],
        "first_samples": [
            {
                "file": str(sample.place.file),
                "number": sample.place.number,
                "key": sample.place.key,
                "values": {value.column: value.text for value in sample.values},
                "fault": sample.fault or None,
            }
            for sample in summary.first_samples
        ],
    }


def _write_page(page: Path, paths: list[str], summary: FilesSummary) -> None:
    data = {
        "facts": _render_facts(summary),
        "columns": [
            [
                column.name,
                column.type,
                format_bytes(column.median_bytes),
                format_bytes(column.max_bytes),
                f"{column.samples:,}",
            ]
            for column in summary.columns
        ],
        "samples": [
            {
                "place": str(sample.place),
                "fault": sample.fault,
                "values": [value._asdict() for value in sample.values],
            }
            for sample in summary.first_samples
        ],
    }
    template = Path(__file__).with_name("data_page.html")
    try:
        write_text_atomically(page, fill_page_template(template, join_names(paths), data))
    except OSError as error:
        what = f"{page} cannot be written: {format_os_error_reason(error)}"
        raise EchelonError(Fault(what, "give another file with --html")) from error


# --- check ---


def check_files(
    paths: list[str], format: str | None, processes: int | None, json_wanted: bool
) -> int:
    """Read every sample and print those that cannot be read; returns 1 if there are some."""
    started = time.monotonic()
    check = FileCheck(paths, format)
    is_terminal = sys.stdout.isatty()
    listed: list[BadSamples] = []
    samples = bad_samples = bad_files = 0
    with show_progress("checking", check.samples) as advance:
        for progress in check.run(processes):
            samples += progress.samples
            for bad in progress.bad:
                bad_files += bad.first is None
                bad_samples += bad.samples
                if len(listed) >= _MAX_LISTED:
                    continue
                listed.append(bad)
                if not json_wanted:
                    print(_render_bad(bad, is_terminal), flush=True)
            advance(progress.samples)
    sentence = _describe_result(check.samples, bad_samples, bad_files, check.files)
    if json_wanted:
        print(
            json.dumps(
                {
                    "version": 1,
                    "files": check.files,
                    "samples": check.samples,
                    "bad_samples": bad_samples,
                    "bad_files": bad_files,
                    "bad": [{**bad._asdict(), "file": str(bad.file)} for bad in listed],
                },
                indent=2,
            )
        )
    else:
        if bad_samples + bad_files > _MAX_LISTED and len(listed) == _MAX_LISTED:
            print_to_stderr(f"the first {_MAX_LISTED:,} are listed")
        print_to_stderr(f"{sentence} ({format_elapsed(time.monotonic() - started)})")
    return ExitCode.FAILED if bad_samples or bad_files else ExitCode.OK


def _render_bad(bad: BadSamples, is_terminal: bool) -> str:
    if is_terminal:
        return convert_for_terminal(str(bad))
    number = "" if bad.first is None else str(bad.first)
    number += f"-{(bad.first or 0) + bad.samples - 1}" if number and bad.samples > 1 else ""
    return "\t".join(map(escape_controls, (str(bad.file), number, bad.key, bad.why)))


def _describe_result(samples: int, bad_samples: int, bad_files: int, files: int) -> str:
    where = f"{format_count(samples, 'sample')} in {format_count(files, 'file')}"
    if not bad_samples and not bad_files:
        return f"{where}: all can be read"
    faults = [f"{bad_samples:,} cannot be read"] if bad_samples else []
    if bad_files:
        faults.append(f"{format_count(bad_files, 'fault')} of whole files")
    return f"{where}: {', '.join(faults)}"


# --- pack ---


def pack_files(
    paths: list[str],
    source_format: str | None,
    folder: Path,
    format: str | None,
    name: str,
    shard_bytes: int,
    processes: int | None,
    json_wanted: bool,
) -> int:
    """Write the shards and print what is there."""
    started = time.monotonic()
    packing = ShardPacking(paths, source_format, folder, format, name, shard_bytes)
    shards = size_bytes = kept = 0
    with show_progress("packing", packing.samples) as advance:
        for shard in packing.run(processes):
            shards += 1
            size_bytes += shard.entry.size_bytes
            kept += shard.is_kept
            advance(shard.entry.samples)
    if json_wanted:
        result = {
            "version": 1,
            "folder": str(folder),
            "format": packing.format,
            "samples": packing.samples,
            "shards": shards,
            "size_bytes": size_bytes,
            "kept": kept,
        }
        print(json.dumps(result, indent=2))
        return ExitCode.OK
    were_there = f", {kept:,} of them were there" if kept else ""
    print(
        f"{format_count(packing.samples, 'sample')} in {format_count(shards, 'shard')} "
        f"({packing.format}), {format_bytes(size_bytes)}, in {folder}{were_there} "
        f"({format_elapsed(time.monotonic() - started)})"
    )
    return ExitCode.OK


@contextlib.contextmanager
def show_progress(verb: str, total: int) -> Iterator[Any]:
    """Show a bar on a terminal, and yield a function that advances it by a number of samples."""
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
    )

    console = Console(stderr=True)
    # Lines on standard output are printed above the bar only where they are on the same terminal.
    with Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=console,
        transient=True,
        redirect_stdout=sys.stdout.isatty(),
        disable=not console.is_terminal,
    ) as bar:
        task = bar.add_task(verb, total=total)
        yield lambda samples: bar.advance(task, samples)
