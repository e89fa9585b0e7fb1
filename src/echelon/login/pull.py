"""Bringing snapshots of a run from the cluster: only when they are asked for."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

from echelon.errors import EchelonError, ExitCode, Fault, suggest_other_folder
from echelon.login.connection import LoginConnection, LoginTarget, open_connection
from echelon.login.local_copy import LocalCopy
from echelon.login.refresh import refresh_copies
from echelon.runs.run_folder import Run
from echelon.snapshot.layout import BEST_LINK, MANIFEST_FILE
from echelon.utils.files import replace_file
from echelon.utils.os_errors import format_os_error_reason
from echelon.utils.text import format_bytes

_INCOMING = ".pull-"
"""A snapshot that is on its way. A pull that was cut short goes on in it."""


def pull_snapshots(run: Run, which: str) -> list[Path]:
    """Bring the best, the newest (`last`) or all snapshots of a run into its folder here, and the
    rest of the run with its logs; returns their folders."""
    copy = LocalCopy(run)
    try:
        with open_connection(LoginTarget.from_origin(copy.origin)) as connection:
            refresh_copies(connection, [copy], with_logs=True)
            return _receive(connection, copy, which)
    except OSError as error:
        raise EchelonError(
            Fault(
                f"{run.snapshots_folder} cannot be written: {format_os_error_reason(error)}",
                suggest_other_folder(error, "--dir"),
            ),
            exit=ExitCode.FAILED,
        ) from error


def _receive(connection: LoginConnection, copy: LocalCopy, which: str) -> list[Path]:
    folder = copy.run.snapshots_folder
    folder.mkdir(parents=True, exist_ok=True)
    connection.step = "bringing snapshots"
    request = {"do": "snapshots", "folder": copy.origin.folder, "which": which}
    connection.send(request | {"have": _list_present(folder)})
    complete: list[Path] = []
    best: str | None = None
    while True:
        message, data = connection.receive()
        if message.get("done"):
            break
        if "snapshots" in message:
            best = message["best"]
            names, size = message["snapshots"], format_bytes(message["size"])
            print(f"{', '.join(names)}, {size}", file=sys.stderr, flush=True)
        elif "part" in message:
            _write_part(folder, str(message["part"]), int(message["offset"]), data)
        elif "complete" in message:
            complete.append(_publish(folder, str(message["complete"])))
    if best is not None:
        _require_plain_name(best)
    if best is not None and (folder / best).is_dir():
        with replace_file(folder / BEST_LINK) as temporary:
            temporary.symlink_to(best)
    return complete


def _list_present(folder: Path) -> dict[str, int]:
    """Return the size of every file of snapshots that is here, whole or from a pull cut short."""
    present = {}
    for path in folder.glob("*/**/*"):
        top = path.relative_to(folder).parts[0]
        if path.is_file() and not (folder / top).is_symlink():
            name = path.relative_to(folder).as_posix().removeprefix(_INCOMING)
            present[name] = path.stat().st_size
    return present


def _write_part(folder: Path, name: str, offset: int, data: bytes) -> None:
    parts = Path(name).parts
    if name.startswith(("/", ".")) or ".." in parts or len(parts) < 2:
        raise EchelonError(Fault(f"a file named {name!r} was sent", "look who runs that host"))
    if (folder / parts[0] / MANIFEST_FILE).is_file():
        return  # it is whole already
    path = folder / f"{_INCOMING}{name}"
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("r+b" if offset else "wb") as file:
        file.seek(offset)
        file.truncate()
        file.write(data)


def _require_plain_name(name: str) -> None:
    """Refuse what would lead out of the folder of snapshots."""
    if name in ("", ".", "..") or "/" in name:
        raise EchelonError(Fault(f"a snapshot named {name!r} was sent", "look who runs that host"))


def _publish(folder: Path, name: str) -> Path:
    """Give a snapshot that is whole its name."""
    _require_plain_name(name)
    incoming, final = folder / f"{_INCOMING}{name}", folder / name
    if incoming.is_dir():
        if (final / MANIFEST_FILE).is_file():
            shutil.rmtree(incoming)
        else:
            shutil.rmtree(final, ignore_errors=True)
            incoming.rename(final)
    return final
