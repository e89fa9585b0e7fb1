"""`echelon data pack`: samples of any source as shards of a given size.

    data/train/train-000000.tar
    data/train/train-000001.tar
    data/train/shards.json         samples, bytes and checksum of each

Which samples a shard has follows from the source alone, so shards are written in any order and by
any number of processes, and the bytes are always the same. A shard is written under a hidden name,
compared with its source, and renamed: one with its own name is whole. After a kill the same command
keeps the shards that are in the list and have their checksums.
"""

from __future__ import annotations

import base64
import contextlib
import functools
import hashlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from echelon.data.check_files import cut_batches
from echelon.data.formats.arrow_columns import import_pyarrow
from echelon.data.formats.byte_source import DataPath, open_for_arrow
from echelon.data.formats.image_folder import ImageFolderReader
from echelon.data.formats.reader import BadSampleError, ChunkTable, DataFile, SampleReader
from echelon.data.formats.tar_files import TarReader
from echelon.data.open_files import Paths, find_data, open_reader
from echelon.data.parallel_map import count_processes, map_in_order
from echelon.data.shard_manifest import (
    MANIFEST_NAME,
    TEMPORARY_PREFIX,
    ShardEntry,
    ShardManifest,
    compute_sha256,
    find_difference,
    read_manifest,
)
from echelon.data.shard_writers import (
    ParquetShardWriter,
    ShardWriter,
    TarShardWriter,
    infer_schema,
    unify_schemas,
)
from echelon.errors import EchelonError, ExitCode, Fault, suggest_other_folder
from echelon.object_store.remote_file import RemoteFile
from echelon.object_store.urls import is_url
from echelon.utils.files import replace_file
from echelon.utils.locks import FileLock, LocksUnsupportedError
from echelon.utils.os_errors import format_os_error_reason
from echelon.utils.text import join_names

_LOCK_NAME = ".packing.lock"
_MEMBER_BYTES = 768
"""What a tar adds to a member: its header, and half a block."""
_SCHEMA_ROWS = 1 << 18
_SCHEMA_BYTES = 256 << 20


class PackedShard(NamedTuple):
    """A shard that is there."""

    entry: ShardEntry
    is_kept: bool
    """It was there before."""


class _Source(NamedTuple):
    files: tuple[DataFile, ...]
    format: str
    samples: int


class _PackTask(NamedTuple):
    source: _Source
    format: str
    schema: str
    """Of Parquet, as base64."""
    target: Path
    first: int
    stop: int
    entry: ShardEntry | None
    """Of a shard that may be kept."""


class _SchemaTask(NamedTuple):
    source: _Source
    first: int
    stop: int


class ShardPacking:
    """The packing of a source into a folder.

    packing = ShardPacking("photos", None, Path("data/train"), "tar", "train", 256_000_000)
    for shard in packing.run(processes=2):
        ...
    """

    def __init__(
        self,
        paths: Paths,
        source_format: str | None,
        folder: Path,
        format: str | None,
        name: str,
        shard_bytes: int,
    ) -> None:
        """Plan the shards; nothing is written yet. Raises EchelonError for what cannot be done."""
        files, found_format = find_data(paths, source_format)
        _refuse_inner_folder(paths, files, folder)
        reader = open_reader(files, found_format)
        self.folder, self.samples = folder, len(reader)
        self.format = format or _choose_format(reader)
        self._source = _Source(tuple(files), found_format, len(reader))
        chunks = _estimate_sizes(reader, self.format)
        self._ranges = list(
            cut_batches(chunks, 0, len(reader), shard_bytes, len(reader), across=True)
        )
        ending = {"tar": ".tar", "parquet": ".parquet"}[self.format]
        self._names = [f"{name}-{number:06}{ending}" for number in range(len(self._ranges))]
        self._class_names = reader.class_names if isinstance(reader, ImageFolderReader) else []
        self._plan: dict[str, Any] = {
            "format": self.format,
            "name": name,
            "shard_bytes": shard_bytes,
            "samples": len(reader),
            "source_sha256": _compute_fingerprint(reader, files),
        }

    def run(self, processes: int | None = None) -> Iterator[PackedShard]:
        """Yields every shard when it is whole, in order."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with self._lock_folder():
                yield from self._write_shards(processes)
        except OSError as error:
            what = f"{self.folder} cannot be written: {format_os_error_reason(error)}"
            raise EchelonError(Fault(what, suggest_other_folder(error, "-o"))) from error

    def _write_shards(self, processes: int | None) -> Iterator[PackedShard]:
        manifest = self._prepare_folder()
        count = count_processes(processes, len(self._ranges))
        schema = self._find_schema(count)
        tasks = [
            _PackTask(
                self._source,
                self.format,
                schema,
                self.folder / name,
                *rows,
                manifest.shards.get(name),
            )
            for name, rows in zip(self._names, self._ranges, strict=True)
        ]
        for shard in map_in_order(_pack_shard, tasks, count):
            if not shard.is_kept:
                manifest.shards[shard.entry.name] = shard.entry
                manifest.write(self.folder)
            yield shard
        manifest.is_complete = True
        manifest.write(self.folder)

    @contextlib.contextmanager
    def _lock_folder(self) -> Iterator[None]:
        lock = FileLock(self.folder / _LOCK_NAME)
        with contextlib.suppress(LocksUnsupportedError):
            if not lock.try_acquire():
                what = f"another process packs into {self.folder}"
                raise EchelonError(Fault(what, "wait for it, or give another folder with -o"))
        try:
            yield
        finally:
            if lock.is_held:
                lock.path.unlink(missing_ok=True)
                lock.release()

    def _prepare_folder(self) -> ShardManifest:
        """Return the list of the folder. Raises where it has other files, or other shards."""
        manifest = read_manifest(self.folder)
        if manifest is not None and manifest.plan != self._plan:
            changed = [key for key, value in self._plan.items() if manifest.plan.get(key) != value]
            reason = (
                "its source is another one, or changed"
                if "source_sha256" in changed
                else ", ".join(f"{key} was {manifest.plan.get(key)}" for key in changed)
            )
            what = f"{self.folder} has shards that were packed otherwise: {reason}"
            raise EchelonError(Fault(what, "give another folder with -o, or empty this one"))
        known = {MANIFEST_NAME, _LOCK_NAME, ".echelon", *(self._names if manifest else ())}
        found = sorted(os.listdir(self.folder))
        left_over = [each for each in found if each.startswith(TEMPORARY_PREFIX)]
        if others := [each for each in found if each not in known and each not in left_over]:
            what = f"{self.folder} has other files: {join_names(others)}"
            raise EchelonError(Fault(what, "give a new folder with -o"))
        for each in left_over:
            (self.folder / each).unlink()
        if manifest is None:
            manifest = ShardManifest(self._plan, class_names=self._class_names)
            manifest.write(self.folder)
        return manifest

    def _find_schema(self, processes: int) -> str:
        """Return the schema of all shards. Of lines of JSON, whose types are not written down, all
        are read for that."""
        if self.format != "parquet":
            return ""
        files, format, samples = self._source
        if format == "parquet":
            pa, parquet = import_pyarrow(), import_pyarrow("pyarrow.parquet")
            stored = parquet.read_schema(open_for_arrow(files[0].path)).remove_metadata()
            names = open_reader(files, format).column_names
            partitions = [name for name in names if name not in stored.names]
            # Their values are in the names of folders, and are of one type.
            found = infer_schema(open_reader(files, format, partitions or names[:1]), range(1))
            schema = pa.schema(
                [(stored if name in stored.names else found).field(name) for name in names]
            )
        else:
            reader = open_reader(files, format)
            is_varied = format in ("jsonl", "arrow")
            batches = cut_batches(
                reader.chunks, 0, samples, _SCHEMA_BYTES, _SCHEMA_ROWS, across=True
            )
            tasks = [_SchemaTask(self._source, *rows) for rows in batches] if is_varied else []
            schemas = map_in_order(_infer_schema, tasks, min(processes, max(1, len(tasks))))
            schema = unify_schemas(list(schemas)) if is_varied else infer_schema(reader, range(1))
        return base64.b64encode(schema.serialize().to_pybytes()).decode()


def _refuse_inner_folder(paths: Paths, files: Sequence[DataFile], folder: Path) -> None:
    given = [paths] if isinstance(paths, (str, os.PathLike)) else paths
    local = [Path(each) for each in given if not is_url(os.fspath(each))]
    local += [file.path for file in files if isinstance(file.path, Path)]
    roots = {path.resolve() for path in local}
    target = folder.resolve()
    if inner := [root for root in roots if root == target or root in target.parents]:
        what = f"{folder} is in the source {inner[0]}, and its shards would be samples of it"
        raise EchelonError(Fault(what, "give a folder outside of it with -o"))


def _choose_format(reader: SampleReader) -> str:
    """Return tar for pictures and other bytes, Parquet for numbers and texts."""
    if isinstance(reader, (TarReader, ImageFolderReader)):
        return "tar"
    [first] = _read_first(reader)
    values = [each["bytes"] if _is_picture(each) else each for each in first.values()]
    return "tar" if any(isinstance(value, bytes) for value in values) else "parquet"


def _read_first(reader: SampleReader) -> list[dict[str, Any]]:
    try:
        return reader.read_samples([0])
    except BadSampleError as error:
        raise _make_sample_error(error) from error


def _is_picture(value: Any) -> bool:
    return isinstance(value, dict) and {"bytes"} <= set(value) <= {"bytes", "path"}


def _estimate_sizes(reader: SampleReader, format: str) -> ChunkTable:
    """Return the chunks of a source with the bytes that they will have in shards, about."""
    starts, sizes = reader.chunks.starts, reader.chunks.sizes_bytes
    if isinstance(reader, ImageFolderReader):
        sizes = reader.measure_files()
    if format == "tar" and not isinstance(reader, TarReader):
        sizes = sizes + np.diff(starts) * _MEMBER_BYTES * len(reader.column_names)
    return ChunkTable(starts, sizes)


def _compute_fingerprint(reader: SampleReader, files: Sequence[DataFile]) -> str:
    """Return what is another one if a file of the source is: name, size or time of change."""
    checksum = hashlib.sha256()
    if isinstance(reader, ImageFolderReader):
        paths = (reader.locate(row).file for row in range(len(reader)))
    else:
        paths = (path for file in files for path in _list_files(file.path))
    for path in paths:
        if isinstance(path, RemoteFile):
            words: tuple[object, ...] = path.info
        else:
            status = path.stat()
            words = (path.name, status.st_size, status.st_mtime_ns)
        line = "\0".join(map(str, words)) + "\n"
        checksum.update(line.encode("utf-8", "surrogateescape"))
    return checksum.hexdigest()


def _list_files(path: DataPath) -> list[DataPath]:
    if isinstance(path, Path) and path.is_dir():
        return [*sorted(each for each in path.iterdir() if each.is_file())]
    return [path]


def _make_sample_error(error: BadSampleError) -> EchelonError:
    remedy = "`echelon data check SOURCE` names all such samples; then pack again"
    return EchelonError(Fault(str(error), remedy), exit=ExitCode.FAILED)


# --- in the processes ---


@functools.lru_cache(1)
def _open_source(source: _Source) -> SampleReader:
    reader = open_reader(source.files, source.format)
    if len(reader) != source.samples:
        what = f"{source.files[0].path} changed while it was packed"
        raise EchelonError(Fault(what, "let its writer finish, and pack again"))
    return reader


def _infer_schema(task: _SchemaTask) -> Any:
    try:
        return infer_schema(_open_source(task.source), range(task.first, task.stop))
    except BadSampleError as error:
        raise _make_sample_error(error) from error


def _pack_shard(task: _PackTask) -> PackedShard:
    if task.entry is not None and find_difference(task.target, task.entry) is None:
        return PackedShard(task.entry, is_kept=True)
    reader = _open_source(task.source)
    writer = _make_writer(task)
    rows = range(task.first, task.stop)
    try:
        with replace_file(task.target, durable=True, prefix=TEMPORARY_PREFIX) as temporary:
            writer.write(reader, rows, temporary)
            writer.verify(reader, rows, temporary)
            size, sha256 = temporary.stat().st_size, compute_sha256(temporary)
    except BadSampleError as error:
        raise _make_sample_error(error) from error
    return PackedShard(ShardEntry(task.target.name, len(rows), size, sha256), is_kept=False)


def _make_writer(task: _PackTask) -> ShardWriter:
    if task.format == "tar":
        return TarShardWriter()
    pa = import_pyarrow()
    schema = pa.ipc.read_schema(pa.py_buffer(base64.b64decode(task.schema)))
    return ParquetShardWriter(schema)
