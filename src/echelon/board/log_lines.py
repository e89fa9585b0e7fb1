"""The lines of a run's logs, merged in order of time, any page of them at once.

A log may be larger than the memory. So it is read once, and what is kept of it is small: how many
lines were before every 64 kB (`LineOffsets`), and which lines of which log follow each other
(`MergedLogs`, in a file without a name on the disk). Both are followed while the logs grow. A line
never changes its number: lines that come later are put after those that were there, as `echelon
logs -f` does.
"""

from __future__ import annotations

import heapq
import os
import struct
import tempfile
import threading
import time
from array import array
from bisect import bisect_left, bisect_right
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import suppress
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

from echelon.board.log_search import LogSearch, SearchQuery, WholeLines
from echelon.board.request import NotFoundError, Request, Response, Route, json_response
from echelon.board.safe_files import open_inside
from echelon.jobs.log_reader import LogStamp
from echelon.runs.run_folder import Run
from echelon.utils.cache_root import get_cache_root

MAX_LINE_BYTES = 1 << 16
"""Of a line that is longer, the beginning is shown; of a progress bar its end."""
_BLOCK_BYTES = 1 << 16
_MAX_PAGE_LINES = 5000
_PAGE_BYTES = 2 << 20
"""Once a page has so many, its further lines are cut at _SHORT_LINE_BYTES."""
_SHORT_LINE_BYTES = 1 << 10
_FIRST_ANSWER_S = 0.3
"""How long a page waits for the index, and for a search, before it is told that they go on."""
_MAX_INDEXES = 12
"""Selections of logs that are kept indexed. The one not looked at for longest is closed."""
_MARK_BYTES = 64
_JOIN_WITHIN_S = 1.0
"""Lines of one log that follow each other so soon have one time."""
_SEGMENT = struct.Struct("<QQdQ")


class LogPageLine(NamedTuple):
    """One line of a page."""

    n: int
    """Its number among the merged lines, from 0."""
    name: str
    t: float
    """By when it was there, in seconds since 1970."""
    text: str
    cut_bytes: int
    """How much of it is left out."""
    is_partial: bool
    """Whether its end is still to be written."""


class LineOffsets:
    """Where the lines of one log are, as far as it was read."""

    def __init__(self, path: Path, folder: Path) -> None:
        self.path, self._folder = path, folder
        self.name = path.stem
        self.size_bytes = 0
        """Up to here it was read."""
        self.line_count = 0
        """Of whole lines, up to there."""
        self.end_of_lines = 0
        """Where the last whole line ends."""
        self.time = 0.0
        """Of the last line."""
        self.segments = array("Q")
        """The numbers of its segments."""
        self.shown = (0, 0)
        """Where the lines end that can be searched, and how many they are."""
        self._counts = array("Q")
        """The lines that end before every _BLOCK_BYTES."""
        self._mark = b""
        self._inode = -1
        self._seen = (0, 0, 0)

    def open(self) -> int:
        """Return a handle of the log."""
        return open_inside(self.path, self._folder)

    def looks_changed(self) -> bool:
        """Return whether the file is another one, or changed, since the last call."""
        found = os.stat(self.path)
        seen = (found.st_ino, found.st_size, found.st_mtime_ns)
        is_changed, self._seen = seen != self._seen, seen
        return is_changed

    def has_begun_anew(self, handle: int) -> bool:
        """Return whether the file is not the one that was read: shorter, or with other content."""
        found = os.fstat(handle)
        if self._inode in (-1, found.st_ino) and found.st_size >= self.size_bytes:
            start = self.size_bytes - len(self._mark)
            return os.pread(handle, len(self._mark), start) != self._mark
        return True

    def read_until(self, handle: int, size: int) -> int:
        """Read on up to a size, and return how many more whole lines there are."""
        before, text = self.line_count, b""
        while self.size_bytes < size:
            offset = self.size_bytes
            room = _BLOCK_BYTES - offset % _BLOCK_BYTES
            text = os.pread(handle, min(size - offset, room), offset)
            if not text:
                break
            if offset % _BLOCK_BYTES == 0:
                self._counts.append(self.line_count)
            if (last := text.rfind(b"\n")) >= 0:
                self.end_of_lines = offset + last + 1
                self.line_count += text.count(b"\n")
            self.size_bytes = offset + len(text)
        return self.line_count - before

    def set_mark(self, handle: int) -> None:
        """Remember by what the file will be known."""
        self._inode = os.fstat(handle).st_ino
        start = max(0, self.size_bytes - _MARK_BYTES)
        self._mark = os.pread(handle, self.size_bytes - start, start)

    def find_end(self, handle: int, count: int, start: int | None = None) -> int:
        """Return where the first so many lines end; ``start`` is where the one before ends."""
        if count == 0:
            return 0
        block = bisect_left(self._counts, count) - 1
        offset, left = block * _BLOCK_BYTES, count - self._counts[block]
        if start is not None and start >= offset:
            offset, left = start, 1
        text = os.pread(handle, (block + 1) * _BLOCK_BYTES - offset, offset)
        at = -1
        for _ in range(left):
            at = text.find(b"\n", at + 1)
        return offset + at + 1


class _StampsFile:
    """The stamps of one node, read from where the last read stopped."""

    def __init__(self, path: Path) -> None:
        self._path, self._offset = path, 0

    def read_new(self) -> Iterator[LogStamp]:
        with suppress(OSError), self._path.open("rb") as file:
            file.seek(self._offset)
            for line in file:
                if not line.endswith(b"\n"):
                    return
                self._offset += len(line)
                with suppress(ValueError):
                    moment, name, size = line.decode().split()
                    yield LogStamp(float(moment), name, int(size))


class _Segment(NamedTuple):
    """Lines of one log that follow each other among the merged ones."""

    first: int
    """The number of its first line among all."""
    first_of_log: int
    """And among those of its log."""
    time: float
    log: int


class _SegmentFile:
    """The segments in their order, in a file that ends with this process."""

    def __init__(self) -> None:
        folder = get_cache_root(os.environ) / "board"
        with suppress(OSError):
            folder.mkdir(parents=True, exist_ok=True)
        try:
            self._file = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115
        except OSError:
            self._file = tempfile.TemporaryFile()  # noqa: SIM115
        self.count = 0
        self._pending: list[bytes] = []

    def append(self, segment: _Segment) -> int:
        """Add a segment, and return its number. It can be read after the next flush."""
        self._pending.append(_SEGMENT.pack(*segment))
        if len(self._pending) >= 4096:
            self.flush()
        return self.count + len(self._pending) - 1

    def flush(self) -> None:
        os.pwrite(self._file.fileno(), b"".join(self._pending), self.count * _SEGMENT.size)
        self.count += len(self._pending)
        self._pending = []

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> _Segment:
        text = os.pread(self._file.fileno(), _SEGMENT.size, index * _SEGMENT.size)
        return _Segment(*_SEGMENT.unpack(text))

    def close(self) -> None:
        self._file.close()


class MergedLogs:
    """Some logs of a run as one list of lines.

    `update` reads what is new, in one thread at a time; `read_page` may be called meanwhile and
    sees what has been read so far.
    """

    def __init__(self, run: Run, names: Sequence[str]) -> None:
        self._run = run
        self._logs: list[LineOffsets] = []
        self._by_name: dict[str, int] = {}
        self._stamps: dict[str, _StampsFile] = {}
        self._segments = _SegmentFile()
        self._last: _Segment | None = None
        self._read_count = 0
        self.line_count = 0
        """Of whole lines that can be shown."""
        self.is_complete = False
        """Whether everything that was there at the last update has been read."""
        self.has_begun_anew = False
        """Whether a log was replaced, so that these numbers of lines hold no more."""
        self.mark = os.urandom(6).hex()
        self._updating = threading.Lock()
        self._updated = threading.Event()
        self.searches: OrderedDict[SearchQuery, LogSearch] = OrderedDict()
        self.add_names(names)

    def add_names(self, names: Sequence[str]) -> None:
        """Add logs that have appeared."""
        for name in names:
            if name not in self._by_name:
                self._logs.append(
                    LineOffsets(self._run.logs_folder / f"{name}.log", self._run.folder)
                )
                self._by_name[name] = len(self._logs) - 1

    def list_names(self) -> list[str]:
        """Return the names of its logs."""
        return [log.name for log in self._logs]

    @property
    def size_bytes(self) -> int:
        """The bytes that have been read."""
        return sum(log.size_bytes for log in self._logs)

    # --- following ---

    def update(self, wait_s: float) -> None:
        """Read what is new in the background, and wait so long for it."""
        if self._updating.acquire(blocking=False):
            self._updated.clear()
            threading.Thread(target=self._update_and_release, daemon=True).start()
        self._updated.wait(wait_s)

    def _update_and_release(self) -> None:
        try:
            self._read_new()
        finally:
            self._updating.release()
            self._updated.set()

    def _read_new(self) -> None:
        handles = _HandleCache()
        try:
            sizes: dict[int, int] = {}
            ends: list[tuple[float, int]] = []
            for index, log in enumerate(self._logs):
                with suppress(NotFoundError, OSError):
                    if not log.looks_changed():
                        continue
                    handle = handles.get(log)
                    if log.has_begun_anew(handle):
                        self.has_begun_anew = True
                        return
                    found = os.fstat(handle)
                    if found.st_size > log.size_bytes:
                        sizes[index] = found.st_size
                        ends.append((found.st_mtime, index))
            self.is_complete = self.is_complete and not sizes
            self._follow_stamps(sizes, handles)
            # What was written after the last stamp has the time of the file's last change.
            for moment, index in sorted(ends):
                self._take(index, max(moment, self._logs[index].time), sizes[index], handles)
            for index in sizes:
                with suppress(NotFoundError, OSError):
                    self._logs[index].set_mark(handles.get(self._logs[index]))
            self._publish()
            self.is_complete = True
        finally:
            handles.close()

    def _follow_stamps(self, sizes: dict[int, int], handles: _HandleCache) -> None:
        with suppress(OSError):
            for path in self._run.logs_folder.glob("node-*.stamps"):
                self._stamps.setdefault(path.name, _StampsFile(path))
        stamps = heapq.merge(
            *(file.read_new() for file in self._stamps.values()), key=attrgetter("time")
        )
        due = time.monotonic() + _FIRST_ANSWER_S
        for number, (moment, name, size) in enumerate(stamps):
            index = self._by_name.get(name, -1)
            if index in sizes and size is not None and size > self._logs[index].size_bytes:
                self._take(index, moment, min(size, sizes[index]), handles)
            if number % 1024 == 0 and time.monotonic() > due:
                self._publish()
                due = time.monotonic() + _FIRST_ANSWER_S

    def _take(self, index: int, moment: float, size: int, handles: _HandleCache) -> None:
        """Add the lines of a log that end within the first so many bytes."""
        log = self._logs[index]
        while log.size_bytes < size:
            first = log.line_count
            # A part of what may be a gigabyte, so that pages see how far it is.
            until = min(size, log.size_bytes + (16 << 20))
            before = log.size_bytes
            try:
                added = log.read_until(handles.get(log), until)
            except (NotFoundError, OSError):
                return
            if added:
                self._append(_Segment(self._read_count, first, moment, index))
                self._read_count += added
            if until < size:
                self._publish()
            if log.size_bytes == before:
                return
        log.time = max(log.time, moment)

    def _append(self, segment: _Segment) -> None:
        last = self._last
        if (
            last is not None
            and last.log == segment.log
            and segment.time - last.time < _JOIN_WITHIN_S
        ):
            return  # its lines continue those of the last segment
        self._last = segment
        self._logs[segment.log].segments.append(self._segments.append(segment))

    def _publish(self) -> None:
        """Let pages see what has been read."""
        self._segments.flush()
        self.line_count = self._read_count
        for log in self._logs:
            log.shown = (log.end_of_lines, log.line_count)

    # --- reading ---

    def read_page(self, first: int, count: int) -> tuple[list[LogPageLine], int]:
        """Return lines from a number on, and how many there are. Behind the whole lines come those
        that are still being written, one for each log that has one."""
        total, handles = self.line_count, _HandleCache()
        try:
            partial = self._list_partial_lines()
            last = min(first + min(count, _MAX_PAGE_LINES), total + len(partial))
            lines = list(self._iterate_lines(max(0, first), min(last, total), handles))
            room = max(_SHORT_LINE_BYTES, _PAGE_BYTES // max(1, len(partial)))
            for n in range(max(first, total), last):
                log = self._logs[partial[n - total]]
                start, end = log.end_of_lines, log.size_bytes
                text, cut = _read_line(handles.get(log), start, end, min(MAX_LINE_BYTES, room))
                lines.append(LogPageLine(n, log.name, log.time, text, cut, True))
            return lines, total + len(partial)
        finally:
            handles.close()

    def _list_partial_lines(self) -> list[int]:
        if not self.is_complete:
            return []
        return [i for i, log in enumerate(self._logs) if log.end_of_lines < log.size_bytes]

    def _iterate_lines(self, first: int, last: int, handles: _HandleCache) -> Iterator[LogPageLine]:
        if first >= last:
            return
        index, room = bisect_right(self._segments, first, key=_get_first) - 1, _PAGE_BYTES
        segment = self._segments[index]
        ends: dict[int, tuple[int, int]] = {}
        """For each log the lines that were read, and where they end."""
        n = first
        while n < last:
            following = self._segments[index + 1] if index + 1 < len(self._segments) else None
            until = last if following is None else min(last, following.first)
            log = self._logs[segment.log]
            handle = handles.get(log)
            for number in range(n, until):
                line = segment.first_of_log + number - segment.first
                known, start = ends.get(segment.log, (-1, 0))
                if known != line:
                    start = log.find_end(handle, line)
                end = log.find_end(handle, line + 1, start)
                ends[segment.log] = (line + 1, end)
                limit = MAX_LINE_BYTES if room > 0 else _SHORT_LINE_BYTES
                text, cut = _read_line(handle, start, end, limit)
                room -= len(text)
                yield LogPageLine(number, log.name, segment.time, text, cut, False)
            n, index = until, index + 1
            if following is not None:
                segment = following

    # --- searching ---

    def list_whole_lines(self) -> list[WholeLines]:
        """Return how far each log can be searched."""
        return [WholeLines(log.open, *log.shown) for log in self._logs]

    def find_number(self, log: int, line: int) -> int:
        """Return the number among all lines of a line of one log."""
        segments = self._logs[log].segments
        at = bisect_right(segments, line, key=lambda i: self._segments[i].first_of_log) - 1
        segment = self._segments[segments[at]]
        return segment.first + line - segment.first_of_log

    def search(self, query: SearchQuery, wait_s: float) -> LogSearch:
        """Search all lines that have been read, from where the same search stopped before."""
        search = self.searches.setdefault(query, LogSearch(query))
        self.searches.move_to_end(query)
        while len(self.searches) > 4:
            self.searches.popitem(last=False)[1].close()
        search.go_on(self.list_whole_lines(), self.find_number, wait_s)
        return search

    def close(self) -> None:
        """Stop its searches. Files are closed with the last thread that reads them."""
        for search in list(self.searches.values()):
            search.close()


def _get_first(segment: _Segment) -> int:
    return segment.first


class _HandleCache:
    """Opened logs. A world may have more ranks than a process may have files open."""

    _MAX_OPEN = 64

    def __init__(self) -> None:
        self._handles: OrderedDict[int, int] = OrderedDict()

    def get(self, log: LineOffsets) -> int:
        """Return a handle of a log, which is closed when many others have been asked for."""
        key = id(log)
        if (handle := self._handles.get(key)) is not None:
            self._handles.move_to_end(key)
            return handle
        handle = self._handles[key] = log.open()
        if len(self._handles) > self._MAX_OPEN:
            os.close(self._handles.popitem(last=False)[1])
        return handle

    def close(self) -> None:
        for handle in self._handles.values():
            os.close(handle)
        self._handles.clear()


def _read_line(handle: int, start: int, end: int, limit: int) -> tuple[str, int]:
    """Return the line between two offsets as a terminal would show it in the end, and how many
    bytes of it are left out: what came before a carriage return was written over."""
    size = end - start
    text = os.pread(handle, min(size, limit), start)
    if size <= limit:
        return _decode_last_state(text), 0
    tail = os.pread(handle, limit, end - limit)
    if b"\r" in tail.rstrip(b"\r\n"):
        return _decode_last_state(tail), 0
    return text.decode(errors="replace"), size - limit


def _decode_last_state(text: bytes) -> str:
    return text.rstrip(b"\r\n").rpartition(b"\r")[2].decode(errors="replace")


# --- the logs that are looked at ---


class LogIndexes:
    """The selections of logs that pages look at, by run and names."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._indexes: OrderedDict[tuple[str, tuple[str, ...]], MergedLogs] = OrderedDict()

    def get(self, run: Run, names: Sequence[str]) -> MergedLogs:
        """Return the index of these logs; without names of those that `echelon logs` shows."""
        from echelon.jobs.logs import list_log_names, select_log_names

        existing = list_log_names(run)
        selected = [n for n in existing if n in names] if names else select_log_names(run, [], [])
        key = (str(run.folder), tuple(sorted(names)))
        with self._lock:
            index = self._indexes.get(key)
            if index is None or index.has_begun_anew:
                index = self._indexes[key] = MergedLogs(run, selected)
            else:
                index.add_names(selected)
            self._indexes.move_to_end(key)
            while len(self._indexes) > _MAX_INDEXES:
                self._indexes.popitem(last=False)[1].close()
            return index


_indexes = LogIndexes()


def show_log_lines(request: Request) -> Response:
    """``GET /api/run/{id}/logs``: some lines of the logs of a run, merged in order of time.

    Parameters: ``names`` (``rank-0,node-1,job``; without it all that `echelon logs` shows),
    ``from`` (the number of the first line; negative: counted from the end; default: the last ones),
    ``count`` (200; at most 5000), ``search`` with ``regex=1`` and ``case=1``.

    Answer::

        {"mark": text,         another one: numbers of lines hold no more, begin anew
         "names": [all logs that there are], "selected": [those in `lines`],
         "total": lines, "size": bytes, "complete": false while the logs are still being read,
         "from": n, "lines": [{"n", "name", "t", "text", "cut"?: bytes left out, "partial"?: true}],
         "matches"?: [n …] in order, at most 10000, "match_count"?: all, "searching"?: bool,
         "search_fault"?: text}

    ``text`` has no end of line and may contain ANSI escapes and any other character. A line that
    is still being written is ``partial``, and comes last, so its number may change. Of a progress
    bar the last state is shown. Times are seconds since 1970.
    """
    run = request.board.find_run(request.path_values["id"])
    from echelon.jobs.logs import list_log_names

    names = [name for each in request.get_all("names") for name in each.split(",") if name]
    existing = list_log_names(run)
    if unknown := [name for name in names if name not in existing]:
        raise NotFoundError(f"run {run.name} has no log {unknown[0][:80]!r}")
    index = _indexes.get(run, names)
    index.update(_FIRST_ANSWER_S)
    if index.has_begun_anew:
        index = _indexes.get(run, names)
        index.update(_FIRST_ANSWER_S)
    count = max(0, min(request.get_int("count", 200), _MAX_PAGE_LINES))
    first = request.get_int("from", -count)
    is_complete, size_bytes = index.is_complete, index.size_bytes
    if first < 0:
        _, total = index.read_page(0, 0)
        first = max(0, total + first)
    lines, total = index.read_page(first, count)
    data: dict[str, Any] = {
        "mark": index.mark,
        "names": existing,
        "selected": index.list_names(),
        "total": total,
        "size": size_bytes,
        "complete": is_complete,
        "from": first,
        "lines": [_line_to_dict(line) for line in lines],
    }
    if pattern := request.get("search"):
        is_regex, keeps_case = request.get("regex") == "1", request.get("case") == "1"
        search = index.search(SearchQuery(pattern, is_regex, keeps_case), _FIRST_ANSWER_S)
        data |= search.to_dict()
    return json_response(data)


def _line_to_dict(line: LogPageLine) -> dict[str, Any]:
    data: dict[str, Any] = {"n": line.n, "name": line.name, "t": line.t, "text": line.text}
    if line.cut_bytes:
        data["cut"] = line.cut_bytes
    if line.is_partial:
        data["partial"] = True
    return data


ROUTES: list[Route] = [("GET", "/api/run/{id}/logs", show_log_lines)]
