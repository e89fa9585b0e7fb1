"""Writing snapshots in the background: the loop waits for a copy in memory, not for the disk.

The order of things on disk is what makes a kill at any moment harmless: everything is written
and flushed in a hidden folder beside the target, the manifest last; one rename makes it a
snapshot; what is to go is renamed to a hidden name before anything in it is deleted.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import shutil
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, cast

import torch

from echelon.errors import EchelonError, Fault
from echelon.runs import BEST, MANIFEST
from echelon.train.snapshots import (
    CHUNK_BYTES,
    STATE,
    Checksum,
    Entry,
    Manifest,
    SnapshotDamaged,
    best,
    folder_name,
    listed,
    newest,
    part_file,
    read_manifest,
    render_manifest,
    step_of,
    verify,
)
from echelon.train.staging import Stage
from echelon.utils.files import flush_to_disk, replace_file
from echelon.utils.os_errors import describe_os_error

_LEFTOVER = re.compile(r"\.(writing|removing)-.*", re.DOTALL)


@dataclass(frozen=True)
class Saved:
    """How one save ended."""

    step: int
    folder: Path | None
    """Where the snapshot is; None if there is none."""
    error: str | None
    """What went wrong. With a folder: the snapshot stands, something after it failed."""
    seconds: float
    """From the call of ``save`` until it was on disk."""
    already: bool = False
    """A valid snapshot of this step was there; it was left as it is."""


class SaveFailed(Exception):
    """Why a snapshot was not saved, as a sentence."""


@dataclass(frozen=True)
class Begun:
    """A snapshot that other ranks write parts of."""

    beside: Path
    """The hidden folder they write to."""
    others: Callable[[], Mapping[str, Entry]]
    """Waits for the others and gives their files; :class:`SaveFailed` where one could not."""


@dataclass(frozen=True)
class _Draft:
    step: int
    parts: Mapping[str, Any]
    info: bytes
    best: bool
    began: float
    begun: Begun | None


class Writer:
    """The one writer of a snapshot folder (rank 0's).

    Errors of the disk never raise here; they come out of :meth:`finished` as sentences, and
    the snapshots there were before still stand.

    `after` is the step the run goes on from. Folders of later steps were left behind when it
    returned there: they stand until their step is saved again, and are replaced then.
    """

    def __init__(self, root: Path, keep_last: int = 3, after: int | None = None) -> None:
        if keep_last < 1:
            raise EchelonError(
                Fault(f"keep_last={keep_last}: a run needs a snapshot.", "set it to 1 or more.")
            )
        self._root = Path(root)
        self._keep_last = keep_last
        self._stage = Stage()
        self._thread: threading.Thread | None = None
        self._results: deque[Saved] = deque()
        self._after = after
        _open(self._root, after)
        self._left_behind = {f for f in listed(self._root) if not _up_to(after, f)}

    def save(
        self,
        step: int,
        parts: Mapping[str, Any],
        info: Mapping[str, Any],
        best: bool = False,
        begun: Begun | None = None,
    ) -> None:
        """Copy this state and write it in the background; waits for an earlier save first."""
        self._join()
        began = time.monotonic()
        _check_names(step, parts)
        text = _info_json(info)
        try:
            staged = self._stage.copy(parts)
        except OSError as error:  # no memory for the copy
            self._results.append(self._failed(step, began, describe_os_error(error)))
            _abandon(begun)
            return
        draft = _Draft(step, staged, text, best, began, begun)
        # Not a daemon: a process that ends by itself finishes the snapshot it began.
        self._thread = threading.Thread(target=self._write, args=(draft,), name=f"save-{step}")
        self._thread.start()

    def fail(self, step: int, error: OSError) -> None:
        """Note a save that could not begin."""
        what = sentence(self._root, error)
        self._results.append(self._failed(step, time.monotonic(), what))

    def finished(self) -> list[Saved]:
        """How the saves ended that ended since this was last asked; never waits."""
        ended = []
        with contextlib.suppress(IndexError):
            while True:
                ended.append(self._results.popleft())
        return ended

    def wait(self) -> list[Saved]:
        """The same, after the save under way has ended."""
        self._join()
        return self.finished()

    def close(self) -> list[Saved]:
        """The same, and the kept memory is given back."""
        ended = self.wait()
        self._stage.release()
        return ended

    def _join(self) -> None:
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    # What follows runs in the background.

    def _write(self, draft: _Draft) -> None:
        try:
            saved = self._store(draft)
        except OSError as error:
            saved = self._failed(draft.step, draft.began, sentence(self._root, error))
        except SaveFailed as error:
            saved = self._failed(draft.step, draft.began, str(error))
        except Exception as error:  # a thread that dies in silence would look like a save
            saved = self._failed(draft.step, draft.began, f"{type(error).__name__}: {error}")
        self._results.append(saved)

    def _store(self, draft: _Draft) -> Saved:
        folder = self._root / folder_name(draft.step)
        already = folder not in self._left_behind and _is_valid(folder)
        was_best = best(self._root) == folder
        if not already:
            _write_snapshot(folder, draft)
            self._left_behind.discard(folder)
        else:
            _abandon(draft.begun)
        seconds = time.monotonic() - draft.began
        try:
            if draft.best:
                _mark_best(folder)
            elif was_best and not already:
                _recover_best(self._root, self._after)
            _prune(self._root, draft.step, self._keep_last)
        except OSError as error:
            late = (
                f"step {draft.step} is saved, but tidying up failed: {sentence(self._root, error)}"
            )
            return Saved(draft.step, folder, late, seconds, already)
        return Saved(draft.step, folder, None, seconds, already)

    def _failed(self, step: int, began: float, what: str) -> Saved:
        standing, _ = newest(self._root)
        stands = (
            "no snapshot stands"
            if standing is None
            else (f"the snapshot of step {standing.step} stands")
        )
        return Saved(step, None, f"{what}; {stands}", time.monotonic() - began)


def sentence(root: Path, error: OSError) -> str:
    """What the system said, about which file."""
    # The hidden folder is gone by the time a person looks: name the one that would be there.
    path = Path(os.fsdecode(error.filename)) if error.filename else root
    if path.parent.name.startswith(".writing-"):
        step = path.parent.name.split("-")[1]
        path = root / f"step-{step}" / path.name
    elif path.name.startswith(".writing-"):
        path = root
    return f"{describe_os_error(error)}: {path}"


def _open(root: Path, after: int | None) -> None:
    """Make the folder, and finish what a killed writer left undone."""
    try:
        root.mkdir(parents=True, exist_ok=True)
        names = os.listdir(root)
    except OSError as error:
        raise EchelonError(
            Fault(
                f"no snapshots can be kept in {root}: {describe_os_error(error)}.",
                "name another folder.",
            )
        ) from error
    for name in filter(_LEFTOVER.fullmatch, names):
        _delete(root / name)
    # Whether this works is said by the first save.
    with contextlib.suppress(OSError):
        _recover_best(root, after)


def _check_names(step: int, parts: Mapping[str, Any]) -> None:
    if step < 0:
        raise ValueError(f"a step is 0 or more, not {step}")
    for part in parts:
        part_file(part)


def _info_json(info: Mapping[str, Any]) -> bytes:
    """Now, not in the background: the caller may change it, or hear that it is not JSON."""
    try:
        return json.dumps(dict(info), indent=1).encode() + b"\n"
    except (TypeError, ValueError) as error:
        raise EchelonError(
            Fault(f"a snapshot's info is not JSON: {error}.", "keep tensors and objects in parts.")
        ) from error


# One snapshot --------------------------------------------------------------------------------


def _is_valid(folder: Path) -> bool:
    if not os.path.lexists(folder):
        return False
    try:
        verify(folder)
    except SnapshotDamaged:
        return False
    return True


def _abandon(begun: Begun | None) -> None:
    """Once the others are done: a folder that is deleted while they write may stay, half full."""
    if begun is not None:
        with contextlib.suppress(SaveFailed):
            begun.others()
        _delete(begun.beside)


def _write_snapshot(folder: Path, draft: _Draft) -> None:
    root = folder.parent
    beside = draft.begun.beside if draft.begun else hidden_folder(root, draft.step)
    aside: Path | None = None
    try:
        if draft.begun is None:
            os.mkdir(beside)
        try:
            files = write_parts(beside, draft.parts)
        finally:  # see _abandon
            theirs = draft.begun.others() if draft.begun else {}
        files |= theirs
        files[STATE] = _write_bytes(beside / STATE, draft.info)
        manifest = Manifest(draft.step, draft.best, files)
        _write_bytes(beside / MANIFEST, render_manifest(manifest))
        flush_to_disk(beside)
        if os.path.lexists(folder):  # damaged or left behind, else it would have been kept
            if best(root) == folder and not draft.best:
                _unmark_best(root)  # first: a kill must not leave the mark on the new one
            aside = _hide(folder)
        os.rename(beside, folder)
        flush_to_disk(root)
    except BaseException:
        _delete(beside)
        raise
    finally:
        if aside is not None:
            _delete(aside)


def hidden_folder(root: Path, step: int) -> Path:
    return root / f".writing-{step:09d}-{secrets.token_hex(4)}"


def write_parts(folder: Path, parts: Mapping[str, Any]) -> dict[str, Entry]:
    """On the disk when this returns, but for the folder itself."""
    return {part_file(n): _write_part(folder / part_file(n), tree) for n, tree in parts.items()}


def _write_part(path: Path, tree: Any) -> Entry:
    with _sink(path) as sink:
        torch.save(tree, cast(IO[bytes], sink))  # it needs write and flush only
    return sink.entry()


def _write_bytes(path: Path, data: bytes) -> Entry:
    with _sink(path) as sink:
        sink.write(data)
    return sink.entry()


class _Sink:
    """A file that is checksummed as it is written, in pieces and without the GIL.

    Given a path, ``torch.save`` writes by itself: the checksum would need a second pass, and a
    full disk reads "unexpected pos 640 vs 534". Either way another thread waits about 5 ms at a
    time while 600 MB are written (over an old file, which we never do, 90 to 160 ms).
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        self._checksum = Checksum()
        self._size = 0
        self._error: OSError | None = None

    def write(self, data: bytes | memoryview) -> int:
        view = memoryview(data).cast("B")
        # Kept for later and not raised: our caller is C++ code that still has to close its
        # archive, and would answer with an error of its own.
        if self._error is None:
            try:
                self._write(view)
            except OSError as error:
                self._error = error
        return len(view)

    def _write(self, view: memoryview) -> None:
        for start in range(0, len(view), CHUNK_BYTES):
            piece = view[start : start + CHUNK_BYTES]
            self._checksum.update(piece)
            self._size += len(piece)
            while piece:
                piece = piece[os.write(self._file, piece) :]

    def flush(self) -> None:
        """Asked for by torch.save; nothing is buffered here."""

    def finish(self) -> None:
        """On the disk, or an OSError that names the file."""
        try:
            if self._error is not None:
                raise self._error
            os.fsync(self._file)
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(self._path)) from error

    def close(self) -> None:
        os.close(self._file)

    def entry(self) -> Entry:
        return Entry(self._size, self._checksum.hexdigest())


@contextlib.contextmanager
def _sink(path: Path) -> Iterator[_Sink]:
    sink = _Sink(path)
    try:
        try:
            yield sink
        finally:
            sink.finish()
    finally:
        sink.close()


# The others ----------------------------------------------------------------------------------


def _prune(root: Path, step: int, keep_last: int) -> None:
    """Keep the last of those up to ``step``, which was just saved and so is known to be whole.

    Newer ones are from before a return to an older snapshot. Counting them, a damaged one could
    push out the only good one; they are pruned once the run has passed them again.
    """
    folders = [f for f in listed(root) if (step_of(f.name) or 0) <= step]
    kept = best(root)
    gone = [_hide(folder) for folder in folders[:-keep_last] if folder != kept]
    if gone:
        flush_to_disk(root)  # hidden for good before the first file goes
    for hidden in gone:
        _delete(hidden)


def _mark_best(folder: Path) -> None:
    root = folder.parent
    # The prefix is that of all unfinished work, which the next open() removes.
    with replace_file(root / BEST, durable=True, prefix=".writing-") as temporary:
        temporary.write_text(f"{folder.name}\n", encoding="utf-8")


def _unmark_best(root: Path) -> None:
    (root / BEST).unlink()
    flush_to_disk(root)


def _recover_best(root: Path, after: int | None) -> None:
    """A kill between the rename of a snapshot and its mark as the best must not lose the mark."""
    folders = [folder for folder in listed(root) if _up_to(after, folder)]
    last = next(filter(_says_best, reversed(folders)), None)
    if last is None or last == best(root):
        return
    # By time, not by step: after a return to an older snapshot the lower step is the later one.
    if best(root) is None or (root / BEST).stat().st_mtime < (last / MANIFEST).stat().st_mtime:
        _mark_best(last)


def _up_to(step: int | None, folder: Path) -> bool:
    return step is None or (step_of(folder.name) or 0) <= step


def _says_best(folder: Path) -> bool:
    try:
        return read_manifest(folder).best
    except SnapshotDamaged:
        return False


def _hide(folder: Path) -> Path:
    hidden = folder.with_name(f".removing-{folder.name}-{secrets.token_hex(4)}")
    os.rename(folder, hidden)
    return hidden


def _delete(path: Path) -> None:
    """As far as it goes; what stays has a hidden name and is tried again at the next open."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with contextlib.suppress(OSError):
            path.unlink()
