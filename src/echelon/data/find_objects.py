"""Which objects an address means: one, those below a folder, or those that a pattern matches. They
come in the order in which the same files come from a file system."""

from __future__ import annotations

import glob
from collections.abc import Sequence
from fnmatch import fnmatchcase
from pathlib import PurePosixPath

from echelon.data.formats.image_folder import IMAGE_ENDINGS
from echelon.data.formats.reader import DataFile
from echelon.data.shard_manifest import MANIFEST_NAME
from echelon.errors import EchelonError, Fault, suggest_nearest
from echelon.object_store.client import find_object, find_object_or_list, list_objects
from echelon.object_store.remote_file import RemoteFile, RemoteFolder
from echelon.object_store.urls import ObjectInfo, ObjectUrl, parse_url
from echelon.utils.text import join_names

_SAVED_NAMES = ("state.json", "dataset_dict.json")
_Segments = list[str]


def find_objects(
    text: str, endings: tuple[str, ...], *, are_images: bool = False
) -> list[DataFile] | Fault:
    """Return the objects that are meant. Raises EchelonError where the store does not say."""
    url = parse_url(text)
    if glob.has_magic(url.key):
        return _match_pattern(url, endings)
    if not url.can_list:
        return [_make_file(find_object(str(url)), url.key.rpartition("/")[0])]
    if not url.key or url.key.endswith("/"):
        folder = url._replace(key=url.key.rstrip("/"))
        return _list_folder(folder, list_objects(str(folder)), endings, are_images)
    found = find_object_or_list(str(url), is_likely_folder="." not in url.name)
    if isinstance(found, ObjectInfo):
        return [_make_file(found, url.key.rpartition("/")[0])]
    return _list_folder(url, found, endings, are_images)


def _make_file(info: ObjectInfo, folder: str) -> DataFile:
    return DataFile(RemoteFile(info), PurePosixPath(folder))


def _list_folder(
    folder: ObjectUrl, found: Sequence[ObjectInfo], endings: tuple[str, ...], are_images: bool
) -> list[DataFile] | Fault:
    if not found:
        return Fault(f"{folder} does not exist", _suggest(folder))
    inner = _sort([(_split(info, folder.key), info) for info in found])
    files = [] if are_images else _choose(inner, endings)
    if not files and any(parts[-1].lower().endswith(IMAGE_ENDINGS) for parts, _ in inner):
        members = tuple(RemoteFile(info) for _, info in inner)
        listed = RemoteFolder(ObjectInfo(str(folder), 0, ""), members)
        return [DataFile(listed, PurePosixPath(folder.key))]
    if not files:
        known = f"known: {join_names(endings, 20)}; or say what they are with format="
        what = f"the folder {folder} has no files with a known ending"
        return Fault(what, known if endings else "give a folder with files")
    return [_make_file(info, folder.key) for info in files]


def _match_pattern(url: ObjectUrl, endings: tuple[str, ...]) -> list[DataFile] | Fault:
    if not url.can_list:
        return Fault(
            f"{url} has a pattern, and a web server cannot list its files",
            "give a list of addresses, one for each file",
        )
    pattern = url.key.split("/")
    fixed = next(number for number, part in enumerate(pattern) if glob.has_magic(part))
    folder = url._replace(key="/".join(pattern[:fixed]))
    by_match: dict[str, list[tuple[_Segments, ObjectInfo]]] = {}
    files: dict[str, ObjectInfo] = {}
    for info in list_objects(str(folder)):
        parts = _split(info, folder.key)
        for count in range(1, len(parts) + 1):
            if _is_match(parts[:count], pattern[fixed:]):
                match = "/".join(parts[:count])
                if count == len(parts):
                    files[match] = info
                else:  # of a folder that matches
                    by_match.setdefault(match, []).append((parts[count:], info))
    matched: dict[str, ObjectInfo] = {}
    for match in sorted({*files, *by_match}):
        inner = _choose(_sort(by_match.get(match, [])), endings)
        for info in (*([files[match]] if match in files else []), *inner):
            matched[info.url] = info
    found = [_make_file(info, folder.key) for info in matched.values()]
    return found or Fault(f"nothing matches {url}", _suggest(folder))


def _is_match(parts: _Segments, pattern: _Segments) -> bool:
    """Return whether names of folders and of a file match a pattern, as in a shell: `**` stands for
    any number of folders, and a hidden name has to be asked for."""
    if not pattern:
        return not parts
    if pattern[0] == "**":
        if len(pattern) == 1:
            return bool(parts) and not any(part.startswith(".") for part in parts)
        starts = range(len(parts) + 1)
        return any(
            _is_match(parts[start:], pattern[1:])
            for start in starts
            if not any(part.startswith(".") for part in parts[:start])
        )
    if not parts or (parts[0].startswith(".") and not pattern[0].startswith(".")):
        return False
    return fnmatchcase(parts[0], pattern[0]) and _is_match(parts[1:], pattern[1:])


def _choose(
    found: Sequence[tuple[_Segments, ObjectInfo]], endings: tuple[str, ...]
) -> list[ObjectInfo]:
    """Return those with a known ending; hidden ones and those that begin with `_` are left out."""
    for parts, info in found:
        if parts[-1] in _SAVED_NAMES:
            raise EchelonError(
                Fault(
                    f"{info.url} shows a folder of Hugging Face's save_to_disk, which is read from "
                    "a file system only",
                    "copy the folder, or name its files: s3://…/*.arrow",
                )
            )
    return [
        info
        for parts, info in found
        if not any(part.startswith((".", "_")) for part in parts)
        and parts[-1] != MANIFEST_NAME
        and (not endings or parts[-1].lower().endswith(endings))
    ]


def _split(info: ObjectInfo, folder: str) -> _Segments:
    return parse_url(info.url).key.removeprefix(folder).strip("/").split("/")


def _sort(
    found: list[tuple[_Segments, ObjectInfo]],
) -> list[tuple[_Segments, ObjectInfo]]:
    """Return objects by names, folder by folder. Some tools mark a folder by an empty object."""
    return sorted(each for each in found if not each[1].url.endswith("/"))


def _suggest(folder: ObjectUrl) -> str:
    """Return where an address that leads nowhere may be meant to lead."""
    missing = ""
    while True:
        names = {_split(info, folder.key)[0] for info in list_objects(str(folder))}
        if names:
            return f"in {folder}: {suggest_nearest(missing, names)}"
        if not folder.key:
            return f"the bucket {folder.scheme}://{folder.bucket} is empty"
        missing = folder.name
        folder = folder._replace(key=folder.key.rpartition("/")[0])
