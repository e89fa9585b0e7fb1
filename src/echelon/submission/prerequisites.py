"""Checks before anything is queued for what would fail only in the job: programs, scripts, data."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path

from echelon.errors import EchelonError, Fault, suggest_nearest
from echelon.submission.plan import PlannedCommand, Submission
from echelon.submission.source_copy import SourceTree

_WANDB_FOLDER = "wandb"
"""A word of many commands that names a program, a module or a tracker, hardly this folder."""


def require_prerequisites(submission: Submission, env: Mapping[str, str]) -> None:
    """Raise one EchelonError with everything that the job would not find."""
    faults = [
        fault
        for entry in submission.commands
        for fault in (
            *_find_program_faults(entry, submission, env),
            *_find_uncopied_path_faults(entry, submission),
        )
    ]
    faults += _find_uncopied_environment_faults(submission)
    if faults:
        raise EchelonError(*dict.fromkeys(faults))


def _find_program_faults(
    entry: PlannedCommand, s: Submission, env: Mapping[str, str]
) -> Iterator[Fault]:
    program, *arguments = entry.launch_mode.words
    location = f"{entry.command.file}:{program.line}"
    if program.shell is None and "/" in program.text:
        if not shutil.which(s.source.folder / program.text):
            yield Fault(
                f"{location}: {program.text} is not a program", "fix the path, or chmod +x it"
            )
    elif program.shell is None and not _is_found(program.text, entry, s, env):
        hint = "fix the name, or say how the job finds it with launch.setup"
        if program.text == "python":
            hint = "write python3, or give the folder an environment, e.g. by requirements.txt"
        yield Fault(f"{location}: there is no program {program.text}", hint)
    script = arguments[0] if arguments else program
    is_python = program.text.rpartition("/")[2].startswith("python")
    names_script = script.shell is None and script.text.endswith(".py")
    if is_python and names_script and not (s.source.folder / script.text).exists():
        known = [name for name in s.source.files if name.endswith(".py")]
        hint = suggest_nearest(script.text, known) if known else "name the folder with --source DIR"
        yield Fault(f"{location}: {script.text} is not in {s.source.folder}", hint)


def _is_found(program: str, entry: PlannedCommand, s: Submission, env: Mapping[str, str]) -> bool:
    """Return whether the job will find a program, as far as can be known.

    An environment that is not built yet, or lines of launch.setup, may bring any.
    """
    if entry.config.launch.setup or (s.environment and not s.environment.ready):
        return True
    folders = [f"{s.environment.folder}/bin"] if s.environment else []
    own = next((v.text for n, v in entry.command.variables if n == "PATH"), env.get("PATH", ""))
    return shutil.which(program, path=":".join([*folders, own])) is not None


def _find_uncopied_path_faults(entry: PlannedCommand, s: Submission) -> Iterator[Fault]:
    """Yield a fault for each path of the command that is here, but will not be in the copy."""
    program, *arguments = entry.command.words
    for word in [program, *arguments] if "/" in program.text else arguments:
        path = os.path.normpath(word.text.rpartition("=")[2])
        if os.path.isabs(path) or path.startswith("..") or path in (".", _WANDB_FOLDER):
            continue
        full_path = s.source.folder / path
        if _exists(full_path) and full_path != s.folder.parent and not s.source.contains(path):
            yield _make_not_copied_fault(
                f"{entry.command.file}:{word.line}: {path}", _choose_link(path, s.source)
            )


def _find_uncopied_environment_faults(s: Submission) -> Iterator[Fault]:
    """Yield a fault for each file of the environment that the copy will not have."""
    for file in s.environment.files if s.environment else ():
        name = os.path.relpath(file, s.source.folder)
        if not s.source.contains(name):
            yield _make_not_copied_fault(name, name)


def _exists(path: Path) -> bool:
    """Return whether there is such a file; a word may be too long to be one."""
    with contextlib.suppress(OSError, ValueError):
        return path.exists()
    return False


def _choose_link(path: str, source: SourceTree) -> str:
    """Return what to link: the top folder, unless parts of it are copied."""
    top = path.partition("/")[0]
    return path if source.contains(top) else top


def _make_not_copied_fault(what: str, link: str) -> Fault:
    return Fault(
        f"{what} is in the source folder, but is not copied: git ignores it, or it is not code",
        f"add --link {link} to have it linked to, or give an absolute path",
    )
