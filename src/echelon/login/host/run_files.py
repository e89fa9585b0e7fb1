"""What of a run's folder is sent to the laptop: files that changed, and of logs what was added."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from echelon.login.frames import MAX_DATA_BYTES, send_frame
from echelon.login.host.slurm_cache import read_job_states
from echelon.login.host.sweep_files import is_sweep, read_trial_configs
from echelon.runs.run_folder import CONFIG_FILE, Run
from echelon.runs.status import FolderFacts

TAIL_BYTES = 4096
"""How much of the end of a copy is compared before the rest is added to it: a resumed run cuts its
metrics back to its snapshot."""
_GROWING_SUFFIXES = (".jsonl", ".log", ".stamps", ".txt")
_FOLDERS = ("logs", "media", "leases")
_LARGEST_SMALL_FILE = 16 << 20
"""A larger file at the top of a run's folder is not one of Echelon's records."""
_NOT_SENT = {
    *("config.json", "start.json", "annotations.json", "archived", "words", "origin.json"),
    *("sweep.json", "sweep.yml", "workers.sh"),
}
"""What the copy has of its own: the settings and the command as they were typed, notes and tags; of
a sweep, its file."""


def digest_tail(path: Path, size: int) -> str:
    """Return the digest of the last bytes of the first `size` bytes of a file; empty without it."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, size - TAIL_BYTES))
            return hashlib.sha256(file.read(min(size, TAIL_BYTES))).hexdigest()
    except OSError:
        return ""


class SentFiles:
    """The files of one run, as the laptop has them by now."""

    def __init__(
        self, folder: Path, known: dict[str, list[Any]], trials: Sequence[str] = ()
    ) -> None:
        self.run = Run(folder)
        self.is_sweep = is_sweep(folder)
        self._trials = set(trials)
        """Of a sweep: the trials that the laptop has copies of."""
        self._known = known
        """Name → size and time of change when it was sent, its size here and, of a file that grows,
        the digest of its end."""

    def send_changes(self, stream: BinaryIO, with_logs: bool) -> bool:
        """Send what changed; returns whether anything did."""
        # What is at the top says that a run is over. It is listed first and sent last, so that all
        # logs are there when that arrives.
        top = dict(self._list_files(""))
        below: dict[str, tuple[int, int]] = {}
        for folder in _FOLDERS:
            if with_logs or folder != "logs":
                below |= dict(self._list_files(folder))
        found = below | top
        changed = False
        for name, (size, changed_ns) in found.items():
            known = self._known.get(name)
            if known is not None and known[:2] == [size, changed_ns]:
                continue
            sent = self._send_file(stream, name, size, changed_ns, known)
            if sent is not None:
                self._known[name] = sent
                changed = True
        shown = [n for n in self._known if with_logs or not n.startswith("logs/")]
        gone = [name for name in shown if name not in found and not self._is_there(name)]
        if gone:
            for name in gone:
                del self._known[name]
            send_frame(stream, {"gone": gone, "folder": str(self.run.folder)})
        return self._send_trials(stream) or changed or bool(gone)

    def _send_trials(self, stream: BinaryIO) -> bool:
        """Send the trials of a sweep that are new; they are runs of their own beside it."""
        configs = read_trial_configs(self.run.folder, self._trials) if self.is_sweep else {}
        for name, config in configs.items():
            text = json.dumps(config).encode()
            send_frame(stream, {"trial": name, "folder": str(self.run.folder)}, text)
        self._trials |= configs.keys()
        return bool(configs)

    def _list_files(self, folder: str) -> Iterator[tuple[str, tuple[int, int]]]:
        for path in _walk(self.run.folder / folder, bool(folder)):
            name = str(path.relative_to(self.run.folder))
            with contextlib.suppress(OSError):
                status = path.stat()
                is_small = folder or status.st_size <= _LARGEST_SMALL_FILE
                if is_small or name.endswith(_GROWING_SUFFIXES):
                    yield name, (status.st_size, status.st_mtime_ns)

    def _send_file(
        self, stream: BinaryIO, name: str, size: int, changed_ns: int, known: list[Any] | None
    ) -> list[Any] | None:
        """Send a file from where the copy ends, or whole; returns what is known of it then."""
        path, start = self.run.folder / name, 0
        if known is not None and name.endswith(_GROWING_SUFFIXES):
            here = int(known[2])
            if 0 < here <= size and digest_tail(path, here) == known[3]:
                start = here
        message = {"file": name, "folder": str(self.run.folder), "changed": changed_ns}
        try:
            with path.open("rb") as file:
                file.seek(start)
                at = start
                while True:
                    data = file.read(min(MAX_DATA_BYTES, size - at))
                    is_last = at + len(data) >= size or not data
                    # Whoever reads it there sees an old file or a new one, never a part of one.
                    send_frame(
                        stream, message | {"offset": at, "last": is_last, "size": size}, data
                    )
                    at += len(data)
                    if is_last:
                        break
        except OSError:
            return None  # gone since it was listed
        tail = digest_tail(path, at) if name.endswith(_GROWING_SUFFIXES) else ""
        return [size, changed_ns, at, tail]

    def _is_there(self, name: str) -> bool:
        return os.path.lexists(self.run.folder / name)


def _walk(folder: Path, deep: bool) -> Iterator[Path]:
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        for entry in sorted(entries, key=lambda e: e.name):
            if entry.name.startswith(".") or (not deep and _is_own(folder, entry.name)):
                continue
            if entry.is_file(follow_symlinks=False):
                yield Path(entry.path)
            elif deep and entry.is_dir(follow_symlinks=False):
                yield from _walk(Path(entry.path), deep)


def _is_own(folder: Path, name: str) -> bool:
    """Return whether the copy has this file of its own. Where a command's training has become the
    run, its settings are known there alone."""
    return name in _NOT_SENT and not (name == CONFIG_FILE and Run(folder).command_file.exists())


def send_states(stream: BinaryIO, state_folder: Path, files: Sequence[SentFiles]) -> None:
    """Send what Slurm says of the jobs of these runs and sweeps, and which of them are over."""
    facts = [FolderFacts.read(each.run) for each in files if not each.is_sweep]
    asked_of = [f.job for f in facts if f.job and f.exit_code is None]
    sweeps = {each.run: each.run.read_job_id() for each in files if each.is_sweep}
    answer = read_job_states(state_folder, [*asked_of, *filter(None, sweeps.values())])
    for run, job in sweeps.items():
        states = {k: state for k, state in answer["states"].items() if k.partition("_")[0] == job}
        error = answer["error"]
        if not states and _is_newer(run, answer):
            error = error or _NOT_ASKED
        frame = {"states": states, "folder": str(run.folder), "error": error}
        send_frame(stream, frame | {"missing": not run.folder.is_dir()})
    for fact in facts:
        state = answer["states"].get(fact.job)
        error = answer["error"]
        if fact.job and state is None and fact.exit_code is None and _is_newer(fact.run, answer):
            error = error or _NOT_ASKED
        send_frame(
            stream,
            {
                "states": {fact.job: state} if fact.job and state else {},
                "folder": str(fact.run.folder),
                "error": error,
                "missing": not fact.run.folder.is_dir(),
            },
        )


_NOT_ASKED = "it was not asked since the job was submitted"


def _is_newer(run: Run, answer: dict[str, Any]) -> bool:
    """Return whether the job may be younger than Slurm's answer."""
    with contextlib.suppress(OSError):
        return run.job_id_file.stat().st_mtime + 1 > float(answer["asked"])
    return True
