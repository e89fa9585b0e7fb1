"""All metrics of one run as pyramids: points, and buckets of 16 to 4096 of them.

A pyramid follows metrics.jsonl as a list of runs does (`runs.metrics_file`): it reads only what was
added, and notices by a checksum of the last bytes that a resumed run has written another file. What
was read is kept in a `CurveFile`, for runs of more than a few thousand lines; the newest points are
in memory. Long files are read by a process of its own (`curve_builds`), and this process takes over
what that one has written.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import secrets
import threading
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from echelon.board.curves.curve_file import CurveFile, NewSegment, forget_segments
from echelon.board.curves.line_columns import (
    MEDIA_KINDS,
    NUMBER,
    BlockColumns,
    SeriesKey,
    read_block,
)
from echelon.runs.metrics_file import MARK_BYTES, MetricsBlocks, hash_mark
from echelon.runs.run_folder import Run
from echelon.utils.cache_root import get_cache_root
from echelon.utils.locks import FileLock, LocksUnsupportedError
from echelon.utils.os_errors import format_os_error_reason
from echelon.utils.trust import make_trusted_folder

Floats = NDArray[np.float64]

LEVEL_SIZES = (1, 16, 64, 256, 1024, 4096)
"""Points of a bucket of each level. Of level 0, the points themselves, to level 1 it is a large
step, so that buckets are small beside the points; above, small ones, so that a picture needs no
more than four buckets a pixel."""
MIN_KEPT_LINES = 4096
"""Fewer are read faster than files are looked after."""
_MIN_FLUSH_BYTES = 1 << 20
MAX_FLUSH_BYTES = 8 << 20
"""Bytes of metrics.jsonl that are in memory alone at most, while their points can be written."""
POINT_AS_BUCKET = [0, 0, 1, 0, 1, 0, 1]
"""The columns of a bucket, from those of a point."""
_FAR_BEHIND_BYTES = 1 << 20
_MAX_CACHE_BYTES = 4 << 30
"""Of curves of runs of others, which are in the user's cache folder."""
_FILE_NAME, _LOCK_NAME = "curves", "lock"


@dataclass
class _Series:
    """What is in memory of one series: all of its points that the file does not have yet."""

    number: int
    """In the file."""
    stored: int = 0
    """Points in the file."""
    pieces: list[tuple[Floats, Floats]] = field(default_factory=list)
    tail: Floats = field(default_factory=lambda: np.empty((2, 0)))
    """The points of the pieces, once they were asked for."""
    not_finite: int = 0
    lowest: float = float("inf")
    highest: float = float("-inf")
    """Of its steps."""
    is_ascending: bool = True
    """Whether no step is before the one that was logged before it."""

    def add(self, steps: Floats, values: Floats) -> None:
        self.pieces.append((steps, values))
        if steps[0] < self.highest or (steps[1:] < steps[:-1]).any():
            self.is_ascending = False
        self.lowest = min(self.lowest, float(steps.min()))
        self.highest = max(self.highest, float(steps.max()))

    def drop_tail(self) -> None:
        self.pieces, self.tail = [], np.empty((2, 0))

    def get_tail(self) -> Floats:
        if self.pieces:
            steps, values = zip(*self.pieces, strict=True)
            added = np.stack([np.concatenate(steps), np.concatenate(values)])
            self.tail = np.concatenate([self.tail, added], axis=1)
            self.pieces = []
        return self.tail


class SeriesView:
    """One series as it is at a moment: its points and buckets by level, to be read while the
    pyramid goes on."""

    def __init__(self, file: CurveFile, series: _Series) -> None:
        self.not_finite = series.not_finite
        self.lowest_step, self.highest_step = series.lowest, series.highest
        self.is_ascending = series.is_ascending
        """Whether its points are in the order of their steps."""
        self._tail = series.get_tail()
        self._stored = series.stored
        self._levels = [file.get_level(series.number, level) for level in range(len(LEVEL_SIZES))]
        self._counts: list[int] = [self._stored + self._tail.shape[1]]
        self._counts += [level.count for level in self._levels[1:]]

    @property
    def count(self) -> int:
        """How many points it has."""
        return self._counts[0]

    def get_count(self, level: int) -> int:
        """Return how many points (level 0) or full buckets a level has."""
        return self._counts[level]

    def find_highest_level(self, enough: int = 1) -> int:
        """Return the highest level that has enough buckets; 0 if none has."""
        return max(
            level for level, count in enumerate(self._counts) if count >= enough or not level
        )

    def list_all(self, level: int) -> NDArray[np.int64]:
        """Return the numbers of all records of a level."""
        return np.arange(self._counts[level])

    def list_parts(self, level: int, numbers: NDArray[np.int64], lower: int) -> NDArray[np.int64]:
        """Return the numbers of the records of a lower level that are in the given buckets, and of
        those after the last full bucket."""
        factor = LEVEL_SIZES[level] // LEVEL_SIZES[lower]
        inside = (numbers[:, None] * factor + np.arange(factor)).ravel()
        rest = np.arange(self._counts[level] * factor, self._counts[lower])
        return np.concatenate([inside, rest])

    def take(self, level: int, numbers: NDArray[np.int64]) -> Floats:
        """Return records by their numbers, which ascend: of points step and value, of buckets
        lowest and highest step, lowest value, its step, highest value, its step, mean."""
        if level or (self._stored and (not len(numbers) or numbers[-1] < self._stored)):
            return self._levels[level].take(numbers)
        split = int(np.searchsorted(numbers, self._stored))
        newest = self._tail[:, numbers[split:] - self._stored]
        if not split:
            return newest
        return np.concatenate([self._levels[0].take(numbers[:split]), newest], axis=1)


@dataclass
class RunFacts:
    """What is known of a run's lines beside their points."""

    lines: int = 0
    """Lines with a step."""
    steps_per_epoch: float | None = None
    begun: float | None = None
    """When training began, by the first line of training."""
    first_time: float | None = None

    def add(self, columns: BlockColumns) -> None:
        self.lines += columns.lines
        if columns.steps_per_epoch is not None:
            self.steps_per_epoch = max(self.steps_per_epoch or 0.0, columns.steps_per_epoch)
        self.begun = columns.begun if self.begun is None else self.begun
        self.first_time = columns.first_time if self.first_time is None else self.first_time


class CurvePyramid:
    """The curves of one run, as far as its lines were read."""

    def __init__(self, run: Run, *, is_in_memory: bool = False) -> None:
        self.run = run
        self.lock = threading.RLock()
        """Held while lines are added; a `SeriesView` is read without it."""
        self.is_in_memory = is_in_memory
        """Whether nothing is to be written, since there is no place for it."""
        self.version = 0
        """Changes with every line that is added."""
        self.offset = 0
        self.size = 0
        """Bytes of metrics.jsonl, when it was looked at last."""
        self.facts = RunFacts()
        self.known_scale: Any = None
        """The one that `curve_scale` made last."""
        self._series: dict[SeriesKey, _Series] = {}
        self._file = CurveFile.make_in_memory()
        self._path: Path | None = None
        """Where the file is, if it is not in memory."""
        self._locks: dict[Path, FileLock] = {}
        self.fault = ""
        """Why the last flush could not write; empty if none failed."""
        self._mark = ""
        self._last_bytes = b""
        self._stored_offset = 0
        self._stored_series = 0
        self._stored_not_finite: dict[int, int] = {}
        self._next_flush = 0
        """Where it is tried again to write what could not be written."""

    # --- what there is ---

    @property
    def share(self) -> float:
        """How much of metrics.jsonl was read, from 0 to 1."""
        return min(1.0, self.offset / self.size) if self.size else 1.0

    @property
    def pending_bytes(self) -> int:
        """Bytes of metrics.jsonl that were not read when it was looked at last."""
        return max(0, self.size - self.offset)

    @property
    def is_far_behind(self) -> bool:
        """Whether so much was not read yet that a picture would look otherwise."""
        return self.pending_bytes > (_FAR_BEHIND_BYTES if self.offset else 0)

    @property
    def unwritten_bytes(self) -> int:
        """Bytes of metrics.jsonl whose points are in memory alone."""
        return self.offset - self._stored_offset

    def list_keys(self) -> list[SeriesKey]:
        """Return kinds and names of all series."""
        with self.lock:
            return list(self._series)

    def get_series(self, key: SeriesKey) -> SeriesView | None:
        """Return a series as it is now; None if no line had it."""
        with self.lock:
            series = self._series.get(key)
            return None if series is None else SeriesView(self._file, series)

    # --- following ---

    def look(self) -> None:
        """Take over what another process has written, and see how long metrics.jsonl is. If it is
        not the file that was read, everything is forgotten. Raises OSError if it cannot be read."""
        with self.lock, MetricsBlocks(self.run.metrics_file) as blocks:
            self.size = blocks.get_size()
            self._take_over_files()
            if self.offset and blocks.compute_mark(self.offset) != self._mark:
                self._start_over()

    def read_lines(self, max_bytes: int) -> bool:
        """Read some of the lines that were added, and return whether that were all. Call `look`
        first. Raises OSError."""
        with self.lock, MetricsBlocks(self.run.metrics_file) as blocks:
            stop = self.offset + max_bytes
            while self.offset < stop:
                block = blocks.read_block(self.offset)
                if not block:
                    self.size = self.offset
                    return True
                if block.endswith(b"\n"):
                    self._add_block(read_block(block, self.offset))
                self.offset += len(block)
                self._last_bytes = (self._last_bytes + block[-MARK_BYTES:])[-MARK_BYTES:]
                self._mark = hash_mark(self._last_bytes)
                self.version += 1
                if self._is_flush_due() and not self.flush():
                    self._next_flush = self.offset + MAX_FLUSH_BYTES
            return False

    def _add_block(self, columns: BlockColumns) -> None:
        self.facts.add(columns)
        for key, (steps, values) in columns.series.items():
            self._get_or_add(key).add(steps, values)
        for name, count in columns.not_finite.items():
            self._get_or_add((NUMBER, name)).not_finite += count

    def _get_or_add(self, key: SeriesKey) -> _Series:
        if (series := self._series.get(key)) is None:
            series = self._series[key] = _Series(len(self._series))
        return series

    def _start_over(self) -> None:
        self.close()
        self._file, self._path = CurveFile.make_in_memory(), None
        self._series, self.facts = {}, RunFacts()
        self._mark, self._last_bytes = "", b""
        self.offset = self._stored_offset = self._stored_series = self._next_flush = 0
        self._stored_not_finite = {}
        self.version += 1

    def close(self) -> None:
        """Drop what is in memory of the file. Whoever draws from it still may."""
        forget_segments(self._file)

    def discard_damaged_file(self) -> None:
        """Remove a file that is not what was written, and forget everything."""
        with self.lock:
            if self._path is not None and self._file.is_at(self._path):
                with contextlib.suppress(OSError):
                    self._path.unlink()
            self._start_over()

    # --- files of earlier times and of other processes ---

    def _take_over_files(self) -> None:
        """Read what files have beyond what was read here."""
        if self.is_in_memory:
            return
        if self._path is not None:
            if self._file.is_at(self._path):
                if self._file.get_size() > self._file.end:
                    self._take_over(self._file, self._path)
                return
            self._start_over()  # somebody else has made it anew
        for path in (place / _FILE_NAME for place in list_places(self.run)):
            with contextlib.suppress(OSError):
                file = CurveFile.open(path)
                if file.get_owner() == os.geteuid() and self._take_over(file, path):
                    os.utime(path)  # for `_shrink_cache`
                    return

    def _take_over(self, file: CurveFile, path: Path) -> bool:
        """Take over the new frames of a file if they belong to metrics.jsonl; return whether there
        were any."""
        frames = file.read_frames()
        if not frames:
            return False
        offset, mark = frames[-1]["offset"], frames[-1]["mark"]
        with MetricsBlocks(self.run.metrics_file) as blocks:
            is_fitting = blocks.compute_mark(offset) == mark
            last_bytes = blocks.read_last_bytes(offset)
        if not is_fitting:  # a resumed run has written other lines
            if file is self._file:
                self._start_over()
            return False
        if file is not self._file:
            self._start_over()
        self._file, self._path = file, path
        self._forget_tails()
        for facts in frames:
            self._add_frame(facts)
        self.offset = self._stored_offset = offset
        self._mark, self._last_bytes = mark, last_bytes
        self.version += 1
        return True

    def _forget_tails(self) -> None:
        """Forget what is in memory alone, and would be read twice."""
        for key in list(self._series)[self._stored_series :]:
            del self._series[key]
        for series in self._series.values():
            series.drop_tail()
            series.not_finite = self._stored_not_finite.get(series.number, 0)

    def _add_frame(self, facts: dict[str, Any]) -> None:
        for kind, name in facts["names"]:
            self._get_or_add((kind, name))
        self._stored_series = len(self._series)
        by_number = list(self._series.values())
        for number, points, not_finite, lowest, highest, is_ascending in facts["series"]:
            series = by_number[number]
            series.stored += points
            series.not_finite = self._stored_not_finite[number] = not_finite
            series.lowest = min(series.lowest, lowest)
            series.highest = max(series.highest, highest)
            series.is_ascending = is_ascending
        self.facts = RunFacts(**facts["facts"])

    # --- writing ---

    @contextlib.contextmanager
    def hold_file(self) -> Iterator[None]:
        """Wait until no other process writes the file, and keep others from it. Raises OSError
        where there is no place for a file."""
        lock = self._get_lock(self._list_writable_places()[0])
        try:
            lock.acquire()
        except LocksUnsupportedError:  # two that write at once damage it, which is noticed
            yield
            return
        try:
            yield
        finally:
            lock.release()

    def flush(self) -> bool:
        """Write the points that are in memory alone, and return whether that was done. If another
        process writes, it is left to that one. Where there is no place, or no space, all stays in
        memory, and `fault` says why."""
        with self.lock:
            if self.is_in_memory:
                with contextlib.suppress(OSError):  # then it takes more memory than it would
                    self._file.append_frame(*self._make_frame(self._file))
                    self._note_stored()
                return True
            for place in self._list_writable_places():
                try:
                    is_written = self._write_into(place)
                    self.fault = ""
                    return is_written
                except OSError as error:
                    self.fault = f"{place}: {format_os_error_reason(error)}"
            self.is_in_memory = self._path is None
            return False

    def _list_writable_places(self) -> list[Path]:
        return list_places(self.run) if self._path is None else [self._path.parent]

    def _get_lock(self, place: Path) -> FileLock:
        """Return the lock of a place, which is made."""
        if place not in self._locks:
            make_trusted_folder(place)
            self._locks[place] = FileLock(place / _LOCK_NAME)
        return self._locks[place]

    def _write_into(self, place: Path) -> bool:
        lock = self._get_lock(place)
        try:
            if not lock.try_acquire():
                return False
        except LocksUnsupportedError:
            return self._write_tails(place / _FILE_NAME)
        try:
            return self._write_tails(place / _FILE_NAME)
        finally:
            lock.release()

    def _write_tails(self, path: Path) -> bool:
        """Write into the file that was read, or make one. If another process was first, take over
        what that one wrote, and return False."""
        version = self.version
        self._take_over_files()
        if self.version != version:
            return False
        if self._path is not None:
            self._file.append_frame(*self._make_frame(self._file))
            self._note_stored()
            return True
        for left_over in path.parent.glob(f".{_FILE_NAME}.*"):  # of a writer that was killed
            left_over.unlink(missing_ok=True)
        if path.parent.parent == _find_cache():
            _shrink_cache(path.parent)
        temporary = path.with_name(f".{_FILE_NAME}.{secrets.token_hex(4)}")
        try:
            file = CurveFile.open(temporary, makes_file=True)
            file.append_frame(*self._make_frame(file))
            os.replace(temporary, path)
        except BaseException:
            with contextlib.suppress(OSError):
                temporary.unlink()
            raise
        self._file, self._path = file, path
        self._note_stored()
        return True

    def _make_frame(self, file: CurveFile) -> tuple[dict[str, Any], list[NewSegment]]:
        """Return the facts and the segments of what is in memory alone."""
        segments, changed = [], []
        for key, series in self._series.items():
            points = series.get_tail()
            known_not_finite = self._stored_not_finite.get(series.number, 0)
            if not points.shape[1] and series.not_finite == known_not_finite:
                continue
            levels = 1 if key[0] in MEDIA_KINDS else len(LEVEL_SIZES)
            segments += _derive_segments(file, series, points, levels)
            steps = [series.lowest, series.highest, series.is_ascending]
            changed.append([series.number, points.shape[1], series.not_finite, *steps])
        facts = {
            "offset": self.offset,
            "mark": self._mark,
            "names": list(self._series)[self._stored_series :],
            "series": changed,
            "facts": asdict(self.facts),
        }
        return facts, segments

    def _note_stored(self) -> None:
        for series in self._series.values():
            series.stored += series.get_tail().shape[1]
            series.drop_tail()
            self._stored_not_finite[series.number] = series.not_finite
        self._stored_series, self._stored_offset = len(self._series), self.offset

    @property
    def is_worth_keeping(self) -> bool:
        """Whether there is so much that it is not read again by every board."""
        return self.facts.lines > MIN_KEPT_LINES or self.offset > MAX_FLUSH_BYTES

    def _is_flush_due(self) -> bool:
        if not self.is_worth_keeping or self.offset < self._next_flush:
            return False
        due = min(max(self._stored_offset // 8, _MIN_FLUSH_BYTES), MAX_FLUSH_BYTES)
        return self.offset - self._stored_offset >= due


def _derive_segments(
    file: CurveFile, series: _Series, points: Floats, levels: int
) -> list[NewSegment]:
    """Return new points and the buckets that they fill, of all levels."""
    segments = [NewSegment(series.number, 0, points)]
    added = points[POINT_AS_BUCKET]
    for level in range(1, levels):
        factor = LEVEL_SIZES[level] // LEVEL_SIZES[level - 1]
        below = file.get_level(series.number, level - 1)
        filled = file.get_level(series.number, level).count
        open_ones = below.take_range(filled * factor, below.count)
        if level == 1:
            open_ones = open_ones[POINT_AS_BUCKET]
        children = np.concatenate([open_ones, added], axis=1)
        full = children.shape[1] // factor
        if not full:
            break
        added = merge_buckets(children[:, : full * factor], factor)
        segments.append(NewSegment(series.number, level, added))
    return segments


def merge_buckets(buckets: Floats, factor: int) -> Floats:
    """Return every so many buckets as one. Of equal lowest or highest values the first counts."""
    first, *others = (buckets[:, i::factor] for i in range(factor))
    merged: Floats = first.copy()
    merged[6] /= factor
    for other in others:
        np.minimum(merged[0], other[0], out=merged[0])
        np.maximum(merged[1], other[1], out=merged[1])
        np.copyto(merged[2:4], other[2:4], where=other[2] < merged[2])
        np.copyto(merged[4:6], other[4:6], where=other[4] > merged[4])
        merged[6] += other[6] / factor  # a sum of large values would overflow
    return merged


def list_places(run: Run) -> list[Path]:
    """Return the folders in which a run's curves may be, the preferred one first: in the run's
    folder if it is one's own, and in the user's cache folder."""
    places = []
    with contextlib.suppress(OSError):
        if run.folder.stat().st_uid == os.geteuid():
            places.append(run.curves_folder)
    if (cache := _find_cache()) is not None:
        key = hashlib.blake2b(os.fsencode(run.folder), digest_size=16).hexdigest()
        places.append(cache / key)
    return places


def _find_cache() -> Path | None:
    """Return the folder of the curves of runs of others; None for a user without a home, as in some
    containers."""
    with contextlib.suppress(RuntimeError):
        return get_cache_root(os.environ) / "board" / "curves"
    return None


def _shrink_cache(kept: Path) -> None:
    """Remove the curves that were not looked at for longest, once all take too much space. Whoever
    still draws from them has them open."""
    found = []
    for file in kept.parent.glob(f"*/{_FILE_NAME}"):
        with contextlib.suppress(OSError):
            status = file.stat()
            found.append((status.st_mtime, status.st_size, file))
    total = sum(size for _, size, _ in found)
    for _, size, file in sorted(found):
        if total <= _MAX_CACHE_BYTES:
            return
        if file.parent != kept:
            total -= size
            with contextlib.suppress(OSError):
                file.unlink()
