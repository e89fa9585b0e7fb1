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
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from echelon.errors import EchelonError, Fault
from echelon.snapshot.layout import (
    EVALUATION_FILE,
    MANIFEST_FILE,
    STATE_FILE,
    find_best,
    format_folder_name,
    list_snapshots,
)
from echelon.snapshot.manifest import (
    InvalidSnapshotError,
    Manifest,
    ManifestEntry,
    format_part_name,
    read_manifest,
    render_manifest,
)
from echelon.snapshot.mirror import SnapshotMirror
from echelon.snapshot.part_files import write_file, write_parts
from echelon.snapshot.reader import find_newest, verify_snapshot
from echelon.snapshot.retention import (
    delete_path,
    hide_folder,
    is_up_to,
    mark_best,
    recover_best,
    remove_old_snapshots,
    unmark_best,
)
from echelon.snapshot.staging_buffer import StagingBuffer
from echelon.utils.files import flush_to_disk, replace_file
from echelon.utils.os_errors import format_os_error_reason

_LEFTOVER = re.compile(r"\.(writing|removing)-.*", re.DOTALL)


@dataclass(frozen=True)
class SaveResult:
    """How one save ended."""

    step: int
    folder: Path | None
    """Where the snapshot is; None if there is none."""
    error: str | None
    """What went wrong. With a folder: the snapshot stands, something after it failed."""
    duration_s: float
    """From the call of ``save`` until it was on disk."""
    was_present: bool = False
    """A valid snapshot of this step was there; it was left as it is."""


class SaveError(Exception):
    """Why a snapshot was not saved, as a sentence."""


@dataclass(frozen=True)
class ShardedSave:
    """A save in which every rank writes its own shards into one hidden folder."""

    hidden_folder: Path
    """The hidden folder they write to."""
    wait_for_others: Callable[[], Mapping[str, ManifestEntry]]
    """Waits for the others and returns their files; raises :class:`SaveError` if one could not."""


@dataclass(frozen=True)
class _PendingSave:
    """One save as the background thread needs it: what returns the copied state, and what was
    asked for."""

    step: int
    finish_copy: Callable[[], Mapping[str, Any]]
    info: bytes
    is_best: bool
    begun_s: float
    shared_save: ShardedSave | None


@dataclass(frozen=True)
class _PendingEvaluation:
    """What is to be added to a snapshot after the thread that saves it has ended."""

    step: int
    info: bytes
    is_best: bool
    save_thread: threading.Thread | None


class SnapshotWriter:
    """Writes the snapshots of one run in the background, on rank 0 alone.

    Errors of the disk do not raise here. They are returned by :meth:`take_results` as sentences,
    and the snapshots that were there before stay valid.

    ``resumed_step`` is the step from which the run resumes. Folders of later steps are from before
    the return to that step. They stay until their step is saved again, and are replaced then.
    """

    def __init__(self, root: Path, keep_last: int = 3, resumed_step: int | None = None) -> None:
        if keep_last < 1:
            raise EchelonError(
                Fault(f"keep_last={keep_last}: a run needs a snapshot.", "set it to 1 or more.")
            )
        self._root = Path(root)
        self._keep_last = keep_last
        self._staging_buffer = StagingBuffer()
        self._thread: threading.Thread | None = None
        self._results: deque[SaveResult] = deque()
        self._resumed_step = resumed_step
        self._mirror: SnapshotMirror | None = None
        _prepare_snapshots_folder(self._root, resumed_step)
        self._abandoned_folders = {
            f for f in list_snapshots(self._root) if not is_up_to(resumed_step, f)
        }

    def mirror_to(self, mirror: SnapshotMirror) -> None:
        """Give every snapshot to a mirror once it is on disk; also the one that the run resumes
        from, which may have been saved just before the end of an earlier start."""
        self._mirror = mirror
        resumed = self._root / format_folder_name(self._resumed_step or 0)
        if resumed.is_dir():
            mirror.add(resumed)

    def save(
        self,
        step: int,
        parts: Mapping[str, Any],
        info: Mapping[str, Any],
        is_best: bool = False,
        shared_save: ShardedSave | None = None,
    ) -> None:
        """Copy this state and write it in the background; an earlier save is waited for first.

        Returns as soon as the caller may change the state: when the copy is complete, or made on
        the GPU, from where the background thread fetches it.
        ``parts`` are trees of tensors and plain values, one file each; ``info`` is JSON.
        """
        self._join_thread()
        begun_s = time.monotonic()
        _check_names(step, parts)
        text = _encode_info(info)
        try:
            finish_copy = self._staging_buffer.begin_copy(parts)
        except OSError as error:  # no memory for the copy
            self._results.append(
                self._make_failed_result(step, begun_s, format_os_error_reason(error))
            )
            _abandon_sharded_save(shared_save)
            return
        draft = _PendingSave(step, finish_copy, text, is_best, begun_s, shared_save)
        # Not a daemon: a process that ends by itself finishes the snapshot it began.
        self._thread = threading.Thread(
            target=self._write_in_background, args=(draft,), name=f"save-{step}"
        )
        self._thread.start()

    def record_evaluation(self, step: int, info: Mapping[str, Any], is_best: bool) -> None:
        """Add to the snapshot of a step what an evaluation has found since, and mark it if it is
        the best; in the background, after the save of this step.

        Values of ``info`` replace those that the snapshot has. Nothing happens where the step
        could not be saved.
        """
        draft = _PendingEvaluation(step, _encode_info(info), is_best, self._thread)
        self._thread = threading.Thread(
            target=self._record_in_background, args=(draft,), name=f"evaluated-{step}"
        )
        self._thread.start()

    def record_failure(self, step: int, error: OSError) -> None:
        """Add the result of a save that could not begin."""
        what = describe_save_error(self._root, error)
        self._results.append(self._make_failed_result(step, time.monotonic(), what))

    def take_results(self) -> list[SaveResult]:
        """Return how saves ended that ended since the last call, without waiting."""
        results = []
        with contextlib.suppress(IndexError):
            while True:
                results.append(self._results.popleft())
        return results

    def wait(self) -> list[SaveResult]:
        """Wait for the save under way, then return results as take_results() does."""
        self._join_thread()
        return self.take_results()

    def close(self) -> list[SaveResult]:
        """Wait for the save under way, free the staging buffer, and return results as
        take_results() does."""
        results = self.wait()
        self._staging_buffer.free_memory()
        return results

    def _join_thread(self) -> None:
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    # --- in the background thread ---

    def _write_in_background(self, pending: _PendingSave) -> None:
        """Body of the thread: publish, and turn whatever happens into a result."""
        try:
            result = self._publish(pending)
        except OSError as error:
            result = self._make_failed_result(
                pending.step, pending.begun_s, describe_save_error(self._root, error)
            )
        except SaveError as error:
            result = self._make_failed_result(pending.step, pending.begun_s, str(error))
        except Exception as error:  # a thread that dies in silence would look like a save
            result = self._make_failed_result(
                pending.step, pending.begun_s, f"{type(error).__name__}: {error}"
            )
        self._results.append(result)

    def _publish(self, pending: _PendingSave) -> SaveResult:
        """Write the snapshot, mark the best one and remove old ones, in this order."""
        folder = self._root / format_folder_name(pending.step)
        was_present = folder not in self._abandoned_folders and _is_valid(folder)
        was_best = find_best(self._root) == folder
        if not was_present:
            _write_snapshot(folder, pending)
            self._abandoned_folders.discard(folder)
        else:
            _abandon_sharded_save(pending.shared_save)
        duration_s = time.monotonic() - pending.begun_s
        # The snapshot is valid from here on: an error below is reported with its folder.
        try:
            if pending.is_best:
                mark_best(folder)
            elif was_best and not was_present:
                recover_best(self._root, self._resumed_step)
            self._tidy_up(folder, pending.step)
        except OSError as error:
            reason = describe_save_error(self._root, error)
            message = f"step {pending.step} is saved, but tidying up failed: {reason}"
            return SaveResult(pending.step, folder, message, duration_s, was_present)
        return SaveResult(pending.step, folder, None, duration_s, was_present)

    def _record_in_background(self, pending: _PendingEvaluation) -> None:
        """Body of the thread: add the evaluation, mark the best snapshot and remove old ones."""
        if pending.save_thread is not None:
            pending.save_thread.join()
        begun_s = time.monotonic()
        folder = self._root / format_folder_name(pending.step)
        if folder in self._abandoned_folders or not folder.is_dir():
            return  # the save has failed, and its result says why
        try:
            _add_evaluation(folder, pending)
            if pending.is_best:
                mark_best(folder)
            self._tidy_up(folder, pending.step)
        except Exception as error:  # a thread that dies in silence would look like a success
            reason = (
                describe_save_error(self._root, error)
                if isinstance(error, OSError)
                else f"{type(error).__name__}: {error}"
            )
            message = f"step {pending.step} is saved, but its evaluation is not noted: {reason}"
            duration_s = time.monotonic() - begun_s
            self._results.append(SaveResult(pending.step, folder, message, duration_s))

    def _tidy_up(self, folder: Path, step: int) -> None:
        """Give a snapshot to the mirror, then remove old ones that nobody needs."""
        if self._mirror is not None:
            self._mirror.add(folder)
        needed = self._mirror.list_needed() if self._mirror is not None else ()
        remove_old_snapshots(self._root, step, self._keep_last, needed)

    def _make_failed_result(self, step: int, begun_s: float, reason: str) -> SaveResult:
        """Return the result of a failed save; it names the snapshot that is still valid."""
        newest, _ = find_newest(self._root)
        stands = (
            "no snapshot stands"
            if newest is None
            else (f"the snapshot of step {newest.step} stands")
        )
        return SaveResult(step, None, f"{reason}; {stands}", time.monotonic() - begun_s)


def describe_save_error(root: Path, error: OSError) -> str:
    """Return the reason of a disk error and the path it is about, as a person will find it."""
    # The hidden folder is gone by the time a person looks: name the one that would be there.
    path = Path(os.fsdecode(error.filename)) if error.filename else root
    if path.parent.name.startswith(".writing-"):
        step = path.parent.name.split("-")[1]
        path = root / f"step-{step}" / path.name
    elif path.name.startswith(".writing-"):
        path = root
    return f"{format_os_error_reason(error)}: {path}"


def _prepare_snapshots_folder(root: Path, resumed_step: int | None) -> None:
    """Make the folder, and delete what a killed writer left half written or half deleted."""
    try:
        root.mkdir(parents=True, exist_ok=True)
        names = os.listdir(root)
    except OSError as error:
        raise EchelonError(
            Fault(
                f"no snapshots can be kept in {root}: {format_os_error_reason(error)}.",
                "name another folder.",
            )
        ) from error
    for name in filter(_LEFTOVER.fullmatch, names):
        delete_path(root / name)
    # Whether this works is said by the first save.
    with contextlib.suppress(OSError):
        recover_best(root, resumed_step)


def _check_names(step: int, parts: Mapping[str, Any]) -> None:
    if step < 0:
        raise ValueError(f"a step is 0 or more, not {step}")
    for part in parts:
        format_part_name(part)


def _encode_info(info: Mapping[str, Any]) -> bytes:
    """Return ``info`` as JSON. Done before the save goes to the background: the caller may
    change the mapping, and must be told at once if it is not JSON."""
    try:
        return json.dumps(dict(info), indent=1).encode() + b"\n"
    except (TypeError, ValueError) as error:
        raise EchelonError(
            Fault(f"a snapshot's info is not JSON: {error}.", "keep tensors and objects in parts.")
        ) from error


# One snapshot --------------------------------------------------------------------------------


def _is_valid(folder: Path) -> bool:
    """Return whether the folder holds a snapshot that verifies."""
    if not os.path.lexists(folder):
        return False
    try:
        verify_snapshot(folder)
    except InvalidSnapshotError:
        return False
    return True


def _abandon_sharded_save(shared_save: ShardedSave | None) -> None:
    """Delete the hidden folder of a save that is not needed, after all ranks have finished
    writing: a folder that is deleted while they write may stay, half full."""
    if shared_save is not None:
        with contextlib.suppress(SaveError):
            shared_save.wait_for_others()
        delete_path(shared_save.hidden_folder)


def _write_snapshot(folder: Path, pending: _PendingSave) -> None:
    """Write a snapshot and give it its name.

    The order of the steps is what makes a kill at any moment harmless: before the rename there is
    no snapshot of this step, after it there is a whole one. tests/campaigns/snapshot_kills.py kills
    at every one of them.
    """
    root = folder.parent
    hidden = (
        pending.shared_save.hidden_folder
        if pending.shared_save
        else make_hidden_path(root, pending.step)
    )
    replaced: Path | None = None
    try:
        # 1. A hidden folder beside the target: on the same file system, so that it can be renamed,
        #    and not visible to list_snapshots(). The next start deletes it if this one is killed.
        if pending.shared_save is None:
            os.mkdir(hidden)
        # 2. The parts, each flushed to disk when it is written. Also after an error here the other
        #    ranks are waited for: deleting the folder while they write would leave a part of it.
        try:
            files = write_parts(hidden, pending.finish_copy())
        finally:
            files_of_others = pending.shared_save.wait_for_others() if pending.shared_save else {}
        files |= files_of_others
        # 3. The manifest comes last, because it says that everything it names is complete.
        files[STATE_FILE] = write_file(hidden / STATE_FILE, pending.info)
        manifest = Manifest(pending.step, pending.is_best, files)
        write_file(hidden / MANIFEST_FILE, render_manifest(manifest))
        # 4. The names in the folder: content that was flushed is lost if its name was not.
        flush_to_disk(hidden)
        # 5. A folder of this step that is in the way is damaged, or from before a return to an
        #    older step; otherwise it would have been kept. The mark as the best goes first: a kill
        #    between the two must not leave it on the new snapshot.
        if os.path.lexists(folder):
            if find_best(root) == folder and not pending.is_best:
                unmark_best(root)
            replaced = hide_folder(folder)
        # 6. One rename makes it a snapshot, for every reader at once.
        os.rename(hidden, folder)
        # 7. Only now is the new name on disk. Old snapshots are removed after this, so that a power
        #    cut never leaves neither the old nor the new.
        flush_to_disk(root)
    except BaseException:
        delete_path(hidden)
        raise
    finally:
        if replaced is not None:
            delete_path(replaced)


def _add_evaluation(folder: Path, pending: _PendingEvaluation) -> None:
    """Add the file of the evaluation to a snapshot. The manifest is replaced last and as a whole,
    so that a kill at any moment leaves a snapshot with the evaluation or one without."""
    manifest = read_manifest(folder)
    if EVALUATION_FILE in manifest.files:
        return
    path = folder / EVALUATION_FILE
    path.unlink(missing_ok=True)  # of a start that was killed before it replaced the manifest
    entry = write_file(path, pending.info)
    flush_to_disk(folder)
    complete = Manifest(manifest.step, pending.is_best, {**manifest.files, EVALUATION_FILE: entry})
    with replace_file(folder / MANIFEST_FILE, durable=True) as temporary:
        temporary.write_bytes(render_manifest(complete))


def make_hidden_path(root: Path, step: int) -> Path:
    """Return a new name for a snapshot that is being written; list_snapshots() does not see it."""
    return root / f".writing-{step:09d}-{secrets.token_hex(4)}"
