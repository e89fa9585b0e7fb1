"""`echelon.data.open`: which files are meant, which format they have, and a Dataset of them."""

from __future__ import annotations

import glob
import os
from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from echelon.data.decode import DecodeSetting, SampleDecoder
from echelon.data.find_objects import find_objects
from echelon.data.formats.arrow_files import is_saved_dataset
from echelon.data.formats.byte_source import DataPath
from echelon.data.formats.column_choice import raise_faults
from echelon.data.formats.image_folder import IMAGE_ENDINGS
from echelon.data.formats.reader import DataFile, SampleReader
from echelon.data.shard_manifest import MANIFEST_NAME
from echelon.errors import EchelonError, Fault, suggest_nearest
from echelon.object_store.urls import is_url
from echelon.utils.text import join_names

if TYPE_CHECKING:
    from echelon.data.file_dataset import FileDataset

Paths = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]


class FileFormat(NamedTuple):
    """A format that `open` knows."""

    endings: tuple[str, ...]
    reader: str
    """The class that reads it, as module:name. The module is imported when it is used."""


FORMATS = {
    "parquet": FileFormat((".parquet", ".pq"), "parquet_files:ParquetReader"),
    "arrow": FileFormat((".arrow", ".feather"), "arrow_files:ArrowReader"),
    "jsonl": FileFormat(
        (".jsonl", ".ndjson", ".jsonl.gz", ".ndjson.gz"), "jsonl_files:JsonlReader"
    ),
    "npy": FileFormat((".npy",), "numpy_files:NumpyReader"),
    "tar": FileFormat((".tar",), "tar_files:TarReader"),
    "images": FileFormat((), "image_folder:ImageFolderReader"),
}
"""Pictures are found by their folder, which has one for each class."""
_TOKENS_HINT = "files of tokens are opened with echelon.data.open_tokens(path, length=1024)"


def open(
    paths: Paths,
    *,
    columns: Sequence[str] | None = None,
    decode: DecodeSetting = "auto",
    transform: Callable[[Any], Any] | None = None,
    format: str | None = None,
) -> FileDataset:
    """Return the samples of files as a Dataset: for `train_data`, or for any loop.

        dataset = echelon.data.open("data/train-*.parquet", columns=["text", "label"])
        dataset[0]  # {"text": "...", "label": 1}

    paths      A file, a folder, a pattern such as "data/*.parquet", or a list of them. Files of a
               folder or a pattern are taken in the order of their names. They may be in an object
               store: "s3://bucket/data/*.tar", gs://, or https:// without a pattern.
    columns    The columns to read; all without it. Others are not read from the disk.
    decode     What becomes of bytes: "auto" decodes pictures, arrays, json and text by the name of
               a column (jpg, npy, json, txt, cls, image); None leaves bytes; a function is called
               with the name and the value of every column; a dict has functions by column.
    transform  Called with every sample, after decoding; it returns what the Dataset gives. What it
               draws from random, numpy and torch is the same at any number of processes.
    format     What the files are, where their endings do not say it: "parquet", "arrow", "jsonl",
               "npy", "tar", or "images" for a folder with one folder of pictures for each class.
    """
    from echelon.data.file_dataset import FileDataset  # imports torch

    if isinstance(columns, str):
        raise EchelonError(
            Fault(f"columns={columns!r} is a text", f"give a list of names: columns=[{columns!r}]")
        )
    files, chosen = find_data(paths, format)
    reader = open_reader(files, chosen, columns)
    return FileDataset(reader, SampleDecoder(decode, reader.column_names), transform)


def find_data(paths: Paths, format: str | None) -> tuple[list[DataFile], str]:
    """Return the files that are meant, and their format."""
    if format is not None and format not in FORMATS:
        raise EchelonError(
            Fault(f"format={format!r} is not known", suggest_nearest(format, FORMATS))
        )
    known = [] if format else [ending for each in FORMATS.values() for ending in each.endings]
    files = find_files(paths, known, are_images=format == "images")
    return files, format or choose_format(files)


def open_reader(
    files: Sequence[DataFile], format: str, columns: Sequence[str] | None = None
) -> SampleReader:
    """Return what reads the samples of files as they are stored. Raises where there are none."""
    module, _, name = FORMATS[format].reader.partition(":")
    make_reader = getattr(import_module(f"echelon.data.formats.{module}"), name)
    reader: SampleReader
    if format == "images":
        reader = make_reader(_get_folder(files), columns)
    elif format == "tar":
        reader = make_reader([file.path for file in files], columns)
    else:
        reader = make_reader(files, columns)
    if not len(reader):
        names = join_names([str(file.path) for file in files])
        raise EchelonError(Fault(f"there are no samples in {names}", "give files with samples"))
    return reader


def open_tokens(
    paths: Paths,
    *,
    length: int,
    dtype: str = "uint16",
    stride: int | None = None,
    transform: Callable[[Any], Any] | None = None,
) -> FileDataset:
    """Return windows of tokens as a Dataset, with `inputs` and `targets` of `length` tokens each;
    the targets are one token later. The files are memory-mapped and not copied.

        dataset = echelon.data.open_tokens("train.bin", length=1024)
        dataset[0]["inputs"]  # a tensor of int64

    paths      A `.bin` file of numbers without a header, as nanoGPT writes it, or a `.npy` file; a
               folder, a pattern or a list of them. No window spans two files.
    length     The tokens of a sample.
    dtype      The type of a token in `.bin` files: uint16 or uint32, or uint8, int32, int64.
    stride     How many tokens after a window the next begins; `length` without it, so that every
               token is an input once. 1 gives a window at every token.
    transform  Called with every sample, as for `echelon.data.open`.
    """
    from echelon.data.file_dataset import FileDataset
    from echelon.data.formats.token_files import TOKEN_TYPES, TokenReader

    faults = [
        Fault(f"{name}={value!r}", "give a whole number of tokens, at least 1")
        for name, value in (("length", length), ("stride", 1 if stride is None else stride))
        if not isinstance(value, (int, np.integer)) or isinstance(value, bool) or value < 1
    ]
    if str(dtype) not in TOKEN_TYPES:
        known = f"give one of {', '.join(TOKEN_TYPES)}"
        faults.append(Fault(f"dtype={dtype!r} is no type of tokens", known))
    if faults:
        raise EchelonError(*faults)
    files = find_files(paths, (".bin", ".npy"))
    reader = TokenReader(files, length, str(dtype), stride or length)
    return FileDataset(reader, transform=transform)


def find_files(paths: Paths, endings: Sequence[str], *, are_images: bool = False) -> list[DataFile]:
    """Return the files that are meant. Of a folder, those with one of the endings, at any depth;
    all of them where no endings are given. Hidden ones, and those that begin with `_`, are left
    out, as Spark's and Parquet's tools do. A folder of pictures is not taken apart."""
    given = [paths] if isinstance(paths, (str, os.PathLike)) else list(paths)
    files: list[DataFile] = []
    faults: list[Fault] = []
    for each in given:
        try:
            found = _resolve_path(os.fspath(each), tuple(endings), are_images)
        except EchelonError as error:
            faults += error.faults
            continue
        if isinstance(found, Fault):
            faults.append(found)
        else:
            files += found
    if not given:
        faults.append(Fault("paths is an empty list", "give a file, a folder or a pattern"))
    if faults:
        raise EchelonError(*faults)
    return files


def _resolve_path(text: str, endings: tuple[str, ...], are_images: bool) -> list[DataFile] | Fault:
    if is_url(text):
        return find_objects(text, endings, are_images=are_images)
    path = Path(text).expanduser()
    if path.is_dir():
        files = [] if are_images else [DataFile(f, path) for f in _walk_folder(path, endings)]
        if not files and next(_walk_folder(path, IMAGE_ENDINGS), None):
            files = [DataFile(path, path)]
        return files or Fault(
            f"the folder {path} has no files with a known ending",
            f"known: {join_names(endings, 20)}; or say what they are with format="
            if endings
            else "give a folder with files",
        )
    if path.exists():
        return [DataFile(path, path.parent)]
    if not glob.has_magic(text):
        return Fault(f"{path} does not exist", _suggest_path(path))
    folder = Path(*_cut_pattern(path))
    matches = sorted(glob.glob(str(path), recursive=True))
    files = []
    for match in map(Path, matches):
        inner = _walk_folder(match, endings) if match.is_dir() else [match]
        files += [DataFile(file, folder) for file in inner]
    return files or Fault(f"nothing matches {path}", _suggest_path(folder))


def _walk_folder(folder: Path, endings: tuple[str, ...]) -> Iterator[Path]:
    """Yields the files of a folder at any depth, by name. A folder that Hugging Face's library
    saved is one of them: it says itself which files it has."""
    if is_saved_dataset(folder):
        yield folder
        return
    with os.scandir(folder) as entries:
        found = sorted(entries, key=lambda entry: entry.name)
    for entry in found:
        if entry.name.startswith((".", "_")) or entry.name == MANIFEST_NAME:
            continue
        if entry.is_dir():
            yield from _walk_folder(Path(entry.path), endings)
        elif not endings or entry.name.lower().endswith(endings):
            yield Path(entry.path)


def _cut_pattern(path: Path) -> Iterator[str]:
    """Yields the parts of a path before its first one with a wildcard."""
    for part in path.parts:
        if glob.has_magic(part):
            return
        yield part


def _suggest_path(path: Path) -> str:
    """Return where a path that does not exist may be meant to lead."""
    for folder in (path, *path.parents):
        if folder.is_dir():
            names = [name for name in os.listdir(folder) if not name.startswith(".")]
            if not names:
                return f"{folder} is an empty folder"
            return f"in {folder}: {suggest_nearest(path.name, names)}"
    return "check the path"


def choose_format(files: Sequence[DataFile]) -> str:
    """Return the format of all files by their endings. Raises where one has none that is known, or
    where they are of several formats."""
    by_format: dict[str, list[DataPath]] = {}
    faults = []
    for file in files:
        name = file.path.name.lower()
        known = [key for key, each in FORMATS.items() if name.endswith(each.endings)]
        if file.path.is_dir():
            is_saved = isinstance(file.path, Path) and is_saved_dataset(file.path)
            known = ["arrow" if is_saved else "images"]
        if known:
            by_format.setdefault(known[0], []).append(file.path)
            continue
        endings = join_names([ending for each in FORMATS.values() for ending in each.endings], 20)
        hint = f"known: {endings}; or say what it is with format="
        if name.endswith(".bin"):
            hint = _TOKENS_HINT
        elif name.endswith(IMAGE_ENDINGS):
            hint = "open the folder that has a folder of pictures for each class"
        faults.append(Fault(f"{file.path} has no ending of a known format", hint))
    if len(by_format) > 1:
        counts = ", ".join(f"{len(own)} {key} ({own[0]})" for key, own in by_format.items())
        faults.append(
            Fault(
                f"the files are of several formats: {counts}",
                "open one format at a time, such as with a pattern: data/*.parquet",
            )
        )
    raise_faults(faults)
    [chosen] = by_format
    return chosen


def _get_folder(files: Sequence[DataFile]) -> DataPath:
    """Return the one folder of pictures."""
    if len(files) > 1 or not files[0].path.is_dir():
        names = join_names([str(file.path) for file in files])
        what = f"format=images: {names} is not one folder" if len(files) == 1 else f"given: {names}"
        raise EchelonError(Fault(what, "give one folder, with a folder of pictures for each class"))
    return files[0].path
