"""How a run was last started: the command, where it was typed, which code and which Python."""

from __future__ import annotations

import contextlib
import os
import platform
import re
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from echelon import __version__
from echelon.config.schema import Config
from echelon.runs.run_folder import Run
from echelon.utils.files import read_json_object, write_json_atomically

_MAX_COMMAND = 10_000
_COMMIT = re.compile(r"[0-9a-f]{40,64}")


def record_start_command(run: Run, config: Config) -> None:
    """Write down how this process was started. A full disk must not end a training over it."""
    entry = str(config.experiment.get("entry") or "")
    file = Path(entry.rpartition(":")[0])
    with contextlib.suppress(OSError):
        folder = Path.cwd()
        data = {
            "command": format_command(sys.argv)[:_MAX_COMMAND],
            "folder": str(folder),
            "commit": find_git_commit(file.parent if file.suffix == ".py" else folder),
            "echelon": __version__,
            "python": platform.python_version(),
            "executable": sys.executable,
        }
        write_json_atomically(run.start_file, data)


def format_command(argv: Sequence[str]) -> str:
    """Return the words of a process as they were typed: `echelon train …` or `python FILE …`."""
    program = Path(argv[0] if argv else "")
    is_ours = program.name == "echelon" or program.parts[-2:] == ("echelon", "__main__.py")
    return shlex.join(["echelon"] if is_ours else ["python", str(program)]) + "".join(
        f" {shlex.quote(word)}" for word in argv[1:]
    )


def read_start_command(run: Run) -> dict[str, Any]:
    """Return how a run was last started; empty where that was not recorded."""
    return read_json_object(run.start_file) or {}


def find_git_commit(folder: Path) -> str | None:
    """Return the commit that is checked out in a folder, or None outside of git.

    Its files are read, because starting git takes longer than all other checks of a start. Whether
    there are uncommitted edits is not looked at.
    """
    with contextlib.suppress(OSError, ValueError):
        folder = folder.resolve()
        for parent in (folder, *folder.parents):
            if os.path.lexists(parent / ".git"):
                return _read_head(_find_git_folder(parent / ".git"))
    return None


def _find_git_folder(path: Path) -> Path:
    """Return the folder of a repository; that of a work tree or submodule is named in a file."""
    if path.is_dir():
        return path
    return path.parent / path.read_text(encoding="utf-8").strip().removeprefix("gitdir: ")


def _read_head(git: Path) -> str | None:
    head = (git / "HEAD").read_text(encoding="utf-8").strip()
    if not head.startswith("ref: "):
        return head if _COMMIT.fullmatch(head) else None
    name, folders = head.removeprefix("ref: "), [git]
    with contextlib.suppress(OSError):  # a work tree shares the branches of its repository
        folders.append(git / (git / "commondir").read_text(encoding="utf-8").strip())
    for folder in folders:
        with contextlib.suppress(OSError):
            commit = (folder / name).read_text(encoding="utf-8").strip()
            return commit if _COMMIT.fullmatch(commit) else None
    for folder in folders:
        with contextlib.suppress(OSError):
            for line in (folder / "packed-refs").read_text(encoding="utf-8").splitlines():
                commit, _, packed = line.partition(" ")
                if packed == name and _COMMIT.fullmatch(commit):
                    return commit
    return None
