"""The run of another program as a run folder of ours, in the user's cache folder.

`metrics.jsonl` and `media/` are as a training writes them, so everything that reads runs reads this
one too. `foreign.json` says what the other program said of the run, and how much of its files is in
here. A conversion that was killed goes on from what `foreign.json` says; one that is damaged, or of
files that were replaced, is made anew.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import shutil
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from echelon.runs.metrics_file import MetricsLine, compute_mark, iterate_metrics
from echelon.runs.metrics_summary import read_summary, write_summary
from echelon.runs.run_folder import Run
from echelon.tracking.media_records import quote_media_name
from echelon.utils.files import read_json_object, replace_file, write_text_atomically
from echelon.utils.os_errors import format_os_error_reason

FOREIGN_FILE = "foreign.json"
_FORMAT = 1
_MAX_LINE_BYTES = 1 << 19
"""Readers of metrics.jsonl take lines of twice as many bytes."""
_MAX_TEXT = 100_000
_MAX_NAME = 300
_MAX_NAMES = 20_000
"""Names of metrics in a run."""
_MAX_SETTINGS = 5_000
_MAX_SETTING = 10_000
_MAX_MEDIA_BYTES = 512 << 20
"""Images of one run: they are copies."""
_MAX_FAULTS = 50
_PNG = b"\x89PNG\r\n\x1a\n"
_AXES = ("epoch", "samples")
_RESERVED = ("step", "time")


@dataclass
class SourceFile:
    """How far one file of the other program was read, and what it looked like then."""

    offset: int = 0
    mark: str = ""
    """The checksum of the bytes before; see `runs.metrics_file`."""
    size: int = -1
    changed_ns: int = 0

    def note_look(self, status: os.stat_result) -> None:
        """Note what the file looks like, once all that it has was read."""
        self.size, self.changed_ns = status.st_size, status.st_ctime_ns

    def is_unchanged(self, status: os.stat_result) -> bool:
        """Return whether a file looks as it did when it was read."""
        return (self.size, self.changed_ns) == (status.st_size, status.st_ctime_ns)


@dataclass
class ForeignFacts:
    """What is known of a run of another program beside its metrics."""

    source: str = ""
    name: str = ""
    """What the program calls it, or else empty."""
    folder: str = ""
    """The original."""
    settings: dict[str, Any] = field(default_factory=dict)
    """Flat."""
    started: float | None = None
    ended: float | None = None
    state: str = "unknown"
    """How it ended, by its own word; `unknown` where there is none."""
    why: str = ""
    host: str = ""
    program: str = ""
    tags: list[str] = field(default_factory=list)
    note: str = ""
    files: dict[str, SourceFile] = field(default_factory=dict)
    metrics_bytes: int = 0
    """Of metrics.jsonl; what comes after is left from a conversion that was killed."""
    media_bytes: int = 0
    faults: dict[str, int] = field(default_factory=dict)
    """What could not be read, and how often."""
    left_out: dict[str, int] = field(default_factory=dict)
    """What is in the files and has no place here, and how often."""
    memory: dict[str, Any] = field(default_factory=dict)
    """What the reader of the files has to know to go on."""

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> ForeignFacts:
        """Return what a file holds. Raises ValueError, TypeError or AttributeError where that is
        something else."""
        if data.get("version") != _FORMAT:
            raise ValueError("another version")
        known = {each.name: data[each.name] for each in fields(cls) if each.name in data}
        known["files"] = {n: SourceFile(**value) for n, value in known.get("files", {}).items()}
        return cls(**known)


class ConvertedRun:
    """The converted folder of one run, while it is written; its lock is held by the caller."""

    max_image_bytes = 16 << 20

    def __init__(self, run: Run, facts: ForeignFacts) -> None:
        self.run = run
        self.facts = facts
        self._lines: list[bytes] = []
        self._names: dict[str, str] = {}
        self._is_new = False

    # --- the files ---

    def begin_anew(self) -> None:
        """Forget what was converted; what a person has noted of the run stays."""
        old = self.facts
        self.facts = ForeignFacts(source=old.source, folder=old.folder)
        self._lines.clear()
        self._is_new = True
        for path in (self.run.metrics_file, self.run.summary_file):
            path.unlink(missing_ok=True)
        shutil.rmtree(self.run.media_folder, ignore_errors=True)

    def drop_unfinished_lines(self) -> bool:
        """Cut off what a killed conversion wrote without saying so, and return whether the rest is
        what was written."""
        size = get_size(self.run.metrics_file)
        if size > self.facts.metrics_bytes:
            with self.run.metrics_file.open("r+b") as file:
                file.truncate(self.facts.metrics_bytes)
        return size >= self.facts.metrics_bytes

    def commit(self) -> None:
        """Append the lines that wait, and write down how far the originals are in them."""
        self.append_lines()
        files = {name: vars(known) for name, known in self.facts.files.items()}
        data = {"version": _FORMAT, **vars(self.facts), "files": files}
        write_text_atomically(self.run.folder / FOREIGN_FILE, json.dumps(data) + "\n")

    def open_source(self, path: Path) -> Any:
        """Return a file of the original, opened, or None if there is nothing new in it. One that
        cannot be opened is a fault."""
        known = self.facts.files.setdefault(path.name, SourceFile())
        try:
            status = path.stat(follow_symlinks=False)
            if known.is_unchanged(status):
                return None
            file = open_file(path)
        except OSError as error:
            self.note_unreadable(path, error)
            return None
        for fault in [each for each in self.facts.faults if each.startswith(f"{path.name}: ")]:
            del self.facts.faults[fault]
        return file

    def note_unreadable(self, path: Path, error: OSError) -> None:
        """Note that a file of the original cannot be read now. It is tried again once it has
        changed."""
        self.facts.faults[limit_text(f"{path.name}: {format_os_error_reason(error)}", 200)] = 1
        with contextlib.suppress(OSError):
            self.facts.files[path.name].note_look(path.stat(follow_symlinks=False))
        self.commit()

    def append_lines(self) -> None:
        """Append the lines that wait to metrics.jsonl."""
        with self.run.metrics_file.open("ab") as file:
            file.writelines(self._lines)
            self.facts.metrics_bytes = file.tell()
        self._lines.clear()

    def keep_summary(self) -> None:
        """Keep the summary of all lines, so that lists need not read them."""
        write_summary(self.run, read_summary(self.run))

    def rewrite_lines(self, change: Callable[[MetricsLine], MetricsLine | None]) -> None:
        """Replace metrics.jsonl by what becomes of its lines; those that wait are not among them.

        Whoever is killed after it begins anew, since foreign.json says more than is there.
        """
        with replace_file(self.run.metrics_file) as temporary, temporary.open("wb") as file:
            for line in iterate_metrics(self.run.metrics_file):
                changed = change(line)
                if changed is not None:
                    file.write(_encode(changed))
            self.facts.metrics_bytes = file.tell()

    # --- what the other program said ---

    def add_values(self, step: float, moment: float | None, values: Mapping[str, Any]) -> None:
        """Add a line with numbers, texts, images and histograms by name."""
        line: MetricsLine = {"step": step}
        if moment is not None and math.isfinite(moment) and moment > 0:
            line["time"] = moment
        text = _encode({**line, **values})
        if len(text) <= _MAX_LINE_BYTES:
            self._lines.append(text)
        elif len(values) > 1:
            half, names = len(values) // 2, list(values)
            for part in (names[:half], names[half:]):
                self.add_values(step, moment, {name: values[name] for name in part})
        else:
            self.leave_out("values that are too long for a line")

    def make_name(self, name: str, value: object = 0.0) -> str | None:
        """Return by which name a value is logged; None where the run has too many names.

        `step` and `time` say where a line is. So do `epoch` and `samples` if they are numbers.
        """
        name = shorten_name(name)
        is_axis = isinstance(value, (int, float)) and name in _AXES
        known = self._names.get(name)
        if known is not None and not is_axis:
            return known
        shown = name or "unnamed"
        if name in _RESERVED or (name in _AXES and not is_axis):
            shown = f"{self.facts.source}/{name}"
        if len(self._names) >= _MAX_NAMES:
            self.leave_out(f"values of more than {_MAX_NAMES:,} names")
            return None
        if not is_axis:
            self._names[name] = shown
        return shown

    def add_image(self, name: str, step: int, data: bytes) -> dict[str, str] | None:
        """Keep a copy of an image, and return what a line says of it; None for one that is left
        out."""
        if not data.startswith(_PNG):
            self.leave_out("images that are not PNG")
        elif len(data) > self.max_image_bytes:
            self.leave_out(f"images of more than {self.max_image_bytes >> 20} MiB")
        elif self.facts.media_bytes + len(data) > _MAX_MEDIA_BYTES:
            self.leave_out(f"images after the first {_MAX_MEDIA_BYTES >> 20} MiB of them")
        else:
            self.run.media_folder.mkdir(exist_ok=True)
            path = self.run.media_folder / f"{quote_media_name(name)}-{step:09d}.png"
            with replace_file(path) as temporary:
                temporary.write_bytes(data)
            self.facts.media_bytes += len(data)
            return {"image": str(path.relative_to(self.run.folder))}
        return None

    def add_settings(self, settings: Mapping[str, Any]) -> None:
        """Add settings, which may be nested."""
        for long_name, value in flatten_values(settings):
            name = shorten_name(long_name)
            if len(self.facts.settings) >= _MAX_SETTINGS and name not in self.facts.settings:
                self.leave_out(f"settings after the first {_MAX_SETTINGS:,}")
                return
            self.facts.settings[name] = _limit_setting(value)

    def remove_settings(self, name: str) -> None:
        """Remove a setting and those below it."""
        name = shorten_name(name)
        for key in [k for k in self.facts.settings if k == name or k.startswith(f"{name}.")]:
            del self.facts.settings[key]

    def leave_out(self, kind: str, count: int = 1) -> None:
        """Note that something is not shown."""
        _count(self.facts.left_out, kind, count)

    def note_fault(self, what: str, count: int = 1) -> None:
        """Note that something cannot be read."""
        _count(self.facts.faults, what, count)


def load_facts(folder: Path) -> ForeignFacts | None:
    """Return what foreign.json holds; None where it is missing, damaged or of another version."""
    try:
        data = read_json_object(folder / FOREIGN_FILE)
        return None if data is None else ForeignFacts.from_json(data)
    except (ValueError, TypeError, AttributeError, RecursionError):
        return None


def get_size(path: Path) -> int:
    """Return the size of a file; 0 where there is none."""
    with contextlib.suppress(OSError):
        return path.stat().st_size
    return 0


def is_same_beginning(path: Path, known: SourceFile) -> bool:
    """Return whether a file still has what was read of it."""
    try:
        with open_file(path) as file:
            if os.fstat(file.fileno()).st_size < known.offset:
                return False
            return not known.offset or compute_mark(file, known.offset) == known.mark
    except OSError:
        return False


def open_file(path: Path) -> Any:
    """Open a file of another program to read it, but no link: that may lead out of the folders
    which are shown."""
    handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    return os.fdopen(handle, "rb")


def flatten_values(values: Mapping[str, Any], depth: int = 6) -> Iterable[tuple[str, Any]]:
    """Yield values that may be nested by their dotted names. Those that are nested deeper than
    anybody does are left out."""
    for key, value in values.items():
        if isinstance(value, dict) and value and "_type" not in value:
            if depth:
                for name, inner in flatten_values(value, depth - 1):
                    yield f"{key}.{name}", inner
        else:
            yield str(key), value


def shorten_name(name: str) -> str:
    """Return the name of a metric or a setting; no two long ones become the same."""
    shown = name.encode("utf-8", "replace").decode()
    if len(shown) <= _MAX_NAME:
        return shown
    digest = hashlib.blake2b(shown.encode(), digest_size=6).hexdigest()
    return f"{shown[:_MAX_NAME]}…{digest}"


def limit_text(text: str, length: int = _MAX_TEXT) -> str:
    """Return the beginning of a text that is longer than that."""
    return text if len(text) <= length else text[:length] + "…"


def _limit_setting(value: Any) -> Any:
    if isinstance(value, str):
        return limit_text(value, _MAX_SETTING)
    if isinstance(value, (dict, list)):
        if not _is_shallow(value, 8):
            return "…"
        text = json.dumps(value)
        return value if len(text) <= _MAX_SETTING else limit_text(text, _MAX_SETTING)
    return value


def _is_shallow(value: Any, depth: int) -> bool:
    if not isinstance(value, (dict, list)):
        return True
    inner = value.values() if isinstance(value, dict) else value
    return depth > 0 and all(_is_shallow(each, depth - 1) for each in inner)


def _count(counts: dict[str, int], what: str, count: int) -> None:
    what = limit_text(what, 200)
    if what not in counts and len(counts) >= _MAX_FAULTS:
        what = "others"
    counts[what] = counts.get(what, 0) + count


def _encode(line: MetricsLine) -> bytes:
    return (json.dumps(line) + "\n").encode()
