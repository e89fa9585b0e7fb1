"""wandb's run files, read without wandb.

A `.wandb` file is a log in the framing of LevelDB: blocks of 32 KiB with pieces of records, each
with a checksum, and each record a `Record` of protobuf. The first record says what the run is, then
come lines of its history, changes of its configuration, and at the end its exit code.
"""

from __future__ import annotations

import json
import math
import os
import re
import struct
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple

from echelon.board.foreign.converted_run import (
    ConvertedRun,
    flatten_values,
    limit_text,
    open_file,
)
from echelon.board.foreign.protobuf_fields import (
    Field,
    ProtobufError,
    parse_fields,
    read_integer,
    read_message,
    read_text,
)
from echelon.runs.metrics_file import compute_mark, is_number

RUN_FOLDER = re.compile(r"(offline-)?run-.+")
_FILE_HEADER = b":W&B\xe1\xbe\x00"
_BLOCK_BYTES = 32 * 1024
_PIECE = struct.Struct("<IHB")
_FULL, _FIRST, _MIDDLE, _LAST = 1, 2, 3, 4
_BATCH_BYTES = 4 << 20
_MAX_RECORD_BYTES = 32 << 20
_MAX_VALUE = 1 << 20
"""Characters of a value's JSON."""
_MAX_IMAGES = 10
_NOT_SHOWN = {8: "artifacts", 9: "TensorBoard folders", 10: "alerts", 25: "artifacts"}
"""Records that are counted and named."""


# --- records ---


class LogBatch(NamedTuple):
    """Records of a log, one after another."""

    records: list[bytes]
    offset: int
    """After the last whole record."""
    faults: list[str]


def read_log_batch(file: IO[bytes], offset: int, size: int) -> LogBatch:
    """Return the records from an offset on, as far as they fit into memory well.

    After a damaged piece the reading goes on with the next block. What is damaged in the last block
    may be half written, and is left for the next time.
    """
    records: list[bytes] = []
    faults: list[str] = []
    parts: list[bytes] | None = None
    """Of the record that was begun; None between records, and for one that is left out."""
    part_bytes, begun, at = 0, offset, offset
    block, block_start = b"", -1
    while at + _PIECE.size <= size:
        start = at - at % _BLOCK_BYTES
        if start + _BLOCK_BYTES - at < _PIECE.size:  # too little for another piece
            at = start + _BLOCK_BYTES
            continue
        if start != block_start:
            file.seek(start)
            block, block_start = file.read(min(_BLOCK_BYTES, size - start)), start
        kind, data = _read_piece(block, at - start)
        if data is None:
            if start + _BLOCK_BYTES > size:
                break
            faults.append("a damaged block")
            at = begun = start + _BLOCK_BYTES
            parts = None
            continue
        at += _PIECE.size + len(data)
        if kind in (_FULL, _FIRST):
            if parts is not None:
                faults.append("a record without an end")
            parts, part_bytes = [], 0
        if parts is not None:
            part_bytes += len(data)
            if part_bytes > _MAX_RECORD_BYTES:
                faults.append(f"a record of more than {_MAX_RECORD_BYTES >> 20} MiB")
                parts = None
            else:
                parts.append(data)
        if parts is None:
            begun = at
        elif kind in (_FULL, _LAST):
            records.append(b"".join(parts))
            parts, begun = None, at
        if begun - offset >= _BATCH_BYTES:
            break
    return LogBatch(records, begun, faults)


def _read_piece(block: bytes, at: int) -> tuple[int, bytes | None]:
    """Return the kind and the content of a piece; no content where it is damaged or not whole."""
    if at + _PIECE.size > len(block):
        return 0, None
    checksum, length, kind = _PIECE.unpack_from(block, at)
    data = block[at + _PIECE.size : at + _PIECE.size + length]
    if kind not in (_FULL, _FIRST, _MIDDLE, _LAST) or len(data) < length:
        return 0, None
    if zlib.crc32(data, zlib.crc32(bytes((kind,)))) != checksum:
        return 0, None
    return kind, data


# --- from records to lines ---


def convert_wandb_file(converted: ConvertedRun, path: Path, max_bytes: int) -> bool:
    """Add what is new in a run's file. Return whether there may be more, since so many bytes were
    read."""
    reader = _RecordConverter(converted, path.parent / "files")
    file = converted.open_source(path)
    if file is None:
        return False
    known = converted.facts.files[path.name]
    with file:
        while max_bytes > 0:
            try:
                status = os.fstat(file.fileno())
                offset = known.offset or _read_file_header(converted, file)
                batch = read_log_batch(file, offset, status.st_size if offset else 0)
                mark = compute_mark(file, batch.offset)
            except OSError as error:
                converted.note_unreadable(path, error)
                break
            for fault in batch.faults:
                converted.note_fault(fault)
            for record in batch.records:
                reader.add_record(record)
            max_bytes -= batch.offset - known.offset
            is_end = batch.offset in (known.offset, status.st_size)
            known.offset, known.mark = batch.offset, mark
            if is_end:
                known.note_look(status)
            converted.commit()
            if is_end:
                break
    return max_bytes <= 0


def _read_file_header(converted: ConvertedRun, file: IO[bytes]) -> int:
    """Return where the records begin; 0 while there is no header, and where it is another one."""
    file.seek(0)
    begin = file.read(len(_FILE_HEADER))
    if begin == _FILE_HEADER:
        return len(_FILE_HEADER)
    if not _FILE_HEADER.startswith(begin):
        converted.facts.faults = {"it does not begin as a file of wandb": 1}
    return 0


class _RecordConverter:
    """Adds records to a converted run. What it must know of earlier ones is in `memory`."""

    def __init__(self, converted: ConvertedRun, files_folder: Path) -> None:
        self._converted = converted
        self._files_folder = files_folder
        self._memory = converted.facts.memory

    def add_record(self, record: bytes) -> None:
        """Add one record."""
        try:
            for number, field in parse_fields(record):
                self._add(number, field)
        except ProtobufError:
            self._converted.note_fault("a record that is none of wandb's")

    def _add(self, number: int, field: Field) -> None:
        if number == 2:
            self._add_history(field)
        elif number == 17:
            self._read_run(field)
        elif number == 5:
            self._read_config(field)
        elif number == 12:
            self._read_metric(field)
        elif number == 18:
            self._read_exit(field)
        elif number == 23:
            self._memory["preempting"] = True
        elif number == 26:
            self._read_environment(field)
        elif number in _NOT_SHOWN:
            self._converted.leave_out(_NOT_SHOWN[number])

    def _read_run(self, field: Field) -> None:
        facts = self._converted.facts
        texts: dict[int, str] = {}
        for number, inner in read_message(field):
            if number in (1, 3, 6, 7, 8, 9, 13):
                texts[number] = limit_text(read_text(inner), 10_000)
            elif number == 4:
                self._read_config(inner)
            elif number == 10 and len(facts.tags) < 100:
                tag = limit_text(read_text(inner), 200)
                facts.tags += [tag] if tag not in facts.tags else []
            elif number == 17:
                facts.started = _read_timestamp(inner) or facts.started
        facts.name = texts.get(8) or facts.name
        facts.note = texts.get(9) or facts.note
        facts.host = texts.get(13) or facts.host
        named = {1: "id", 3: "project", 6: "group", 7: "job_type"}
        self._memory |= {name: texts[n] for n, name in named.items() if texts.get(n)}

    def _read_environment(self, field: Field) -> None:
        facts = self._converted.facts
        for number, inner in read_message(field):
            if number == 6:
                facts.program = limit_text(read_text(inner), 10_000)
            elif number == 12:
                facts.host = limit_text(read_text(inner), 1000) or facts.host

    def _read_config(self, field: Field) -> None:
        for number, item in read_message(field):
            if number not in (1, 2):
                continue
            path, value = self._read_item(item)
            if not path or path[0] == "_wandb":
                continue
            name = ".".join(path)
            self._converted.remove_settings(name)
            if number == 1:
                self._converted.add_settings({name: value})

    def _read_metric(self, field: Field) -> None:
        """Note what all metrics are drawn over, if the program has said so."""
        glob = step_name = ""
        for number, inner in read_message(field):
            if number == 2:
                glob = read_text(inner)
            elif number == 4:
                step_name = read_text(inner)
        if glob == "*" and step_name:
            self._memory["step_name"] = limit_text(step_name, 1000)

    def _read_exit(self, field: Field) -> None:
        facts = self._converted.facts
        code = 0
        for number, inner in read_message(field):
            if number == 1:
                code = read_integer(inner)
            elif number == 2:
                self._note_runtime(read_integer(inner))
        if code == 0:
            facts.state, facts.why = "finished", ""
        elif self._memory.get("preempting"):
            facts.state, facts.why = "preempted", ""
        else:
            facts.state, facts.why = "failed", f"exit code {code}"

    def _note_runtime(self, runtime_s: Any) -> None:
        if is_number(runtime_s):
            self._memory["runtime_s"] = max(self._memory.get("runtime_s", 0), runtime_s)

    def _add_history(self, field: Field) -> None:
        """Add a line of history."""
        tree: dict[str, Any] = {}
        row = 0
        for number, inner in read_message(field):
            if number == 1:
                path, value = self._read_item(inner)
                if path:
                    _put(tree, path, value)
            elif number == 2:
                row = next((read_integer(f) for n, f in read_message(inner) if n == 1), 0)
        found = tree.pop("_step", row)
        row = int(found) if is_number(found) else row
        moment, runtime_s = tree.pop("_timestamp", None), tree.pop("_runtime", None)
        self._note_runtime(runtime_s)
        tree.pop("_wandb", None)
        step = self._choose_step(tree, row)
        values: dict[str, Any] = {}
        for key, value in flatten_values(tree):
            for name, shown in self._show_value(key, step, value):
                found_name = self._converted.make_name(name, shown)
                if found_name is not None:
                    values[found_name] = shown
        if values:
            self._converted.add_values(step, moment if is_number(moment) else None, values)

    def _choose_step(self, tree: Mapping[str, Any], row: int) -> float:
        """Return the step of a line: what the program says that its metrics are drawn over, or the
        number of the line. Lines between take the step before."""
        name = self._memory.get("step_name")
        if name is None:
            return row
        found: Any = tree
        for part in (name,) if name in tree else name.split("."):
            found = found.get(part) if isinstance(found, dict) else None
        if is_number(found):
            self._memory["step"] = found
        step: float = self._memory.get("step", row)
        return step

    def _show_value(self, name: str, step: float, value: Any) -> Iterator[tuple[str, Any]]:
        """Yield a value as lines of metrics have it, with its name."""
        if isinstance(value, bool):
            yield name, int(value)
        elif isinstance(value, (int, float)):
            yield name, value
        elif isinstance(value, str):
            special = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}
            yield name, special.get(value, limit_text(value))
        elif isinstance(value, dict):
            yield from self._show_media(name, step, value)
        elif isinstance(value, list):
            self._converted.leave_out("lists")

    def _show_media(
        self, name: str, step: float, value: Mapping[str, Any]
    ) -> Iterator[tuple[str, Any]]:
        kind = value.get("_type")
        if kind == "histogram":
            if (histogram := _make_histogram(value)) is not None:
                yield name, histogram
                return
            self._converted.leave_out("histograms of another form")
        elif kind == "image-file":
            yield from self._show_images(name, step, [value.get("path")])
        elif kind == "images/separated":
            paths = value.get("filenames")
            yield from self._show_images(name, step, paths if isinstance(paths, list) else [])
        elif value:
            self._converted.leave_out(limit_text(str(kind), 100))

    def _show_images(
        self, name: str, step: float, paths: Sequence[Any]
    ) -> Iterator[tuple[str, Any]]:
        for i, path in enumerate(paths[:_MAX_IMAGES]):
            own_name = f"{name}/{i}" if i else name
            shown_name = self._converted.make_name(own_name, "")
            data = self._read_media(path)
            if data is not None and shown_name is not None:
                shown = self._converted.add_image(shown_name, int(step), data)
                if shown is not None:
                    yield own_name, shown
        if len(paths) > _MAX_IMAGES:
            self._converted.leave_out("images beyond ten of one step", len(paths) - _MAX_IMAGES)

    def _read_media(self, path: Any) -> bytes | None:
        """Return a file that a record names, if it is in the folder of the run's files and is no
        link out of it."""
        if isinstance(path, str) and path.startswith("media/") and ".." not in path.split("/"):
            try:
                folder = self._files_folder.resolve()
                file = (folder / path).resolve(strict=True)
                if file.is_relative_to(folder):
                    with open_file(file) as opened:
                        data: bytes = opened.read(self._converted.max_image_bytes + 1)
                    return data
            except (OSError, ValueError, RuntimeError):
                pass
        self._converted.leave_out("images whose file is gone")
        return None

    def _read_item(self, field: Field) -> tuple[list[str], Any]:
        """Return the path and the value of an item; an empty path where it cannot be read."""
        path: list[str] = []
        value: Any = None
        key = ""
        for number, inner in read_message(field):
            if number == 1:
                key = read_text(inner)
            elif number == 2:
                path.append(limit_text(read_text(inner), 1000))
            elif number == 16:
                text = read_text(inner)
                if len(text) > _MAX_VALUE:
                    self._converted.leave_out("values that are too long for a line")
                    return [], None
                try:
                    value = json.loads(text) if text else None
                except (ValueError, RecursionError):
                    self._converted.note_fault("a value that is not JSON")
                    return [], None
        return (path or [limit_text(key, 1000)] * bool(key)), value


def _put(tree: dict[str, Any], path: Sequence[str], value: Any) -> None:
    """Put a value into nested dictionaries; where there is something else already, it stays."""
    for name in path[:-1][:10]:
        below = tree.setdefault(name, {})
        if not isinstance(below, dict):
            return
        tree = below
    tree[path[-1]] = value


def _make_histogram(value: Mapping[str, Any]) -> dict[str, list[float]] | None:
    counts, edges = value.get("values"), value.get("bins")
    packed = value.get("packedBins")
    if isinstance(counts, list) and isinstance(packed, dict):
        low, width = packed.get("min"), packed.get("size")
        if is_number(low) and is_number(width):
            edges = [low + i * width for i in range(len(counts) + 1)]
    if not isinstance(counts, list) or not isinstance(edges, list):
        return None
    if len(edges) != len(counts) + 1 or not all(is_number(n) for n in (*edges, *counts)):
        return None
    return {"bins": edges, "counts": counts}


def _read_timestamp(field: Field) -> float | None:
    seconds = nanos = 0
    for number, inner in read_message(field):
        if number == 1:
            seconds = read_integer(inner)
        elif number == 2:
            nanos = read_integer(inner)
    return seconds + nanos / 1e9 if 0 < seconds < 1 << 40 else None
