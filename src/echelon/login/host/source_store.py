"""Source trees by content: a file is sent once, and a tree is made of links to files.

    .echelon/files/ab/cdef…      every file by its SHA-256, read-only
    .echelon/sources/DIGEST/     a tree, by the digest of its manifest; the working folder of jobs
    .echelon/code/RUN            a link to the tree that a run was submitted with
    .echelon/sweeps/SWEEP/       the tree that the workers of a sweep were submitted with

A tree never changes once it has its name, so that what a job reads is what was submitted.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import secrets
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from echelon.errors import EchelonError, Fault
from echelon.utils.files import replace_file

STATE_FOLDER = ".echelon"
"""In `launch.remote_dir`: what is ours and not the user's."""
RUNS_FOLDER = "runs"


class SourceStore:
    """The source trees in one folder of a project."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.folder = root / STATE_FOLDER

    def get_tree(self, digest: str) -> Path:
        """Return the folder of a tree, whether it is there or not."""
        return self.folder / "sources" / _require_hex(digest)

    def get_code_link(self, run_name: str) -> Path:
        """Return the path by which the code of a run is named: it stays the same when the run is
        resumed with other code."""
        return self.folder / "code" / run_name

    def find_missing(self, entries: Sequence[Sequence[Any]]) -> list[str]:
        """Return the digests of files that have to be sent, each once."""
        wanted = {entry[2]: entry[3] for entry in entries if entry[1] != "link"}
        return [digest for digest, size in wanted.items() if not self._has_file(digest, size)]

    def add_file(self, digest: str, content: bytes) -> None:
        """Keep a file. What does not have its digest was damaged on the way, and is refused."""
        self.add_content(digest, [content])

    def add_content(self, digest: str, chunks: Sequence[bytes]) -> None:
        """Keep a file that came in several pieces."""
        found = hashlib.sha256()
        for chunk in chunks:
            found.update(chunk)
        if found.hexdigest() != digest:
            raise EchelonError(
                Fault("a file of the source changed while it was sent", "type the command again")
            )
        path = Path(self._get_file(digest))
        path.parent.mkdir(parents=True, exist_ok=True)
        with replace_file(path) as temporary:
            with temporary.open("wb") as file:
                file.writelines(chunks)
            temporary.chmod(0o444)

    def make_tree(self, digest: str, entries: Sequence[Sequence[Any]]) -> Path:
        """Make the tree of a manifest out of files that are all there; returns its folder."""
        tree = self.get_tree(digest)
        if tree.is_dir():
            return tree
        partial = tree.with_name(f".{digest}.{secrets.token_hex(4)}")
        try:
            partial.mkdir(parents=True)
            for folder in sorted({entry[0].rpartition("/")[0] for entry in entries}):
                (partial / _require_relative(folder)).mkdir(parents=True, exist_ok=True)
            base = str(partial)  # of thousands of files, texts are made faster than paths
            for name, kind, content, _ in entries:
                self._add_entry(f"{base}/{_require_relative(name)}", kind, content)
            with contextlib.suppress(FileExistsError, OSError):
                partial.rename(tree)  # another submission of the same code may have been faster
        finally:
            shutil.rmtree(partial, ignore_errors=True)
        if not tree.is_dir():
            raise OSError(f"{tree} cannot be made")
        return tree

    def link_data(self, tree: Path) -> None:
        """Give the tree links to what lies in the project's folder under names that it lacks, so
        that `data/` leads to the data there."""
        with contextlib.suppress(FileNotFoundError):
            for name in sorted(os.listdir(self.root)):
                if name.startswith(".") or name == RUNS_FOLDER or os.path.lexists(tree / name):
                    continue
                with contextlib.suppress(FileExistsError):
                    (tree / name).symlink_to(self.root / name)

    def point_code_link(self, run_name: str, tree: Path) -> None:
        """Let the path of a run's code lead to this tree."""
        link = self.get_code_link(run_name)
        link.parent.mkdir(parents=True, exist_ok=True)
        with replace_file(link) as temporary:
            temporary.symlink_to(os.path.relpath(tree, link.parent))

    def get_sweep_folder(self, sweep_name: str) -> Path:
        """Return the working folder of a sweep's workers."""
        return self.folder / "sweeps" / sweep_name

    def make_sweep_folder(self, sweep_name: str, tree: Path) -> Path:
        """Make the working folder of a sweep's workers, out of links to the files of a tree.

        It is no link to the tree: trials compare the path of their code, which stays the same when
        the sweep is continued with other code.
        """
        folder = self.get_sweep_folder(sweep_name)
        partial = folder.with_name(f".{sweep_name}.{secrets.token_hex(4)}")
        earlier = folder.with_name(f"{partial.name}.old")
        try:
            shutil.copytree(tree, partial, symlinks=True, copy_function=_link_or_copy)
            if folder.exists():
                folder.rename(earlier)
            partial.rename(folder)
        finally:
            for each in (partial, earlier):
                shutil.rmtree(each, ignore_errors=True)
        return folder

    def _add_entry(self, path: str, kind: str, content: str) -> None:
        if kind == "link":
            os.symlink(content, path)
            return
        file = self._get_file(content)
        if kind == "file":
            try:
                os.link(file, path)
                return
            except OSError:  # too many links to an empty file, or a file system without any
                pass
        shutil.copyfile(file, path)
        os.chmod(path, 0o555 if kind == "program" else 0o444)

    def _get_file(self, digest: str) -> str:
        digest = _require_hex(digest)
        return f"{self.folder}/files/{digest[:2]}/{digest[2:]}"

    def _has_file(self, digest: str, size: int) -> bool:
        file = self._get_file(digest)
        with contextlib.suppress(OSError):
            status = os.stat(file)
            if status.st_nlink == 1:
                os.utime(file)  # it is in no tree, and is about to be
            return status.st_size == size
        return False

    def note_use(self, *folders: Path) -> None:
        """Have it known that code is used today: what is not goes after a while."""
        for folder in folders:
            with contextlib.suppress(OSError):
                os.utime(folder)


def _link_or_copy(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)


def compute_tree_digest(entries: Sequence[Sequence[Any]]) -> str:
    """Return the digest that names a tree: of all names, kinds and contents."""
    text = "\n".join("\0".join(map(str, entry)) for entry in sorted(map(tuple, entries)))
    return hashlib.sha256(os.fsencode(text)).hexdigest()[:32]


def split_chunks(sizes: Sequence[int], data: bytes) -> Iterator[bytes]:
    """Yield the parts of one frame's data, which are as long as `sizes` says."""
    start = 0
    for size in sizes:
        yield data[start : start + size]
        start += size


def _require_hex(digest: str) -> str:
    if not (digest.isalnum() and digest.isascii()):
        raise ValueError(f"{digest!r} is not a digest")
    return digest


def _require_relative(name: str) -> str:
    if name.startswith("/") or ".." in name.split("/"):
        raise ValueError(f"{name!r} is not inside the source")
    return name
