"""TensorBoard's event files, read without TensorBoard.

An event file is a row of records: length, checksum of the length, an `Event` of protobuf, its
checksum. Scalars, texts, images and histograms are in it in an older form, which torch's
SummaryWriter writes, and as tensors, which TensorFlow 2 writes. All files of one folder are one
run, in the order of the times in their names.
"""

from __future__ import annotations

import json
import math
import os
import re
import struct
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple

from echelon.board.foreign.converted_run import (
    ConvertedRun,
    limit_text,
    open_file,
    shorten_name,
)
from echelon.board.foreign.crc32c import (
    compute_checksums,
    compute_checksums_of_headers,
    compute_crc32c,
    mask_checksum,
)
from echelon.board.foreign.protobuf_fields import (
    MAX_FIELDS,
    Field,
    ProtobufError,
    parse_fields,
    read_bytes,
    read_double,
    read_float,
    read_integer,
    read_message,
    read_repeated_fixed,
    read_repeated_integers,
    read_text,
)
from echelon.runs.metrics_file import MetricsLine, compute_mark, is_number
from echelon.tracking.media_records import read_png_size

EVENT_FILE = re.compile(r".*tfevents\.(\d+).*")
_CHUNK_BYTES = 1 << 20
_MAX_RECORD_BYTES = 32 << 20
"""A longer record is left out. Graphs may be that long; nothing that is shown is."""
_SEARCH_BYTES = 16 << 20
"""So far is looked for the next record after a damaged length."""
_HEADER_BYTES, _FRAME_BYTES = 12, 16
_MAX_BINS = 512
_MAX_PENDING_S = 1.0
"""Values of one step that were logged within this time are one line."""
_NOT_VALUES = ("graphs", "graph_run_metadata", "custom_scalars", "mesh", "pr_curves", "audio")


# --- records ---


class RecordBatch(NamedTuple):
    """Records of a file, one after another."""

    records: list[bytes]
    offset: int
    """Where to go on. Equal to where the reading began: there is nothing more yet."""
    faults: list[str]


def read_record_batch(file: IO[bytes], offset: int, size: int) -> RecordBatch:
    """Return the records from an offset on, as far as they fit into memory well.

    A damaged record is left out and is a fault. One at the very end may be half written, and is
    left for the next time.
    """
    file.seek(offset)
    data = file.read(min(_CHUNK_BYTES, size - offset))
    found: list[tuple[bytes, bytes, int]] = []
    faults: list[str] = []
    at, is_damaged = 0, False
    while at + _HEADER_BYTES <= len(data):
        length = _parse_header(data, at)
        if length is None:
            is_damaged = True
            break
        end = at + _FRAME_BYTES + length
        if length > _MAX_RECORD_BYTES and not found:
            return _skip_long_record(offset, length, size)
        if end > len(data):
            if found or offset + end > size:
                break
            file.seek(offset)  # a record that is longer than a chunk
            data = file.read(end)
            if len(data) < end:
                break
        found.append((data[at + _HEADER_BYTES : end - 4], data[end - 4 : end], end))
        at = end
    records = []
    checksums = compute_checksums([record for record, _, _ in found])
    for (record, stated, end), checksum in zip(found, checksums, strict=True):
        if struct.pack("<I", mask_checksum(checksum)) == stated:
            records.append(record)
        elif offset + end >= size:
            return RecordBatch(records, offset + end - len(record) - _FRAME_BYTES, faults)
        else:
            faults.append("a damaged record")
    if is_damaged and not found:
        following = _find_record(file, offset + 1, size)
        if following < size:  # else what is there may not be written yet
            return RecordBatch([], following, ["damage between records"])
    return RecordBatch(records, offset + at, faults)


def _skip_long_record(offset: int, length: int, size: int) -> RecordBatch:
    end = offset + _FRAME_BYTES + length
    if end > size:
        return RecordBatch([], offset, [])
    return RecordBatch([], end, [f"a record of more than {_MAX_RECORD_BYTES >> 20} MiB"])


_header_checksums: dict[bytes, bytes] = {}
"""Checksums of lengths: a file has few different ones."""


def _parse_header(data: bytes, at: int) -> int | None:
    """Return the length that a header says; None where its checksum does not fit."""
    length = data[at : at + 8]
    checksum = _header_checksums.get(length)
    if checksum is None:
        checksum = struct.pack("<I", mask_checksum(compute_crc32c(length)))
        if len(_header_checksums) < 10_000:
            _header_checksums[length] = checksum
    if checksum != data[at + 8 : at + _HEADER_BYTES]:
        return None
    return int.from_bytes(length, "little")


def _find_record(file: IO[bytes], start: int, size: int) -> int:
    """Return where the next record begins after damage, by the checksum of its length; where
    there is none so far, the end of what was searched."""
    stop = min(size, start + _SEARCH_BYTES)
    for begin in range(start, stop, 1 << 20):
        file.seek(begin)
        data = file.read((1 << 20) + _HEADER_BYTES - 1)
        for index in _find_headers(data):
            length = int.from_bytes(data[index : index + 8], "little")
            if begin + index + _FRAME_BYTES + length <= size:
                return begin + index
    return stop


def _find_headers(data: bytes) -> list[int]:
    """Return where lengths with fitting checksums are. None of a record is 0, or needs more than
    four of its eight bytes."""
    import numpy as np

    array = np.frombuffer(data, np.uint8)
    count = len(array) - _HEADER_BYTES + 1
    if count <= 0:
        return []
    is_zero = array == 0
    parts = [is_zero[i : i + count] for i in range(8)]
    is_likely = parts[4] & parts[5] & parts[6] & parts[7]
    is_likely &= ~(parts[0] & parts[1] & parts[2] & parts[3])
    indices = np.flatnonzero(is_likely)
    headers = np.lib.stride_tricks.sliding_window_view(array, _HEADER_BYTES)[indices]
    checksums = compute_checksums_of_headers(headers[:, :8]).astype(np.uint64)
    masked = ((checksums >> 15 | checksums << 17) + 0xA282EAD8) & 0xFFFFFFFF
    stated = np.ascontiguousarray(headers[:, 8:]).view("<u4").ravel()
    found: list[int] = indices[masked == stated].tolist()
    return found


# --- events ---


class SummaryValue(NamedTuple):
    """One value of an event, as its fields say."""

    tag: str
    plugin: str
    """Who draws it; only said with the first value of a tag."""
    content: bytes
    """What the plugin wrote about it."""
    kind: str
    """`scalar`, `image`, `histogram`, `tensor`, `audio` or nothing."""
    value: Any


class TrainingEvent(NamedTuple):
    """What an event says that matters here."""

    time: float
    step: int
    values: list[SummaryValue]
    session: int
    """1 where a program started, 2 where it stopped, else 0."""


_START, _STOP = 1, 2
_SCALAR_EVENT = re.compile(
    rb"\x09(.{8})(?:\x10([\x80-\xff]{0,8}[\x00-\x7f]))?"
    rb"\x2a([\x00-\x7f])\x0a([\x00-\x7f])\x0a([\x00-\x7f])(.*)\x15(.{4})",
    re.DOTALL,
)
"""An event of one scalar in the older form. Most are like that, and are read so in a fraction of
the time."""


_unpack_time = struct.Struct("<d").unpack
_unpack_number = struct.Struct("<f").unpack


def parse_scalar_event(data: bytes) -> tuple[float, int, bytes, float] | None:
    """Return time, step, tag and value of an event of one scalar; None for any other."""
    match = _SCALAR_EVENT.fullmatch(data)
    if match is None:
        return None
    moment, varint, summary_size, value_size, tag_size, tag, number = match.groups()
    size = len(tag)
    if tag_size[0] != size or value_size[0] != size + 7 or summary_size[0] != size + 9:
        return None
    step = shift = 0
    for byte in varint or b"":
        step |= (byte & 0x7F) << shift
        shift += 7
    return _unpack_time(moment)[0], step, tag, _unpack_number(number)[0]


def parse_event(data: bytes) -> TrainingEvent:
    """Return the event in a record. Raises ProtobufError."""
    moment, step, session = 0.0, 0, 0
    values: list[SummaryValue] = []
    for number, field in parse_fields(data):
        if number == 1:
            moment = read_double(field)
        elif number == 2:
            step = read_integer(field)
        elif number == 5:
            values += [_parse_value(read_bytes(f)) for n, f in read_message(field) if n == 1]
            if len(values) > MAX_FIELDS:
                raise ProtobufError("an event of more values than a message may have fields")
        elif number == 7:
            session = next((read_integer(f) for n, f in read_message(field) if n == 1), 0)
    return TrainingEvent(moment, step, values, session)


def _parse_value(data: bytes) -> SummaryValue:
    tag = node = plugin = kind = ""
    content = b""
    value: Any = None
    for number, field in parse_fields(data):
        if number == 1:
            tag = read_text(field)
        elif number == 7:
            node = read_text(field)
        elif number == 9:
            plugin, content = _parse_metadata(field)
        elif number == 2:
            kind, value = "scalar", read_float(field)
        elif number == 4:
            kind, value = "image", _parse_image(field)
        elif number == 5:
            kind, value = "histogram", _parse_histogram(field)
        elif number == 6:
            kind = "audio"
        elif number == 8:
            kind, value = "tensor", read_bytes(field)
    return SummaryValue(tag or node, plugin, content, kind, value)


def _parse_metadata(field: Field) -> tuple[str, bytes]:
    name, content = "", b""
    for number, inner in read_message(field):
        if number == 1:
            for inner_number, each in read_message(inner):
                if inner_number == 1:
                    name = read_text(each)
                elif inner_number == 2:
                    content = read_bytes(each)
    return name, content


def _parse_image(field: Field) -> bytes:
    return next((read_bytes(f) for number, f in read_message(field) if number == 4), b"")


def _parse_histogram(field: Field) -> list[tuple[float, float, float]]:
    """Return the filled buckets as (left, right, count): the outer edges are the lowest and the
    highest value, as in TensorBoard."""
    low = high = 0.0
    limits: list[Field] = []
    counts: list[Field] = []
    for number, inner in read_message(field):
        if number == 1:
            low = read_double(inner)
        elif number == 2:
            high = read_double(inner)
        elif number == 6:
            limits.append(inner)
        elif number == 7:
            counts.append(inner)
    edges, numbers = read_repeated_fixed(limits, "d"), read_repeated_fixed(counts, "d")
    if len(edges) != len(numbers):
        raise ProtobufError("a histogram with more edges than buckets, or less")
    filled = [i for i, count in enumerate(numbers) if count > 0]
    if not filled:
        return []
    first, last = filled[0], filled[-1]
    inner_edges = edges[first:last]
    lefts, rights = [low, *inner_edges], [*inner_edges, high]
    return list(zip(lefts, rights, numbers[first : last + 1], strict=True))


# --- tensors ---

_TENSOR_TYPES = {
    **{1: "f", 2: "d", 3: "i", 4: "B", 5: "h", 6: "b", 9: "q", 10: "?", 17: "H", 19: "e"},
    **{22: "I", 23: "Q"},
}
"""By their numbers in TensorFlow, as the module struct names them."""
_HALF, _BFLOAT16, _STRING = 19, 14, 7
_MAX_DIMENSIONS = 32
_INTEGER_FIELDS = (7, 10, 11, 16, 17)


class SmallTensor(NamedTuple):
    """A tensor of a few numbers or texts."""

    shape: tuple[int, ...]
    numbers: list[float]
    texts: list[bytes]


def parse_tensor(data: bytes) -> SmallTensor:
    """Return the tensor in a message. Raises ProtobufError."""
    kind, content = 0, b""
    shape: tuple[int, ...] = ()
    parts: dict[int, list[Field]] = {}
    for number, field in parse_fields(data):
        if number == 1:
            kind = read_integer(field)
        elif number == 2:
            shape = _parse_shape(field)
        elif number == 4:
            content = read_bytes(field)
        else:
            parts.setdefault(number, []).append(field)
    if kind == _STRING:
        return SmallTensor(shape, [], [read_bytes(field) for field in parts.get(8, [])])
    numbers = _unpack_content(kind, content) if content else _unpack_parts(kind, parts)
    expected = math.prod(shape)
    if 0 < len(numbers) < expected <= 4096:  # equal ones at the end are written once
        numbers += numbers[-1:] * (expected - len(numbers))
    return SmallTensor(shape, numbers, [])


def _parse_shape(field: Field) -> tuple[int, ...]:
    sizes = []
    for number, dimension in read_message(field):
        if number == 2:
            found = (read_integer(f) for n, f in read_message(dimension) if n == 1)
            sizes.append(max(0, next(found, 0)))
            if len(sizes) > _MAX_DIMENSIONS:
                raise ProtobufError("a tensor of too many dimensions")
    return tuple(sizes)


def _unpack_content(kind: int, content: bytes) -> list[float]:
    if kind == _BFLOAT16:
        pairs = zip(content[::2], content[1::2], strict=False)
        return [struct.unpack("<f", bytes((0, 0, *pair)))[0] for pair in pairs]
    if kind not in _TENSOR_TYPES:
        return []
    return read_repeated_fixed([content], _TENSOR_TYPES[kind])


def _unpack_parts(kind: int, parts: Mapping[int, list[Field]]) -> list[float]:
    if 5 in parts:
        return read_repeated_fixed(parts[5], "f")
    if 6 in parts:
        return read_repeated_fixed(parts[6], "d")
    if 13 in parts:  # the bits of half floats
        bits = read_repeated_integers(parts[13])
        data = b"".join(struct.pack("<H", each & 0xFFFF) for each in bits)
        return _unpack_content(kind, data) if kind in (_HALF, _BFLOAT16) else []
    for number in _INTEGER_FIELDS:
        if number in parts:
            return [*read_repeated_integers(parts[number])]
    return []


# --- from events to lines ---


def convert_event_files(converted: ConvertedRun, paths: Sequence[Path], max_bytes: int) -> bool:
    """Add what is new in the files of a run, which are in the order of their times. Return whether
    there may be more, since so many bytes were read."""
    reader = _EventConverter(converted)
    for index, path in enumerate(paths):
        reader.begin_file(index)
        file = converted.open_source(path)
        if file is None:
            continue
        known = converted.facts.files[path.name]
        with file:
            while max_bytes > 0:
                try:
                    status = os.fstat(file.fileno())
                    batch = read_record_batch(file, known.offset, status.st_size)
                    mark = compute_mark(file, batch.offset) if batch.offset else ""
                except OSError as error:
                    converted.note_unreadable(path, error)
                    break
                for fault in batch.faults:
                    converted.note_fault(fault)
                for record in batch.records:
                    reader.add_record(record)
                reader.finish_batch()
                max_bytes -= batch.offset - known.offset
                is_end = batch.offset in (known.offset, status.st_size)
                known.offset, known.mark = batch.offset, mark
                if is_end:
                    known.note_look(status)
                converted.commit()
                if is_end:
                    break
        if max_bytes <= 0:
            return True
    return False


class _EventConverter:
    """Adds events to a converted run. What it must know of earlier ones is in `memory`."""

    def __init__(self, converted: ConvertedRun) -> None:
        self._converted = converted
        memory = converted.facts.memory
        self._tags: dict[str, list[Any]] = memory.setdefault("tags", {})
        """By tag: its plugin, its highest step, and the number of the last file that has it."""
        self._memory = memory
        self._file = 0
        self._purges: dict[str, int] = {}
        self._step = 0
        self._time = 0.0
        self._values: dict[str, Any] = {}
        self._scalars: dict[bytes, tuple[list[Any], str]] = {}
        """By tag: what is known of it, and its name in lines; of scalars that this file has."""

    def begin_file(self, index: int) -> None:
        """Go on with a file, by its number."""
        self._file = index
        self._scalars.clear()

    def add_record(self, record: bytes) -> None:
        """Add the event in a record."""
        scalar = parse_scalar_event(record)
        if scalar is not None:
            moment, step, tag, number = scalar
            known = self._scalars.get(tag)
            if known is not None:
                if step > known[0][1]:
                    known[0][1] = step
                self._add_to_line(moment, step, known[1], number)
                return
        self._add_any_record(record)
        if scalar is not None and scalar[2]:
            text = shorten_name(scalar[2].decode("utf-8", "replace"))
            name = self._converted.make_name(text, 0.0)
            if text in self._tags and name is not None and self._tags[text][0] != "hparams":
                self._scalars[scalar[2]] = self._tags[text], name

    def _add_any_record(self, record: bytes) -> None:
        try:
            event = parse_event(record)
        except ProtobufError:
            self._converted.note_fault("a record that is not an event")
            return
        if self._converted.facts.started is None and event.time > 0 and math.isfinite(event.time):
            self._converted.facts.started = event.time
        if event.session == _START:
            self._begin_session(event.step)
        elif event.session == _STOP:
            self._memory["stopped"] = True
        for value in event.values:
            try:
                self._add_value(event, value)
            except ProtobufError:
                self._converted.note_fault("a value that cannot be read")

    def finish_batch(self) -> None:
        """Give all that waits to the converted run."""
        self._finish_line()
        if self._purges:
            purges, self._purges = self._purges, {}
            self._converted.rewrite_lines(lambda line: _purge_names(line, purges))

    def _begin_session(self, step: int) -> None:
        """A program that starts again makes the steps from there on again."""
        is_restart = self._memory.get("started") or self._file > 0
        self._memory["started"] = True
        if not is_restart or not any(known[1] >= step for known in self._tags.values()):
            return
        self.finish_batch()
        self._converted.append_lines()
        self._converted.rewrite_lines(lambda line: line if _get_step(line) < step else None)
        for known in self._tags.values():
            known[1] = min(known[1], step - 1)

    def _add_value(self, event: TrainingEvent, value: SummaryValue) -> None:
        tag = shorten_name(value.tag)
        known = self._tags.get(tag)
        if known is None:
            if len(self._tags) >= 20_000:
                self._converted.leave_out("values of more than 20,000 tags")
                return
            known = self._tags[tag] = [value.plugin, event.step, self._file]
        elif known[2] < self._file:
            # As TensorBoard does, where a program starts again without saying so.
            if event.step <= known[1]:
                self._purge(tag, event.step)
            known[1:] = event.step, self._file
        elif event.step > known[1]:
            known[1] = event.step
        for own_tag, shown in self._show_value(tag, known[0], event.step, value):
            name = self._converted.make_name(own_tag, shown)
            if name is not None:
                self._add_to_line(event.time, event.step, name, shown)

    def _purge(self, tag: str, step: int) -> None:
        tags = [tag, *(f"{tag}/{i}" for i in range(1, 10) if self._tags[tag][0] == "images")]
        for name in tags:
            for kind in (0.0, ""):
                if (shown := self._converted.make_name(name, kind)) is not None:
                    self._purges[shown] = step

    def _show_value(
        self, tag: str, plugin: str, step: int, value: SummaryValue
    ) -> Iterator[tuple[str, Any]]:
        """Yield a value as lines of metrics have it, with its name."""
        if plugin == "hparams" or value.plugin == "hparams":
            self._read_hparams(value.content)
        elif value.kind == "scalar":
            yield tag, value.value
        elif value.kind == "histogram":
            yield from _name_histogram(tag, value.value)
        elif value.kind == "image":
            yield from self._show_images(tag, step, [value.value])
        elif value.kind == "audio":
            self._converted.leave_out("audio")
        elif value.kind == "tensor" and plugin in _NOT_VALUES:
            self._converted.leave_out(plugin)
        elif value.kind == "tensor":
            yield from self._show_tensor(tag, plugin, step, parse_tensor(value.value))

    def _show_tensor(
        self, tag: str, plugin: str, step: int, tensor: SmallTensor
    ) -> Iterator[tuple[str, Any]]:
        if plugin == "images":  # width, height, and the images
            yield from self._show_images(tag, step, tensor.texts[2:])
        elif plugin == "text" or (plugin == "" and tensor.texts):
            texts = [text.decode("utf-8", "replace") for text in tensor.texts]
            yield tag, limit_text("\n".join(texts))
        elif plugin == "histograms" and len(tensor.shape) == 2 and tensor.shape[1] == 3:
            numbers = iter(tensor.numbers)
            rows = list(zip(numbers, numbers, numbers, strict=False))
            yield from _name_histogram(tag, rows)
        elif plugin in ("scalars", "") and len(tensor.numbers) == 1:
            [number] = tensor.numbers
            yield tag, number
        else:
            self._converted.leave_out(f"tensors of {plugin or 'unknown kind'}")

    def _show_images(
        self, tag: str, step: int, images: Sequence[bytes]
    ) -> Iterator[tuple[str, Any]]:
        for i, data in enumerate(images[:10]):
            name = self._converted.make_name(f"{tag}/{i}" if i else tag, "")
            if name is None:
                continue
            shown = self._converted.add_image(name, step, data)
            if shown is not None:
                if _has_png_header(data):
                    yield (f"{tag}/{i}" if i else tag), shown
                else:
                    self._converted.leave_out("images that are damaged")
        if len(images) > 10:
            self._converted.leave_out("images beyond ten of one step", len(images) - 10)

    def _add_to_line(self, moment: float, step: int, name: str, value: Any) -> None:
        is_same = step == self._step and 0 <= moment - self._time < _MAX_PENDING_S
        if not is_same or name in self._values:
            self._finish_line()
            self._step, self._time = step, moment
        self._values[name] = value

    def _finish_line(self) -> None:
        if self._values:
            self._converted.add_values(self._step, self._time, self._values)
            self._values = {}

    def _read_hparams(self, content: bytes) -> None:
        facts = self._converted.facts
        for number, field in parse_fields(content):
            if number == 3:
                settings, started = _parse_session_start(field)
                self._converted.add_settings(settings)
                facts.started = started or facts.started
            elif number == 4:
                state = next((read_integer(f) for n, f in read_message(field) if n == 1), 0)
                facts.state = {1: "finished", 2: "failed"}.get(state, facts.state)


def _has_png_header(data: bytes) -> bool:
    try:
        read_png_size(data)
    except (struct.error, StopIteration):
        return False
    return True


def _get_step(line: MetricsLine) -> float:
    step = line.get("step")
    return step if is_number(step) else math.inf


def _purge_names(line: MetricsLine, purges: Mapping[str, int]) -> MetricsLine | None:
    """Return a line without the values that were made again from a step on."""
    step = _get_step(line)
    kept = {
        name: value for name, value in line.items() if name not in purges or step < purges[name]
    }
    return kept if len(kept) == len(line) or kept.keys() - {"step", "time"} else None


def _name_histogram(
    tag: str, rows: Sequence[tuple[float, float, float]]
) -> Iterator[tuple[str, Any]]:
    """Yield a histogram of rows of (left, right, count), if there is anything in it."""
    if any(not math.isfinite(number) for row in rows for number in row):
        return
    edges: list[float] = []
    counts: list[float] = []
    for left, right, count in rows:
        if edges and left > edges[-1]:  # nothing between two buckets
            edges.append(left)
            counts.append(0)
        elif not edges:
            edges.append(left)
        edges.append(max(right, edges[-1]))
        counts.append(int(count) if count == int(count) else count)
    while len(counts) > _MAX_BINS:
        counts = [sum(counts[i : i + 2]) for i in range(0, len(counts), 2)]
        edges = [*edges[:-1:2], edges[-1]]
    if counts:
        yield tag, {"bins": edges, "counts": counts}


def _parse_session_start(field: Field) -> tuple[dict[str, Any], float | None]:
    settings: dict[str, Any] = {}
    started = None
    for number, inner in read_message(field):
        if number == 1:
            entry = dict(read_message(inner))
            settings[read_text(entry.get(1, b""))] = _parse_json_value(entry.get(2, b""))
        elif number == 5:
            started = read_double(inner)
    return settings, started


def _parse_json_value(field: Field, depth: int = 4) -> Any:
    """Return a `google.protobuf.Value`; one that is nested deeper than anybody does is None."""
    for number, inner in read_message(field):
        if number == 2:
            found = read_double(inner)
            return int(found) if found.is_integer() and abs(found) < 1 << 53 else found
        if number == 3:
            return read_text(inner)
        if number == 4:
            return bool(read_integer(inner))
        if number == 6 and depth:
            values = [f for n, f in read_message(inner) if n == 1]
            return [_parse_json_value(value, depth - 1) for value in values]
    return None


def find_config(path: Path) -> Mapping[str, Any] | None:
    """Return the configuration that Echelon has written at the beginning of an event file; None
    for a file of another program."""
    try:
        with open_file(path) as file:
            size = min(os.fstat(file.fileno()).st_size, 1 << 16)
            batch = read_record_batch(file, 0, size)
        for record in batch.records[:3]:
            for value in parse_event(record).values:
                if value.tag == "config" and value.plugin == "text":
                    texts = parse_tensor(value.value or b"").texts
                    found = json.loads(texts[0]) if texts else None
                    return found if isinstance(found, dict) else None
    except (OSError, ValueError, RecursionError):
        pass
    return None


def sort_event_files(paths: Sequence[Path]) -> list[Path]:
    """Return event files in the order of the times in their names."""
    return sorted(paths, key=lambda path: (_read_time(path.name), path.name))


def _read_time(name: str) -> float:
    match = EVENT_FILE.fullmatch(name)
    number = float(match[1][:25]) if match else 0.0
    return number / 1e9 if number > 1e14 else number  # ours are in nanoseconds
