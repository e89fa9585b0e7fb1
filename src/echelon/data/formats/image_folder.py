"""Pictures in a folder for each class, `train/cat/1.jpg`, as torchvision's ImageFolder has them.

The folder is listed whenever it is opened. There is no index: it could not be trusted without
listing the folder again.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from echelon.data.formats.byte_source import DataPath, get_size
from echelon.data.formats.read_ahead import read_ahead
from echelon.data.formats.reader import BadSampleError, ChunkTable, SamplePlace
from echelon.errors import EchelonError, Fault
from echelon.object_store.block_cache import count_blocks
from echelon.object_store.remote_file import RemoteFile, RemoteFolder, fetch_blocks
from echelon.object_store.urls import parse_url
from echelon.utils.os_errors import format_os_error_reason

IMAGE_ENDINGS = (
    *(".jpg", ".jpeg", ".png", ".webp", ".bmp"),
    *(".gif", ".tif", ".tiff", ".ppm", ".pgm"),
)
_MEASURED_FILES = 64
"""So many sizes are asked for to estimate all: a million would take longer than the listing."""


class ImageFolderReader:
    """The pictures of a folder. Implements SampleReader: `image` is bytes, `label` a number.

    Classes are numbered in the order of their names, pictures within a class are in the order of
    their paths. Hidden files and files with other endings are no samples.
    """

    def __init__(self, folder: DataPath, columns: Sequence[str] | None = None) -> None:
        self.folder = folder
        known = ["image", "label"]
        faults = [
            Fault(f"{folder} has no column {name!r}", f"a folder of pictures has {known}")
            for name in columns or ()
            if name not in known
        ]
        self.column_names = known if columns is None else [*columns]
        listing = _list_remote(folder) if isinstance(folder, RemoteFolder) else _list_local(folder)
        classes, paths, loose, self._objects = listing
        if loose:
            what = f"{loose[0]} is in no class" + (
                f", like {len(loose) - 1} more" * (len(loose) > 1)
            )
            faults.append(Fault(what, "put every picture into the folder of its class"))
        elif not classes:
            faults.append(Fault(f"{folder} has no folders", "make one for each class of pictures"))
        faults += [
            Fault(f"{folder}/{name} has no pictures", "remove it: it would be a class without any")
            for name, images in zip(classes, paths, strict=True)
            if not images
        ]
        if faults:
            raise EchelonError(*faults)
        self.class_names = classes
        self._class_starts = np.cumsum([0, *map(len, paths)], dtype=np.int64)
        # One object for all: a string for each takes more memory, and forked processes that
        # count references to them copy their pages.
        encoded = [os.fsencode(path) for images in paths for path in images]
        self._path_ends = np.cumsum([0, *map(len, encoded)], dtype=np.int64)
        self._paths = b"".join(encoded)
        # Files of their own do not lie together, so each is a chunk: any order is as quick.
        count = len(encoded)
        sizes = np.broadcast_to(np.int64(self._estimate_size(count)), count)
        self.chunks = ChunkTable(np.arange(count + 1), sizes)

    def __len__(self) -> int:
        return int(self._class_starts[-1])

    def read_samples(self, rows: Sequence[int]) -> list[dict[str, Any]]:
        if self._objects and "image" in self.column_names:  # at once, not one after the other
            wanted = [self._objects[row] for row in rows]
            fetch_blocks({file: range(count_blocks(file.info)) for file in wanted})
        return [self._read(row) for row in rows]

    def prefetch_chunks(self, chunks: Sequence[int]) -> None:
        """Have pictures read into the system's cache; each is a chunk."""
        if "image" in self.column_names:
            for row in chunks:
                read_ahead(self._get_path(row))

    def locate(self, row: int) -> SamplePlace:
        return SamplePlace(self._get_path(row), 0)

    def get_name(self, row: int) -> str:
        """Return the path of a picture from the folder on."""
        return os.fsdecode(self._paths[self._path_ends[row] : self._path_ends[row + 1]])

    def measure_files(self) -> NDArray[np.int64]:
        """Return the bytes of every picture. This asks the file system for each."""
        sizes = (get_size(self._get_path(row)) for row in range(len(self)))
        return np.fromiter(sizes, np.int64, len(self))

    def list_endings(self) -> list[str]:
        """Return the endings of all pictures, without a dot, `jpg` for `jpeg`."""
        paths = (self._paths[a:b] for a, b in pairwise(self._path_ends.tolist()))
        found = {os.fsdecode(path.rpartition(b".")[2]).lower() for path in paths}
        return sorted({"jpg" if ending == "jpeg" else ending for ending in found})

    def _read(self, row: int) -> dict[str, Any]:
        path = self._get_path(row)
        sample: dict[str, Any] = {}
        for name in self.column_names:
            if name == "label":
                sample[name] = int(np.searchsorted(self._class_starts, row, side="right")) - 1
                continue
            try:
                sample[name] = path.read_bytes()
            except OSError as error:
                why = f"it cannot be read: {format_os_error_reason(error)}"
                raise BadSampleError(SamplePlace(path, 0), why) from error
        return sample

    def _get_path(self, row: int) -> DataPath:
        if not 0 <= row < len(self):
            raise IndexError(f"there is no sample {row}: there are {len(self):,}")
        if self._objects:
            return self._objects[row]
        assert isinstance(self.folder, Path)
        return self.folder / self.get_name(row)

    def _estimate_size(self, count: int) -> int:
        rows = np.unique(np.linspace(0, count - 1, _MEASURED_FILES, dtype=np.int64)).tolist()
        sizes = [get_size(self._get_path(row)) for row in rows]
        return sum(sizes) // len(sizes)


class _Listing(NamedTuple):
    """What a folder has."""

    classes: list[str]
    paths: list[list[str]]
    """Of each class, from the folder on."""
    loose: list[str]
    """Pictures that are in no class."""
    objects: list[RemoteFile]
    """All pictures, where they are objects."""


def _list_local(folder: DataPath) -> _Listing:
    assert isinstance(folder, Path)
    try:
        with os.scandir(folder) as found:
            entries = [entry for entry in found if not entry.name.startswith(".")]
        classes = sorted(entry.name for entry in entries if entry.is_dir())
        paths = [sorted(_list_images(folder / name, f"{name}/")) for name in classes]
    except OSError as error:
        what = f"{error.filename or folder} cannot be read: {format_os_error_reason(error)}"
        raise EchelonError(Fault(what, "check the path and its permissions")) from error
    loose = sorted(entry.path for entry in entries if _is_image(entry.name))
    return _Listing(classes, paths, [each for each in loose if Path(each).name not in classes], [])


def _list_remote(folder: RemoteFolder) -> _Listing:
    prefix = parse_url(folder.info.url).key
    found: dict[str, dict[str, RemoteFile]] = {}
    loose = []
    for file in folder.files:
        parts = file.relative_to(prefix).parts
        if any(part.startswith(".") for part in parts):
            continue
        if len(parts) > 1:
            images = found.setdefault(parts[0], {})
            if _is_image(parts[-1]):
                images["/".join(parts)] = file
        elif _is_image(parts[-1]):
            loose.append(str(file))
    classes = sorted(found)
    paths = [sorted(found[name]) for name in classes]
    objects = [found[name][path] for name, own in zip(classes, paths, strict=True) for path in own]
    return _Listing(classes, paths, sorted(loose), objects)


def _list_images(folder: Path, prefix: str) -> Iterator[str]:
    """Yield the paths of all pictures in a folder and below, with a prefix in its place."""
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.name.startswith("."):
                continue
            if entry.is_dir():
                yield from _list_images(folder / entry.name, f"{prefix}{entry.name}/")
            elif _is_image(entry.name):
                yield prefix + entry.name


def _is_image(name: str) -> bool:
    return name.lower().endswith(IMAGE_ENDINGS)
