"""`echelon.data.open`: which files are meant, which format they have, and a Dataset of them."""

from __future__ import annotations

import glob
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from echelon.data.decode import DecodeSetting, make_decoder
from echelon.data.find_objects import find_objects
from echelon.data.formats.arrow_files import is_saved_dataset
from echelon.data.formats.byte_source import DataPath
from echelon.data.formats.column_choice import raise_faults
from echelon.data.formats.folder_scan import FolderPath, enter_folder, scan_folder
from echelon.data.formats.image_folder import IMAGE_ENDINGS
from echelon.data.formats.reader import DataFile, SampleReader
from echelon.data.shard_manifest import MANIFEST_NAME
from echelon.errors import EchelonError, Fault, suggest_nearest
from echelon.object_store.remote_file import RemoteFile
from echelon.object_store.urls import is_url
from echelon.utils.os_errors import format_os_error_reason
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
_COMPRESSIONS = (".gz", ".bz2", ".xz", ".zst", ".lz4")
"""Endings of files that are not left out in silence, though no sample of them can be read by
itself. What bgzip writes is known."""
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
               with the name and the value of every column; a dict has functions by column, such
               as {"jpg": echelon.data.decode_pixels} for arrays in the place of PIL images.
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
    decoder = make_decoder(decode, reader)
    return FileDataset(reader, decoder, transform, is_remote=_is_remote(files))


def find_data(paths: Paths, format: str | None) -> tuple[list[DataFile], str]:
    """Return the files that are meant, and their format."""
    if format is not None and format not in FORMATS:
        raise EchelonError(
            Fault(f"format={format!r} is not known", suggest_nearest(format, FORMATS))
        )
    known = [] if format else [ending for each in FORMATS.values() for ending in each.endings]
    files = find_files(paths, known, are_images=format == "images")
    return files, format or choose_format(files)


def find_data_or_tokens(
    paths: Paths, format: str | None
) -> tuple[list[DataFile], str] | list[DataFile]:
    """Return what `find_data` does, or the files alone if all of them are `.bin` files."""
    try:
        return find_data(paths, format)
    except EchelonError:
        with suppress(EchelonError):
            files = find_files(paths, [".bin"])
            if format is None and all(file.path.suffix.lower() == ".bin" for file in files):
                return files
        raise


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
    from echelon.data.formats.mapped_tokens import TOKEN_TYPES
    from echelon.data.formats.token_files import TokenReader

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
    return FileDataset(reader, transform=transform, is_remote=_is_remote(files))


def _is_remote(files: Sequence[DataFile]) -> bool:
    return any(isinstance(file.path, RemoteFile) for file in files)


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
        except OSError as error:  # a folder that leads there may not be entered
            what = f"{error.filename or each} cannot be read: {format_os_error_reason(error)}"
            found = Fault(what, "check the path and its permissions")
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
        compressed = _list_compressed(endings)
        found = [] if are_images else list(_walk_folder(path, (*endings, *compressed)))
        for file in found:
            if (name := file.name.lower()).endswith(compressed) and not name.endswith(endings):
                return _make_compressed_fault(file)
        files = [DataFile(file, path) for file in found]
        if not files and next(_walk_folder(path, IMAGE_ENDINGS), None):
            files = [DataFile(path, path)]
        if not files and endings and next(_walk_folder(path, (".bin",)), None):
            return Fault(f"the folder {path} has .bin files", _TOKENS_HINT)
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


def _walk_folder(folder: Path | FolderPath, endings: tuple[str, ...]) -> Iterator[Path]:
    """Yields the files of a folder at any depth, by name. A folder that Hugging Face's library
    saved is one of them: it says itself which files it has."""
    if isinstance(folder, Path):
        folder = FolderPath(folder)
    if is_saved_dataset(folder.path):
        yield folder.path
        return
    entries, place = scan_folder(folder)
    for entry in entries:
        if entry.name.startswith((".", "_")) or entry.name == MANIFEST_NAME:
            continue
        if (inner := enter_folder(entry, place)) is not None:
            yield from _walk_folder(inner, endings)
        elif not endings or entry.name.lower().endswith(endings):
            yield Path(entry.path)


def _list_compressed(endings: Sequence[str]) -> tuple[str, ...]:
    short = (".tgz",) if ".tar" in endings else ()
    return (*short, *(ending + each for ending in endings for each in _COMPRESSIONS))


def _make_compressed_fault(file: DataPath) -> Fault:
    return Fault(
        f"{file} is compressed as a whole: its samples cannot be read one by one",
        "unpack it once, or leave it out with a pattern such as data/*.tar",
    )


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
    known_endings = [ending for each in FORMATS.values() for ending in each.endings]
    for file in files:
        name = file.path.name.lower()
        known = [key for key, each in FORMATS.items() if name.endswith(each.endings)]
        if file.path.is_dir():
            is_saved = isinstance(file.path, Path) and is_saved_dataset(file.path)
            known = ["arrow" if is_saved else "images"]
        if known:
            by_format.setdefault(known[0], []).append(file.path)
            continue
        hint = f"known: {join_names(known_endings, 20)}; or say what it is with format="
        if name.endswith(_list_compressed(known_endings)):
            faults.append(_make_compressed_fault(file.path))
            continue
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
