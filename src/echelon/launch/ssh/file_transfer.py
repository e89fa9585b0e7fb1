"""Hosts that do not share the run folder: code and configuration go there, results come back."""

from __future__ import annotations

import contextlib
import os
import subprocess
import tarfile
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from echelon.config.schema import Config, LaunchConfig
from echelon.errors import EchelonError, Fault
from echelon.hosts.ask import join_last_lines
from echelon.launch.ssh import remote_command
from echelon.launch.ssh.host_check import find_experiment_file
from echelon.runs.run_folder import Run
from echelon.snapshot.layout import list_snapshots
from echelon.utils.ignore import is_ignored
from echelon.utils.os_errors import format_os_error_reason
from echelon.utils.text import format_bytes

_MAX_CODE_BYTES = 100_000_000
_SENT_SNAPSHOTS = 2
"""The newest, and one more in case it is damaged."""
_SET_ASIDE_SCRIPT = 'mv "$0" "$0.$1" 2>/dev/null; true'
_RECEIVE_SCRIPT = """umask g-w,o-w && mkdir -p "$0/logs" && rm -rf "$0/code-$1" &&
tar -xof - -C "$0" --keep-newer-files &&
mv -f "$0/.config-$1" "$0/config.json"
"""
"""Hosts may share the folder with each other, so each has its own names until the last, atomic
move. What a run wrote there after its launcher was killed never came back, and is newer. Code that
a group may write would not be trusted (runs/trusted_code.py)."""
_SEND_BACK_SCRIPT = (
    """tar -cf - -C "$0" --exclude './code-*' --exclude './.*' --exclude ./config.json "$1" """
)


class RemoteRunFolder(NamedTuple):
    """The run's folder on one host that does not share it."""

    launch: LaunchConfig
    host: str
    node: int
    run: Run
    first_line: bytes
    """What a command there reads before anything else: its variables."""

    def make_script_argv(self, script: str, word: str) -> list[str]:
        """Return the ssh command that runs a shell script with the folder as $0 and a word as
        $1."""
        words = ["sh", "-c", script, str(self.run.folder), word]
        return remote_command.make_argv(self.launch, self.host, ("/", "/"), words)


def find_code_folder(config: Config) -> Path | None:
    """Return the folder that a host needs beside Echelon: that of the experiment's file, else the
    working directory; None for a bundled experiment."""
    if file := find_experiment_file(config):
        return Path(file).parent
    ours = str(config.experiment.get("entry", "")).startswith("echelon.")
    return None if ours else Path.cwd()


def list_code_files(config: Config, run: Run) -> dict[str, Path]:
    """All files of that folder that are worth sending, by their relative names.

    Raises an EchelonError when they are more than should be sent.
    """
    folder = find_code_folder(config)
    code_files: dict[str, Path] = {}
    sizes = Counter[str]()
    for path in _walk_code(folder, run.folder.parent) if folder else ():
        name = path.relative_to(folder or "")
        code_files[str(name)] = path
        sizes[name.parts[0]] += path.lstat().st_size
        if sizes.total() > 10 * _MAX_CODE_BYTES:
            break
    if sizes.total() > _MAX_CODE_BYTES:
        big = ", ".join(f"{name} ({format_bytes(size)})" for name, size in sizes.most_common(3))
        raise EchelonError(
            Fault(
                f"the code in {folder} would be sent to hosts that do not share it, and is more "
                f"than {format_bytes(_MAX_CODE_BYTES)}: {big}",
                "keep data elsewhere, or use a run.dir that all hosts share",
            )
        )
    return code_files


def _walk_code(folder: Path, runs: Path) -> Iterator[Path]:
    """The files below a folder, without caches, environments and runs."""
    for folder_path, folders, files in os.walk(folder):
        parent = Path(folder_path)
        folders[:] = [f for f in folders if parent / f != runs and not is_ignored(parent / f)]
        links = [f for f in folders if (parent / f).is_symlink()]
        yield from (parent / name for name in (*files, *links) if not name.endswith(".pyc"))


def set_aside_old_run(remote: RemoteRunFolder, suffix: str) -> None:
    """Rename a folder of the same name on a host; it belongs to another run.

    This is done on all hosts before anything is sent, because hosts may share the folder with each
    other.
    """
    command = remote.make_script_argv(_SET_ASIDE_SCRIPT, suffix)
    subprocess.run(command, input=remote.first_line, capture_output=True)


def send_files(remote: RemoteRunFolder, code: Mapping[str, Path]) -> Fault | None:
    """Send code, configuration and, to the first node, the history of the run; returns the fault,
    if any."""
    command = remote.make_script_argv(_RECEIVE_SCRIPT, str(remote.node))
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdin is not None
    try:
        process.stdin.write(remote.first_line)
        with tarfile.open(fileobj=process.stdin, mode="w|") as tar:
            tar.add(remote.run.config_file, f".config-{remote.node}")
            for path in _list_files_to_resume(remote.run) if remote.node == 0 else ():
                tar.add(path, str(path.relative_to(remote.run.folder)))
            for name, path in code.items():
                tar.add(path, f"code-{remote.node}/{name}", recursive=False)
    except BrokenPipeError:
        pass  # the far end has printed why
    except OSError as error:  # half of the code must not pass for all of it
        process.kill()
        process.communicate()
        return Fault(
            f"{error.filename} cannot be read, so it cannot be sent to {remote.host}: "
            f"{format_os_error_reason(error)}",
            "make it readable, or move it out of the folder of the experiment",
        )
    error_output = process.communicate()[1].decode(errors="replace")
    if process.returncode == 0:
        return None
    return Fault(
        f"the code could not be sent to {remote.host}: {join_last_lines(error_output)}",
        f"look whether {remote.run.folder} can be written there",
    )


def _list_files_to_resume(run: Run) -> Iterator[Path]:
    """What a run that is continued needs: status, history, metrics, logs and its newest
    snapshots."""
    small = (run.status_file, run.history_file, run.summary_file)
    yield from (p for p in (*small, run.metrics_file, run.logs_folder) if p.exists())
    yield from list_snapshots(run.snapshots_folder, ignore_errors=True)[-_SENT_SNAPSHOTS:]


def fetch_results(remote: RemoteRunFolder) -> str:
    """Bring back what the run made on a host; returns why that failed, or "".

    The newer file wins: a host may have old logs of a node that another one has now.
    """
    command = remote.make_script_argv(_SEND_BACK_SCRIPT, "./logs" if remote.node else ".")
    take = ["tar", "-xof", "-", "-C", str(remote.run.folder), "--keep-newer-files"]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe) as sender:
        assert sender.stdin is not None
        assert sender.stderr is not None
        with contextlib.suppress(OSError):  # the far end prints why
            sender.stdin.write(remote.first_line)
            sender.stdin.close()
        receiver = subprocess.run(take, stdin=sender.stdout, capture_output=True)
        error_output = sender.stderr.read()
    if sender.returncode or receiver.returncode:
        return (
            join_last_lines((error_output + receiver.stderr).decode(errors="replace"))
            or "no answer"
        )
    return ""
