"""What changes in folders: by inotify where the kernel sees every change, else by looking.

On a network file system the kernel of this machine does not hear of what others write, so nothing
is watched there. `FolderWatch` says which folders it could take; the others are polled.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import select
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

_IN_MODIFY, _IN_MOVED_FROM, _IN_MOVED_TO = 0x2, 0x40, 0x80
_IN_CREATE, _IN_DELETE, _IN_DELETE_SELF, _IN_MOVE_SELF = 0x100, 0x200, 0x400, 0x800
_IN_IGNORED, _IN_OVERFLOW = 0x8000, 0x4000
_IN_ONLYDIR, _IN_DONT_FOLLOW = 0x01000000, 0x02000000
_WATCHED = (
    _IN_MODIFY | _IN_MOVED_FROM | _IN_MOVED_TO | _IN_CREATE | _IN_DELETE
    | _IN_DELETE_SELF | _IN_MOVE_SELF | _IN_ONLYDIR | _IN_DONT_FOLLOW
)  # fmt: skip
_EVENT = struct.Struct("iIII")
_BUFFER_BYTES = 256 * 1024
_SHARE_OF_WATCHES = 4
"""The limit is for all programs of the user, such as editors; this part of it is ours."""
_REMOTE_FILE_SYSTEMS = {
    0x6969: "nfs",
    0x517B: "smb",
    0xFE534D42: "smb2",
    0xFF534D42: "cifs",
    0x65735546: "fuse",
    0x0BD00BD0: "lustre",
    0x47504653: "gpfs",
    0x00C36400: "ceph",
    0x5346414F: "afs",
    0x01021997: "9p",
    0x19830326: "beegfs",
    0xAAD7AAEA: "panfs",
    0x013661FC: "vboxsf",
    0x786F4256: "vboxsf",
}
"""By the number that statfs gives."""


class FolderEvent(NamedTuple):
    """Something happened to a name in a folder."""

    folder: str
    name: str
    """Empty if it was the folder itself."""
    is_growth: bool
    """Whether a file was written to; else a name came or went."""


class FolderWatch:
    """Folders in which every change is heard of. It costs nothing while nothing changes.

    It is used by one thread. Where the kernel has no inotify, or no more of it, add() says no.
    """

    def __init__(self) -> None:
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._handle = -1
        self._folders: dict[int, str] = {}
        self._watches: dict[str, int] = {}
        self._limit = _read_watch_limit() // _SHARE_OF_WATCHES
        self.has_overflowed = False
        """Whether events were lost, so that all must be looked at. The reader resets it."""
        with contextlib.suppress(AttributeError):
            self._handle = self._libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)

    def close(self) -> None:
        """Stop watching."""
        if self._handle >= 0:
            os.close(self._handle)
            self._handle = -1
        self._folders.clear()
        self._watches.clear()

    def add(self, folder: str) -> bool:
        """Watch a folder, and return whether that is possible. It must exist."""
        if folder in self._watches:
            return True
        if self._handle < 0 or len(self._watches) >= self._limit:
            return False
        watch = self._libc.inotify_add_watch(self._handle, os.fsencode(folder), _WATCHED)
        if watch < 0:
            if ctypes.get_errno() in (errno.ENOSPC, errno.ENOMEM):
                self._limit = len(self._watches)
            return False
        self._watches[folder], self._folders[watch] = watch, folder
        return True

    def remove(self, folder: str) -> None:
        """Stop watching a folder."""
        watch = self._watches.pop(folder, None)
        if watch is not None:
            self._folders.pop(watch, None)
            self._libc.inotify_rm_watch(self._handle, watch)

    def is_watched(self, folder: str) -> bool:
        """Return whether changes in a folder are heard of."""
        return folder in self._watches

    def wait(self, timeout_s: float, wake: int) -> None:
        """Wait until something changes, the handle `wake` can be read, or time is up."""
        poll = select.poll()
        poll.register(wake, select.POLLIN)
        if self._handle >= 0:
            poll.register(self._handle, select.POLLIN)
        poll.poll(max(0, int(timeout_s * 1000)))

    def read_events(self) -> Iterator[FolderEvent]:
        """Yield what has happened since the last call, without waiting."""
        while self._handle >= 0:
            try:
                data = os.read(self._handle, _BUFFER_BYTES)
            except BlockingIOError:
                return
            offset = 0
            while offset < len(data):
                watch, mask, _, length = _EVENT.unpack_from(data, offset)
                offset += _EVENT.size
                name = data[offset : offset + length].rstrip(b"\0")
                offset += length
                if mask & _IN_OVERFLOW:
                    self.has_overflowed = True
                folder = self._folders.get(watch)
                if folder is None:
                    continue
                if mask & (_IN_IGNORED | _IN_DELETE_SELF | _IN_MOVE_SELF):
                    self.remove(folder)
                    yield FolderEvent(folder, "", False)
                else:
                    yield FolderEvent(folder, os.fsdecode(name), bool(mask & _IN_MODIFY))


def is_remote(folder: Path) -> bool:
    """Return whether a folder is on a file system that other machines may write; True where that
    cannot be known."""
    buffer = ctypes.create_string_buffer(512)
    libc = ctypes.CDLL(None, use_errno=True)
    try:
        if libc.statfs(os.fsencode(folder), buffer) != 0:
            return True
    except AttributeError:
        return True
    # The first field, which is as wide as a word of the machine.
    number = ctypes.c_long.from_buffer(buffer).value & 0xFFFFFFFF
    return number in _REMOTE_FILE_SYSTEMS


def _read_watch_limit() -> int:
    with contextlib.suppress(OSError, ValueError):
        return int(Path("/proc/sys/fs/inotify/max_user_watches").read_text(encoding="ascii"))
    return 8192
