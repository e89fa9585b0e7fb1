"""What is in files of samples: how many there are, their columns, and the first few, as text."""

from __future__ import annotations

import base64
import io
import json
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import numpy as np

from echelon.data.decode import SampleDecoder, list_opaque_columns
from echelon.data.formats.byte_source import DataPath, get_size
from echelon.data.formats.column_choice import raise_faults
from echelon.data.formats.image_folder import ImageFolderReader
from echelon.data.formats.mapped_tokens import DEFAULT_TOKEN_TYPE, Tokens, map_tokens
from echelon.data.formats.reader import (
    BadSampleError,
    SamplePlace,
    SampleReader,
    cut_files_evenly,
)
from echelon.data.formats.tar_files import TarReader
from echelon.data.open_files import Paths, find_data_or_tokens, open_reader
from echelon.errors import Fault, escape_controls
from echelon.utils.text import format_bytes, truncate_text

_MEASURED_SAMPLES = 64
"""Types and sizes are those of so many samples, spread over all of them."""
_MAX_SHOWN_CHARACTERS = 300
_SHOWN_ITEMS = 8
_MEASURED_TOKENS = 1024
"""In each of as many places of a file of tokens."""
_SHOWN_TOKENS = 16
_PICTURE_PIXELS = 320
"""Of the longer side of a picture on a page."""


class ColumnSummary(NamedTuple):
    """One column, as it is in the samples that were read."""

    name: str
    type: str
    """`text`, `int64`, `float32 (3, 224, 224)`, `JPEG 256×256`."""
    median_bytes: int
    max_bytes: int
    samples: int
    """How many have it: all samples, but of a tar, whose samples may differ."""


class ShownValue(NamedTuple):
    """A value of a sample, for a person."""

    column: str
    text: str
    picture: str
    """A small copy of a picture as a data URL; empty for what is none, or was not asked for."""


class ShownSample(NamedTuple):
    """A sample, for a person."""

    place: SamplePlace
    values: list[ShownValue]
    fault: str
    """Why it cannot be read; empty if it can."""


class FilesSummary(NamedTuple):
    """What `echelon data look` shows."""

    format: str
    """`tokens` for `.bin` files: their samples are the tokens."""
    files: int
    size_bytes: int
    """On the disk."""
    samples: int
    chunks: int
    """Pieces that are read together."""
    median_chunk_bytes: int
    columns: list[ColumnSummary]
    class_names: list[str]
    first_samples: list[ShownSample]


def inspect_files(
    paths: Paths,
    format: str | None,
    shown: int,
    *,
    with_pictures: bool = False,
    token_type: str = DEFAULT_TOKEN_TYPE,
) -> FilesSummary:
    """Return what is in files, with the first `shown` samples. Files of tokens do not say of which
    type they are."""
    found = find_data_or_tokens(paths, format)
    if isinstance(found, list):
        return _inspect_tokens([file.path for file in found], token_type, shown)
    files, chosen = found
    reader = open_reader(files, chosen)
    keep: dict[str, None] = dict.fromkeys(list_opaque_columns(reader.column_names))
    decoder = SampleDecoder(keep, reader.column_names)
    sizes = reader.chunks.sizes_bytes
    is_folder = isinstance(reader, ImageFolderReader)
    names = [file.path for file in files]
    count = len(reader) if is_folder else len(files)
    return FilesSummary(
        chosen,
        count,
        # A million pictures are not asked for their sizes one by one.
        int(sizes.sum()) if is_folder else sum(map(_measure_path, names)),
        len(reader),
        len(sizes),
        int(np.median(sizes)),
        _summarize_columns(reader, decoder),
        reader.class_names if isinstance(reader, ImageFolderReader) else [],
        [
            _show_sample(reader, decoder, row, with_pictures)
            for row in range(min(shown, len(reader)))
        ],
    )


def _inspect_tokens(paths: list[DataPath], token_type: str, shown: int) -> FilesSummary:
    """Return what is in files of tokens, with the first tokens of the first `shown` files."""
    mapped = [map_tokens(path, token_type) for path in paths]
    raise_faults([tokens for tokens in mapped if isinstance(tokens, Fault)])
    files = [tokens for tokens in mapped if not isinstance(tokens, Fault)]
    counts, token_bytes = list(map(len, files)), np.dtype(token_type).itemsize
    sizes = cut_files_evenly(counts, token_bytes).sizes_bytes
    total = sum(counts)
    return FilesSummary(
        "tokens",
        len(files),
        total * token_bytes,
        total,
        len(sizes),
        int(np.median(sizes)),
        [ColumnSummary("tokens", token_type, token_bytes, token_bytes, total)],
        [],
        [
            _show_tokens(path, tokens)
            for path, tokens in zip(paths[:shown], files[:shown], strict=True)
        ],
    )


def _show_tokens(path: DataPath, tokens: Tokens) -> ShownSample:
    begins = np.linspace(0, len(tokens), _MEASURED_SAMPLES, False, dtype=np.int64) & ~1
    spread = [tokens[begin : begin + _MEASURED_TOKENS] for begin in np.unique(begins).tolist()]
    first = " ".join(map(str, tokens[:_SHOWN_TOKENS].tolist()))
    values = {
        "tokens": f"{len(tokens):,}",
        "first": first + (" …" if len(tokens) > _SHOWN_TOKENS else ""),
        "largest": f"{max(int(part.max()) for part in spread):,} in {len(spread)} places",
    }
    if tokens.dtype == np.uint16 and not any(part[1::2].any() for part in spread):
        values["note"] = "every second one is 0, as if they were uint32: see --dtype"
    shown = [ShownValue(name, text, "") for name, text in values.items()]
    return ShownSample(SamplePlace(path, 0, "token 0"), shown, "")


def _measure_path(path: DataPath) -> int:
    """Return the bytes of a file, or of the files of a folder."""
    if isinstance(path, Path) and path.is_dir():
        return sum(entry.stat().st_size for entry in os.scandir(path) if entry.is_file())
    return get_size(path)


# --- columns ---


def _summarize_columns(reader: SampleReader, decoder: SampleDecoder) -> list[ColumnSummary]:
    rows = np.unique(np.linspace(0, len(reader) - 1, _MEASURED_SAMPLES, dtype=np.int64)).tolist()
    values: dict[str, list[tuple[Any, int]]] = {name: [] for name in reader.column_names}
    for row in rows:
        with suppress(BadSampleError):  # `echelon data check` names it
            [stored] = reader.read_samples([row])
            sample = decoder.decode_sample(stored, partial(reader.locate, row))
            for name, value in sample.items():
                own = values.setdefault(name, [])
                own.append((value, measure_value(stored[name])))
    counts = reader.column_counts if isinstance(reader, TarReader) else {}
    return [
        ColumnSummary(
            name,
            _name_types([value for value, _ in own]),
            int(median(size for _, size in own)) if own else 0,
            max((size for _, size in own), default=0),
            counts.get(name, len(reader)),
        )
        for name, own in values.items()
    ]


def measure_value(value: Any) -> int:
    """Return the bytes of a value, about as many as a file takes for it."""
    if isinstance(value, (bytes, str)):
        return len(value) if isinstance(value, bytes) else len(value.encode("utf-8", "replace"))
    if isinstance(value, (np.ndarray, np.generic)):
        return value.nbytes
    if isinstance(value, Mapping):
        return sum(map(measure_value, value.values()))
    if isinstance(value, (list, tuple)):
        return sum(map(measure_value, value))
    return 0 if value is None else 8


def _name_types(values: Sequence[Any]) -> str:
    """Return what values of a column are, in a few words."""
    kinds: dict[str, list[tuple[int, ...]]] = {}
    for value in values:
        kind, shape = _name_type(value)
        kinds.setdefault(kind, []).append(shape)
    if not kinds:
        return "not readable"
    is_nullable = kinds.pop("null", None) is not None
    names = [f"{kind}{_join_shapes(kind, shapes)}" for kind, shapes in kinds.items()]
    return " or ".join([*names, *["null"] * is_nullable])


def _name_type(value: Any) -> tuple[str, tuple[int, ...]]:
    if isinstance(value, np.ndarray):
        return str(value.dtype), value.shape
    if isinstance(value, np.generic):
        return str(value.dtype), ()
    if picture := _open_picture(value):
        return str(picture.format), picture.size
    names = {str: "text", bytes: "bytes", bool: "bool", int: "int", float: "float", list: "list"}
    if value is None:
        return "null", ()
    known = "object" if isinstance(value, dict) else names.get(type(value))
    return known or type(value).__name__, ()


def _join_shapes(kind: str, shapes: Sequence[tuple[int, ...]]) -> str:
    """Return `` (3, 224–256)``, or `` 224–256×256`` for pictures; nothing for what has none."""
    if not shapes[0]:
        return ""
    if len({len(shape) for shape in shapes}) > 1:
        return " of any shape"
    parts = [
        f"{min(sizes):,}" if min(sizes) == max(sizes) else f"{min(sizes):,}–{max(sizes):,}"
        for sizes in zip(*shapes, strict=True)
    ]
    return " " + "×".join(parts) if kind.isupper() else f" ({', '.join(parts)})"


# --- samples ---


def _show_sample(
    reader: SampleReader, decoder: SampleDecoder, row: int, with_pictures: bool
) -> ShownSample:
    place = reader.locate(row)
    try:
        [stored] = reader.read_samples([row])
        sample = decoder.decode_sample(stored, lambda: place)
    except BadSampleError as error:
        return ShownSample(place, [], error.why)
    return ShownSample(
        place,
        [
            ShownValue(name, show_value(value), _shrink_picture(value) if with_pictures else "")
            for name, value in sample.items()
        ],
        "",
    )


def show_value(value: Any) -> str:
    """Return a value in one line, shortened: `JPEG 256×256, 12.1 kB`, `int64 (3,): 1 2 3`."""
    if picture := _open_picture(value):
        width, height = picture.size
        size = format_bytes(measure_value(value))
        return f"{picture.format} {width}×{height}, {size}"
    if isinstance(value, bytes):
        more = " …" if len(value) > _SHOWN_ITEMS else ""
        return f"{format_bytes(len(value))}: {value[:_SHOWN_ITEMS].hex(' ')}{more}"
    if isinstance(value, np.ndarray) and value.ndim:
        more = " …" if value.size > _SHOWN_ITEMS else ""
        items = " ".join(map(_show_item, value.reshape(-1)[:_SHOWN_ITEMS].tolist()))
        return f"{value.dtype} {value.shape}: {items}{more}"
    if isinstance(value, (np.ndarray, np.generic)):
        value = value.item() if value.dtype.kind in "biufcSU" else str(value)  # a time is text
    if isinstance(value, str):
        shown = json.dumps(value[:_MAX_SHOWN_CHARACTERS], ensure_ascii=False)
        more = f" … ({len(value):,} characters)" if len(value) > _MAX_SHOWN_CHARACTERS else ""
        return escape_controls(shown) + more
    try:
        text = json.dumps(value, ensure_ascii=False, default=_show_inner)
    except (TypeError, ValueError):
        text = str(value)
    return truncate_text(escape_controls(text), _MAX_SHOWN_CHARACTERS)


def _show_inner(value: Any) -> str:
    """Return what JSON has no word for: bytes and arrays as above, all else in its own words."""
    return show_value(value) if isinstance(value, (bytes, np.ndarray, np.generic)) else str(value)


def _show_item(item: Any) -> str:
    return f"{item:.6g}" if isinstance(item, float) else str(item)


def _open_picture(value: Any) -> Any:
    """Return the bytes of a picture as a PIL image that is not decoded yet; None for all else, and
    where pillow is not installed."""
    data = value.get("bytes") if isinstance(value, Mapping) else value
    if not isinstance(data, bytes):
        return None
    try:
        from PIL import Image
    except ModuleNotFoundError:
        return None
    from echelon.data.image_decoding import IMAGE_FORMATS

    try:
        return Image.open(io.BytesIO(data), formats=IMAGE_FORMATS)
    except Exception:  # PIL raises of many classes for what is no picture
        return None


def _shrink_picture(value: Any) -> str:
    """Return a small copy of a picture as a data URL, or nothing if it is none."""
    picture = _open_picture(value)
    if picture is None:
        return ""
    try:
        picture.draft("RGB", (_PICTURE_PIXELS, _PICTURE_PIXELS))  # a large JPEG is decoded small
        picture.thumbnail((_PICTURE_PIXELS, _PICTURE_PIXELS))
        small = io.BytesIO()
        picture.convert("RGB").save(small, "JPEG", quality=85)
    except Exception:  # damaged, in one of many ways
        return ""
    return "data:image/jpeg;base64," + base64.b64encode(small.getvalue()).decode()
