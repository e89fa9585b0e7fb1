"""Files that are replaced as a whole, files and folders that reach the disk, and JSON to read.

A reader of a file written here sees the old content or the new one, never a part, even if the
writer is killed. This takes a rename, because a write in place can be seen half done.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Any


@contextlib.contextmanager
def replace_file(path: Path, *, durable: bool = False, prefix: str = ".") -> Iterator[Path]:
    """Yield a temporary path beside ``path``; what was written there replaces ``path`` at the end.

    The temporary name is hidden, unique and keeps the suffix, by which some libraries choose a
    format. It begins with ``prefix``, for callers that look for left-overs of killed writers.
    If the block raises, the temporary file is removed and ``path`` stays as it was.

    ``durable`` also waits for the disk, so that a power cut leaves the old or the new content.
    It costs milliseconds on a local disk and more on NFS; without it only killed processes are
    covered, which is enough for what can be written again.
    """
    temporary = path.with_name(f"{prefix}{path.stem}.{secrets.token_hex(4)}{path.suffix}")
    try:
        yield temporary
        # In this order: after a power cut a new name must never lead to content that was lost.
        if durable:
            flush_to_disk(temporary)
        os.replace(temporary, path)
        if durable:
            flush_to_disk(path.parent)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise


def write_text_atomically(
    path: Path, text: str, *, durable: bool = False, names_code: bool = False
) -> None:
    """Replace a file by one with this text in UTF-8; see replace_file().

    ``names_code``: it decides which code runs, so nobody else may write it, whatever the umask.
    """
    with replace_file(path, durable=durable) as temporary:
        temporary.write_text(text, encoding="utf-8")
        if names_code:
            with contextlib.suppress(OSError):  # a file system without modes
                temporary.chmod(temporary.stat().st_mode & ~0o022)


def write_json_atomically(
    path: Path, data: Any, *, durable: bool = False, names_code: bool = False
) -> None:
    """Replace a file by one with this value as indented JSON; see write_text_atomically()."""
    text = json.dumps(data, indent=2) + "\n"
    write_text_atomically(path, text, durable=durable, names_code=names_code)


def read_json_object(path: Path) -> dict[str, Any] | None:
    """Return the JSON object in a file.

    Returns None where there is no such file, where it cannot be read and where it holds anything
    else: for notes that may be missing, not for input of which a person must hear.
    """
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):  # the last for lists within lists without end
        return None
    return data if isinstance(data, dict) else None


def flush_to_disk(path: Path) -> None:
    """Wait until a file's content, or a folder's list of names, is on the disk.

    A new file survives a power cut only after both: its own content and the folder that names it.
    An error names the path, which that of ``os.fsync`` does not.
    """
    handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(handle)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error
    finally:
        os.close(handle)
