"""What of a source folder goes to the login node: names, kinds and digests of its files.

Digests are kept from one submission to the next, by size and time of change, so that of 5,000 files
only those that were edited are read.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import stat
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from echelon.config.schema import Config
from echelon.login.connection import LoginConnection
from echelon.login.frames import MAX_DATA_BYTES
from echelon.login.host.source_store import compute_tree_digest
from echelon.submission.source_copy import MAX_SOURCE_BYTES, SourceTree, survey_source
from echelon.utils.cache_root import get_cache_root
from echelon.utils.files import read_json_object, write_text_atomically
from echelon.utils.text import format_bytes, format_count

_SETTLED_NS = 2_000_000_000
"""A file that was changed so shortly before it was read may be changed again without another time
of change."""


@dataclass(frozen=True)
class SourceManifest:
    """The files of a source folder as they are now."""

    folder: Path
    entries: Sequence[Sequence[Any]]
    """Name, kind (file, program or link), digest or target of the link, and size."""
    size_bytes: int

    @property
    def digest(self) -> str:
        return compute_tree_digest(self.entries)

    def describe(self) -> str:
        """Return `12 files of FOLDER (40 kB)`."""
        counted = format_count(len(self.entries), "file")
        return f"{counted} of {self.folder} ({format_bytes(self.size_bytes)})"


def find_source_folder(config: Config) -> Path | None:
    """Return the folder whose code a run needs: the current one, unless the experiment's file is
    elsewhere; None for a bundled experiment, which needs none."""
    here = Path.cwd().resolve()
    if config.program:
        return here
    file = str(config.experiment.get("entry") or "").rpartition(":")[0]
    if not file.endswith(".py"):
        return None
    folder = Path(file).resolve().parent
    return here if folder.is_relative_to(here) else folder


def read_manifest(
    folder: Path | None, runs: Path, environ: Mapping[str, str], secrets: str | None = None
) -> SourceManifest:
    """Return the manifest of a source folder; of none, an empty one."""
    if folder is None:
        return SourceManifest(Path(), (), 0)
    tree = survey_source(
        folder,
        runs,
        secrets=secrets,
        too_large_hint="name data in .gitignore, and put it into launch.remote_dir there: what is "
        "in that folder is seen by jobs under its name",
    )
    assert tree.size_bytes <= MAX_SOURCE_BYTES
    digests = _KnownDigests(tree.folder, environ)
    entries = [entry for name in tree.files for entry in _describe_file(tree, name, digests)]
    digests.save()
    return SourceManifest(tree.folder, entries, tree.size_bytes)


def _describe_file(tree: SourceTree, name: str, digests: _KnownDigests) -> Iterator[list[Any]]:
    with contextlib.suppress(FileNotFoundError):  # gone since it was listed
        status = os.lstat(f"{tree.folder}/{name}")
        if stat.S_ISLNK(status.st_mode):
            yield [name, "link", _find_link_target(tree.folder, tree.folder / name), 0]
            return
        kind = "program" if status.st_mode & stat.S_IXUSR else "file"
        yield [name, kind, digests.get(name, status), status.st_size]


def _find_link_target(folder: Path, path: Path) -> str:
    """Return where a link leads in the copy: to the same file of the source, or as it is."""
    target = Path(os.path.realpath(path))
    if target.is_relative_to(folder):
        return os.path.relpath(target, path.parent.resolve())
    return os.readlink(path)


class _KnownDigests:
    """The digests of files that were read before."""

    def __init__(self, folder: Path, environ: Mapping[str, str]) -> None:
        self._folder = folder
        key = hashlib.sha256(os.fsencode(folder)).hexdigest()[:16]
        self._file = get_cache_root(environ) / "login" / f"{key}.json"
        self._before = read_json_object(self._file) or {}
        self._now: dict[str, list[Any]] = {}

    def get(self, name: str, status: os.stat_result) -> str:
        """Return the digest of a file, which is read if it has changed."""
        signs = [status.st_size, status.st_mtime_ns, status.st_ino]
        known = self._before.get(name)
        if isinstance(known, list) and known[1:] == signs:
            self._now[name] = known
            return str(known[0])
        read_at = time.time_ns()
        digest = hashlib.sha256((self._folder / name).read_bytes()).hexdigest()
        if status.st_mtime_ns < read_at - _SETTLED_NS:
            self._now[name] = [digest, *signs]
        return digest

    def save(self) -> None:
        """Keep what is known now. Without it the next submission only takes longer."""
        if self._now == self._before:
            return
        with contextlib.suppress(OSError):
            self._file.parent.mkdir(parents=True, exist_ok=True)
            write_text_atomically(self._file, json.dumps(self._now))


def send_source(connection: LoginConnection, manifest: SourceManifest) -> int:
    """Send what the login node lacks of the source; returns how many files that were."""
    connection.step = "sending the source"
    answer = connection.ask({"do": "source", "digest": manifest.digest})
    if answer.get("done"):
        return 0
    connection.send({"manifest": True}, json.dumps(list(manifest.entries)).encode())
    missing: list[str] = json.loads(connection.receive()[1])
    names = {str(entry[2]): str(entry[0]) for entry in manifest.entries if entry[1] != "link"}
    for files, sizes, data, goes_on in _pack(manifest.folder, missing, names):
        connection.send({"files": files, "sizes": sizes, "goes_on": goes_on}, data)
    connection.send({"end": True})
    connection.receive()
    return len(missing)


def _pack(
    folder: Path, digests: Sequence[str], names: Mapping[str, str]
) -> Iterator[tuple[list[str], list[int], bytes, bool]]:
    """Yield frames of many small files, or of parts of a large one."""
    files: list[str] = []
    sizes: list[int] = []
    data = bytearray()
    for digest in digests:
        content = (folder / names[digest]).read_bytes()
        if len(content) > MAX_DATA_BYTES:
            for start in range(0, len(content), MAX_DATA_BYTES):
                part = content[start : start + MAX_DATA_BYTES]
                yield [digest], [len(part)], part, start + MAX_DATA_BYTES < len(content)
            continue
        if len(data) + len(content) > MAX_DATA_BYTES:
            yield files, sizes, bytes(data), False
            files, sizes, data = [], [], bytearray()
        files.append(digest)
        sizes.append(len(content))
        data += content
    if files:
        yield files, sizes, bytes(data), False
