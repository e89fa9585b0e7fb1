"""Entries of ssh's configuration: found, or appended where there is none, but never changed."""

from __future__ import annotations

import glob
import os
import pwd
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from echelon.config.validate import is_safe_host
from echelon.errors import EchelonError, Fault
from echelon.utils.files import replace_file
from echelon.utils.os_errors import format_os_error_reason

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]*")
_WITH_PORT = re.compile(r"(.*@)?([^@:]+|\[[^\]]+\]):(\d+)")
_LINE = re.compile(r"\s*(\w+)(?:\s*=\s*|\s+)(.*)")
_MAX_INCLUDE_DEPTH = 16
"""The same limit as in ssh."""


def find_home_folder() -> Path:
    """Return the home folder as ssh finds it: from the password database, not from HOME."""
    try:
        return Path(pwd.getpwuid(os.getuid()).pw_dir)
    except KeyError:
        raise EchelonError(
            Fault(f"the user {os.getuid()} has no entry in /etc/passwd, which ssh needs", "add one")
        ) from None


@dataclass(frozen=True)
class SshConfigEntry:
    """A ``Host`` block of ssh's configuration."""

    alias: str
    host: str
    user: str | None
    port: int | None
    key: Path

    def render(self) -> str:
        """Return the lines of the block."""
        lines = [f"Host {self.alias}", f"    HostName {self.host}"]
        lines += [f"    User {self.user}"] if self.user else []
        lines += [f"    Port {self.port}"] if self.port else []
        lines += [f'    IdentityFile "{self.key}"', "    IdentitiesOnly yes"]
        return "\n".join(lines) + "\n"


def make_entry_from_options(
    host: str, user: str | None, port: int | None, alias: str | None, key: Path
) -> SshConfigEntry:
    """Return the entry for what was typed; raise all its faults at once.

    The words become lines that ssh executes, so they are restricted to safe characters.
    """
    faults = []
    if with_port := _WITH_PORT.fullmatch(host):
        host, typed = f"{with_port[1] or ''}{with_port[2]}", int(with_port[3])
        if port not in (None, typed):
            faults.append(Fault(f"{host}:{typed} and --port {port} are two ports", "leave one out"))
        port = typed
    if not is_safe_host(host):
        faults.append(
            Fault(
                f"{host!r} is not a name or address of a host", "give HOST, USER@HOST or HOST:PORT"
            )
        )
    at_user, _, name = host.rpartition("@")
    if at_user and user and at_user != user:
        faults.append(Fault(f"{host} and --user {user} name two users", "leave one out"))
    user = user or at_user or None
    if user is not None and not _NAME.fullmatch(user):
        faults.append(
            Fault(f"--user {user!r} is not a name of a user", "use letters, digits and ._-")
        )
    if port is not None and not 0 < port < 65_536:
        faults.append(Fault(f"--port {port} is not a port", "give one from 1 to 65535"))
    name = name.strip("[]")
    alias = alias or name.replace(":", "-")
    if not faults and not _NAME.fullmatch(alias):
        faults.append(
            Fault(f"--name {alias!r} is not a name for a host", "use letters, digits and ._-")
        )
    if re.search(r"[\"%\n\r\0$]", str(key)):
        hint = 'give a path without " % $ and line breaks'
        faults.append(Fault(f"--key {str(key)!r} cannot be written into ssh's configuration", hint))
    if faults:
        raise EchelonError(*faults)
    return SshConfigEntry(alias, name, user, port, key)


def find_entry(config: Path, alias: str) -> str | None:
    """Return the block that names a host, here or in an included file; None if there is none."""
    for file in _iter_config_files(config):
        lines = _read_lines(file)
        for number, line in enumerate(lines):
            if alias in _get_keyword_arguments(line, "host"):
                end = next(
                    (i for i in range(number + 1, len(lines)) if _starts_block(lines[i])), None
                )
                return f"# {file}\n" + "\n".join(lines[number:end]).rstrip() + "\n"
    return None


def _starts_block(line: str) -> bool:
    """Return whether a line ends the block before it."""
    return bool(_get_keyword_arguments(line, "host") or _get_keyword_arguments(line, "match"))


def _get_keyword_arguments(line: str, keyword: str) -> list[str]:
    """Return what follows a keyword; empty if the line has another keyword."""
    match = _LINE.fullmatch(line)
    return match[2].replace('"', "").split() if match and match[1].lower() == keyword else []


def _read_lines(file: Path) -> list[str]:
    try:
        return file.read_text(errors="replace", encoding="utf-8").splitlines()
    except FileNotFoundError:
        return []
    except OSError as error:
        raise EchelonError(
            Fault(
                f"{file} cannot be read: {format_os_error_reason(error)}",
                "make it readable, or give another with --config FILE",
            )
        ) from None


def _iter_config_files(config: Path, depth: int = 0) -> Iterator[Path]:
    """Yield a configuration file and the files that it includes."""
    yield config
    if depth == _MAX_INCLUDE_DEPTH:
        return
    for line in _read_lines(config):
        for pattern in _get_keyword_arguments(line, "include"):
            # Relative to ~/.ssh, wherever the including file is.
            path = find_home_folder() / ".ssh" / re.sub(r"^~/", f"{find_home_folder()}/", pattern)
            for file in sorted(glob.glob(str(path))):
                yield from _iter_config_files(Path(file), depth + 1)


def append_to_config(config: Path, text: str) -> None:
    """Append a block. ssh sees the old file or the new one, never a part.

    A symbolic link stays one, and an existing file keeps its mode.
    """
    real = Path(os.path.realpath(config))
    try:
        make_private_folder(real.parent)
        before = real.read_bytes() if real.exists() else b""
        gap = b"" if not before else b"\n" if before.endswith(b"\n") else b"\n\n"
        mode = real.stat().st_mode & 0o777 if real.exists() else 0o600
        with replace_file(real, durable=True) as temporary:
            temporary.touch(0o600)  # readable by nobody else before it has its own mode
            temporary.write_bytes(before + gap + text.encode())
            temporary.chmod(mode)
    except OSError as error:
        reason = format_os_error_reason(error)
        raise EchelonError(
            Fault(f"{config} cannot be written: {reason}", "put the entry there by hand")
        ) from None


def make_private_folder(folder: Path) -> None:
    """Make a folder that only its owner can read, as ssh requires; leave an existing one."""
    if not folder.exists():
        folder.mkdir(parents=True, mode=0o700)
