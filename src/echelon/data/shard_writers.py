"""Samples as tar or Parquet shards: how a value is stored, and whether what was written is right.

A shard is compared with its source after it was written: both are read again. Tars are read by
Python's tarfile for that, not by the reader that is to read them later.
"""

from __future__ import annotations

import io
import json
import tarfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path, PurePath
from typing import Any, NamedTuple, Protocol

import numpy as np

from echelon.data.check_files import cut_batches
from echelon.data.formats.arrow_columns import import_pyarrow
from echelon.data.formats.image_folder import ImageFolderReader
from echelon.data.formats.reader import SamplePlace, SampleReader
from echelon.data.formats.tar_files import KEY_COLUMN, TarReader
from echelon.data.formats.tar_index import index_tar
from echelon.errors import EchelonError, ExitCode, Fault

_GROUP_BYTES = 32 << 20
_GROUP_ROWS = 1 << 16
"""Of a row group: what is in memory at once, as Python objects."""
_PICTURES = {
    b"\xff\xd8\xff": "jpg",
    b"\x89PNG\r\n\x1a\n": "png",
    b"RIFF": "webp",
    b"BM": "bmp",
}
_PICTURE_NAMES = (*_PICTURES.values(), "jpeg", "image")


class ShardWriter(Protocol):
    """Writes the rows of a source into a file of one format."""

    def write(self, reader: SampleReader, rows: range, file: Path) -> None:
        """Write a shard. Raises BadSampleError for a sample that cannot be read."""
        ...

    def verify(self, reader: SampleReader, rows: range, file: Path) -> None:
        """Read a shard again and compare it with its source. Raises EchelonError."""
        ...


# --- tar ---


class _TarSample(NamedTuple):
    key: str
    members: dict[str, bytes]
    """By what follows the key and a dot."""


class TarShardWriter:
    """Samples as members with one key each, in the way of WebDataset. The same samples give the
    same bytes: there are no times and no owners."""

    def write(self, reader: SampleReader, rows: range, file: Path) -> None:
        with file.open("wb") as opened:
            for sample in _encode_samples(reader, rows):
                for ending, content in sample.members.items():
                    info = tarfile.TarInfo(f"{sample.key}.{ending}")
                    info.size = len(content)
                    opened.write(info.tobuf(tarfile.PAX_FORMAT, "utf-8", "surrogateescape"))
                    opened.write(content)
                    opened.write(bytes(-len(content) % tarfile.BLOCKSIZE))
            opened.write(bytes(2 * tarfile.BLOCKSIZE))

    def verify(self, reader: SampleReader, rows: range, file: Path) -> None:
        expected = (
            (f"{sample.key}.{ending}", content)
            for sample in _encode_samples(reader, rows)
            for ending, content in sample.members.items()
        )
        with tarfile.open(file, "r:", encoding="utf-8", errors="surrogateescape") as tar:
            for member in tar:
                content = tar.extractfile(member)
                if (member.name, content and content.read()) != next(expected, None):
                    raise _make_verify_error(file)
                tar.members = []  # type: ignore[attr-defined]  # else it keeps one for each
        if next(expected, None) or len(index_tar(file).offsets) != len(rows):
            raise _make_verify_error(file)


def _encode_samples(reader: SampleReader, rows: range) -> Iterator[_TarSample]:
    """Yields samples as members of a tar. No two of a shard have the same key."""
    seen: set[str] = set()
    picture = _get_picture_name(reader) if isinstance(reader, ImageFolderReader) else ""
    for first, stop in cut_batches(reader.chunks, rows.start, rows.stop):
        samples = reader.read_samples(range(first, stop))
        for row, sample in zip(range(first, stop), samples, strict=True):
            if isinstance(reader, TarReader):
                key, members = reader.locate(row).key, sample
            elif isinstance(reader, ImageFolderReader):
                path = PurePath(reader.get_name(row))
                key = str(path.with_name(path.stem.replace(".", "_")))
                members = {picture: sample["image"], "cls": str(sample["label"]).encode()}
            else:
                key = f"{row:09}"
                members = _encode_members(sample, partial(reader.locate, row))
            unique, number = key, 1
            while unique in seen:  # shards of other writers may all begin at 0
                number += 1
                unique = f"{key}-{number}"
            seen.add(unique)
            yield _TarSample(unique, members)


def _get_picture_name(reader: ImageFolderReader) -> str:
    """Return the member that a picture of a folder becomes: `jpg` where all are, else `image`."""
    endings = reader.list_endings()
    return endings[0] if len(endings) == 1 and endings[0] in _PICTURE_NAMES else "image"


def _encode_members(
    sample: Mapping[str, Any], locate: Callable[[], SamplePlace]
) -> dict[str, bytes]:
    members: dict[str, bytes] = {}
    for column, value in sample.items():
        try:
            ending, content = _encode_value(column, value)
        except (TypeError, ValueError) as error:
            what = f"{locate()}: column {column!r} cannot be a member of a tar: {error}"
            raise EchelonError(Fault(what, "pack it with --format parquet")) from error
        name = ending.lower()  # as it is read
        if name in members or not column or any(sign in column for sign in "/\0"):
            what = f"{locate()}: column {column!r} cannot be the name of a member of a tar"
            raise EchelonError(Fault(what, "rename it, or pack with --format parquet"))
        members[name] = content
    if not members:
        what = f"{locate()}: it has no columns, and a sample of a tar has at least one"
        raise EchelonError(Fault(what, "pack with --format parquet"))
    return members


def _encode_value(column: str, value: Any) -> tuple[str, bytes]:
    """Return the name of a member and its content, which is decoded to the same value."""
    own = column.rpartition(".")[2].lower()
    if isinstance(value, Mapping) and {"bytes"} <= set(value) <= {"bytes", "path"}:
        value = value["bytes"]  # a picture in a table of Hugging Face
    if isinstance(value, bytes):
        kind = next((end for magic, end in _PICTURES.items() if value.startswith(magic)), "")
        return f"{column}.{kind}" if kind and own not in _PICTURE_NAMES else column, value
    if isinstance(value, str):
        return column if own in ("txt", "text") else f"{column}.txt", value.encode("utf-8")
    if isinstance(value, np.ndarray) and value.ndim:
        file = io.BytesIO()
        np.save(file, value, allow_pickle=False)
        return column if own == "npy" else f"{column}.npy", file.getvalue()
    if isinstance(value, (np.ndarray, np.generic)):
        value = value.item()
    if own == "cls" and isinstance(value, int):
        return column, str(value).encode()
    return column if own == "json" else f"{column}.json", json.dumps(value).encode()


# --- Parquet ---


class ParquetShardWriter:
    """Samples as rows. All shards have one schema."""

    def __init__(self, schema: Any) -> None:
        self._schema = schema

    def write(self, reader: SampleReader, rows: range, file: Path) -> None:
        parquet = import_pyarrow("pyarrow.parquet")
        with parquet.ParquetWriter(file, self._schema, compression="zstd") as writer:
            for group in self._make_groups(reader, rows):
                writer.write_table(group, row_group_size=len(group))

    def verify(self, reader: SampleReader, rows: range, file: Path) -> None:
        with import_pyarrow("pyarrow.parquet").ParquetFile(file) as opened:
            groups = list(_cut_groups(reader, rows))
            if opened.num_row_groups != len(groups):
                raise _make_verify_error(file)
            for number, expected in enumerate(self._make_groups(reader, rows)):
                found = opened.read_row_group(number)
                # A NaN is not equal to itself, but has one text.
                if not found.equals(expected) and str(found.to_pylist()) != str(
                    expected.to_pylist()
                ):
                    raise _make_verify_error(file)

    def _make_groups(self, reader: SampleReader, rows: range) -> Iterator[Any]:
        pa = import_pyarrow()
        for group in _cut_groups(reader, rows):
            samples = _read_table_samples(reader, group)
            arrays = []
            for field in self._schema:
                values = [_make_plain(sample.get(field.name)) for sample in samples]
                try:
                    arrays.append(pa.array(values, field.type))
                except (pa.ArrowException, TypeError, OverflowError) as error:
                    reason = " ".join(str(error).split())
                    what = (
                        f"column {field.name!r} from {reader.locate(group.start)} on cannot be "
                        f"stored as {field.type}: {reason}"
                    )
                    raise EchelonError(Fault(what, "pack it with --format tar")) from error
            yield pa.Table.from_arrays(arrays, schema=self._schema)


def _cut_groups(reader: SampleReader, rows: range) -> Iterator[range]:
    batches = cut_batches(
        reader.chunks, rows.start, rows.stop, _GROUP_BYTES, _GROUP_ROWS, across=True
    )
    return (range(first, stop) for first, stop in batches)


def _read_table_samples(reader: SampleReader, rows: range) -> list[dict[str, Any]]:
    samples = reader.read_samples(rows)
    if isinstance(reader, TarReader):
        for row, sample in zip(rows, samples, strict=True):
            sample[KEY_COLUMN] = reader.locate(row).key
    return samples


def _make_plain(value: Any) -> Any:
    """Return an array of several dimensions, which Arrow does not take, as lists."""
    return value.tolist() if isinstance(value, np.ndarray) and value.ndim != 1 else value


def infer_schema(reader: SampleReader, rows: range) -> Any:
    """Return the Arrow schema of rows. Raises EchelonError for columns that have none."""
    pa = import_pyarrow()
    if isinstance(reader, TarReader):
        fields = [(KEY_COLUMN, pa.string()), *((name, pa.binary()) for name in reader.column_names)]
        return pa.schema(fields)
    found = []
    for group in _cut_groups(reader, rows):
        samples = reader.read_samples(group)
        names = dict.fromkeys(name for sample in samples for name in sample)
        fields = []
        for name in names:
            try:
                fields.append((name, _infer_type([each.get(name) for each in samples])))
            except (pa.ArrowException, TypeError, ValueError, OverflowError) as error:
                place, reason = reader.locate(group.start), " ".join(str(error).split())
                what = f"column {name!r} from {place} on has values of several types: {reason}"
                raise EchelonError(Fault(what, "pack it with --format tar")) from error
        found.append(pa.schema(fields))
    return unify_schemas(found)


def unify_schemas(schemas: Sequence[Any]) -> Any:
    """Return the one schema into which rows of all of these fit."""
    pa = import_pyarrow()
    try:
        return pa.unify_schemas(schemas, promote_options="permissive")
    except (pa.ArrowException, TypeError) as error:
        what = f"the columns have other types in some rows: {' '.join(str(error).split())}"
        raise EchelonError(Fault(what, "pack it with --format tar")) from error


def _infer_type(values: Sequence[Any]) -> Any:
    pa = import_pyarrow()
    arrays = [value for value in values if isinstance(value, np.ndarray)]
    known = sum(value is not None for value in values)
    if arrays and len({(each.dtype, each.ndim) for each in arrays}) == 1 and len(arrays) == known:
        kind = pa.from_numpy_dtype(arrays[0].dtype)
        for _ in range(arrays[0].ndim):
            kind = pa.list_(kind)
        return kind
    lists = [value.tolist() if isinstance(value, np.ndarray) else value for value in values]
    return pa.array(lists).type


def _make_verify_error(file: Path) -> EchelonError:
    what = f"{file} has other samples than its source, read again after it was written"
    remedy = "check the disk, and that nobody writes to the source; then type the same again"
    return EchelonError(Fault(what, remedy), exit=ExitCode.FAILED)
