"""Command files: read by the rules of a shell, but never run by one."""

from __future__ import annotations

import shlex
from pathlib import Path

from echelon.errors import EchelonError, ExitCode, Fault, suggest_nearest
from echelon.submission.shell_syntax import CommandReader, CommandSyntaxError, ShellCommand
from echelon.utils.os_errors import format_os_error_reason

DEFAULT_FILE = "experiment_configurations.txt"
_MAX_BYTES = 64 << 20
"""So much is read at most: a device or a pipe may have no end."""


def read_commands(file: Path) -> list[ShellCommand]:
    """Return all commands of a file, or raise one EchelonError with every fault in it."""
    return parse_commands(_read_text(file), str(file))


def _read_text(file: Path) -> str:
    try:
        with file.open("rb") as stream:
            data = stream.read(_MAX_BYTES + 1)
    except IsADirectoryError:
        raise EchelonError(
            Fault(f"--configs {file} is a folder", f"name a file in it: --configs {file}/FILE")
        ) from None
    except FileNotFoundError:
        raise _make_missing_file_error(file) from None
    except OSError as error:
        reason = format_os_error_reason(error)
        raise EchelonError(
            Fault(f"{file} cannot be read: {reason}", "see its owner and mode")
        ) from None
    if len(data) > _MAX_BYTES:
        raise EchelonError(
            Fault(
                f"{file} is larger than {_MAX_BYTES >> 20} MB, too much to be typed",
                "give a file of commands, one a line",
            )
        )
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError:
        text = "\0"
    if "\0" in text:
        raise EchelonError(
            Fault(f"{file} is not a text file", "give a file of commands, one a line, in UTF-8")
        )
    return text


def _make_missing_file_error(file: Path) -> EchelonError:
    folder = file.parent
    known = [p.name for p in folder.iterdir() if p.is_file()] if folder.is_dir() else []
    hint = (
        suggest_nearest(file.name, known) if known else f"there is no file in {folder.absolute()}"
    )
    return EchelonError(Fault(f"there is no command file {file}", hint), exit=ExitCode.NOT_FOUND)


def parse_commands(text: str, file: str) -> list[ShellCommand]:
    """Return all commands of a text; `file` is its name in faults."""
    reader = CommandReader(text, file)
    commands, faults = [], []
    while not reader.is_at_end:
        try:
            if command := reader.read_command():
                commands.append(command)
        except CommandSyntaxError as error:
            faults.append(Fault(f"{file}:{error.line}: {error.problem}", error.remedy))
            reader.skip_command()
    if not commands and not faults:
        faults.append(
            Fault(f"{file}: there is no command in it", "write one a line: python main.py --train")
        )
    if faults:
        raise EchelonError(*faults)
    return commands


def quote_words(words: list[str]) -> str:
    """Return the line of a command file that gives a program exactly these words."""
    return shlex.join(words)
