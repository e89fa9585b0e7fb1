"""Command files: what stands in one, by the rules of a shell, without ever asking a shell."""

from __future__ import annotations

import shlex
from pathlib import Path

from echelon.errors import EchelonError, Exit, Fault, nearest
from echelon.submit.words import Bad, Command, Reader
from echelon.utils.os_errors import describe_os_error

DEFAULT_FILE = "experiment_configurations.txt"


_LARGEST = 64 << 20
"""A device or a pipe may have no end."""


def read(file: Path) -> list[Command]:
    """All commands of a file, or one EchelonError with every fault in it."""
    return parse(_text(file), str(file))


def _text(file: Path) -> str:
    try:
        with file.open("rb") as opened:
            data = opened.read(_LARGEST + 1)
    except IsADirectoryError:
        raise EchelonError(
            Fault(f"--configs {file} is a folder", f"name a file in it: --configs {file}/FILE")
        ) from None
    except FileNotFoundError:
        raise _missing(file) from None
    except OSError as error:
        why = describe_os_error(error)
        raise EchelonError(
            Fault(f"{file} cannot be read: {why}", "see its owner and mode")
        ) from None
    if len(data) > _LARGEST:
        raise EchelonError(
            Fault(
                f"{file} is larger than {_LARGEST >> 20} MB, too much to be typed",
                "give a file of commands, one a line",
            )
        )
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError:
        text = "\0"
    if "\0" in text:
        raise EchelonError(
            Fault(f"{file} is no text file", "give a file of commands, one a line, in UTF-8")
        )
    return text


def _missing(file: Path) -> EchelonError:
    folder = file.parent
    known = [p.name for p in folder.iterdir() if p.is_file()] if folder.is_dir() else []
    hint = nearest(file.name, known) if known else f"there is no file in {folder.absolute()}"
    return EchelonError(Fault(f"there is no command file {file}", hint), exit=Exit.NOT_FOUND)


def parse(text: str, file: str) -> list[Command]:
    reader = Reader(text, file)
    commands, faults = [], []
    while not reader.at_end:
        try:
            if command := reader.command():
                commands.append(command)
        except Bad as bad:
            faults.append(Fault(f"{file}:{bad.line}: {bad.what}", bad.do))
            reader.skip_command()
    if not commands and not faults:
        faults.append(
            Fault(f"{file}: there is no command in it", "write one a line: python main.py --train")
        )
    if faults:
        raise EchelonError(*faults)
    return commands


def quote(words: list[str]) -> str:
    """A line of a command file that gives a program exactly these words."""
    return shlex.join(words)
