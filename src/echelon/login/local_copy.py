"""The copy of a run on this machine: a run folder like any other, which grows with the run.

Files that grow are added to, small ones are replaced. Two commands may bring the same run up to
date at the same time: what does not fit to the file here any more is left out, and comes later.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path, PurePosixPath
from typing import Any

from echelon.config.schema import Config, build_config
from echelon.errors import EchelonError, ExitCode, Fault
from echelon.login.host.run_files import digest_tail
from echelon.runs.latest import point_latest_to
from echelon.runs.origin import CopyState, RunOrigin, read_copy_state, read_origin
from echelon.runs.run_folder import Run
from echelon.runs.slurm_queue import SlurmJobState
from echelon.runs.start_record import record_start_command
from echelon.runs.status import ACTIVE_STATES, FolderFacts, derive_statuses
from echelon.sweep.sweep_folder import SweepFolder
from echelon.utils.files import replace_file
from echelon.utils.locks import FileLock

_WRITE_TIME_EVERY_S = 30.0
_SETTLED_STATES = ("finished", "failed", "cancelled", "preempted", "pruned")


class LocalCopy:
    """One run on a cluster, and its folder here."""

    def __init__(self, run: Run) -> None:
        origin = read_origin(run)
        if origin is None:
            raise EchelonError(
                Fault(f"{run.origin_file} cannot be read", "submit the run again by its name"),
                exit=ExitCode.NOT_FOUND,
            )
        self.run = run
        self.origin = origin
        self.state = read_copy_state(run)
        self._lock = FileLock(run.folder / ".origin.lock")
        self._incoming: dict[str, bytearray] = {}
        self.new_trials: list[Run] = []
        """Of a sweep: the copies that were begun with what came."""

    def describe_known(self, with_logs: bool) -> list[Any]:
        """Return what the login node has to know of the run: its folder there, the files that are
        here and, of a sweep, the trials."""
        trials = [run.name for run in self._list_trials()]
        return [self.origin.folder, self._describe_files(with_logs), trials]

    def _list_trials(self) -> list[Run]:
        if not self.origin.is_sweep:
            return []
        sweep = SweepFolder(self.run.folder)
        return [run for run in sweep.find_trial_runs() if run.origin_file.exists()]

    def _describe_files(self, with_logs: bool) -> dict[str, list[Any]]:
        known: dict[str, list[Any]] = {}
        for name, signs in self.state.files.items():
            if name.startswith("logs/") and not with_logs:
                continue
            path = self.run.folder / name
            with contextlib.suppress(OSError):
                size = path.stat().st_size
                known[name] = [*signs, size, digest_tail(path, size)]
        return known

    def apply(self, message: Mapping[str, Any], data: bytes) -> None:
        """Carry out what the login node says of this run."""
        if "file" in message:
            self._apply_file(message, data)
        elif "trial" in message:
            self._begin_trial(str(message["trial"]), build_config(json.loads(data)))
        elif "gone" in message:
            for name in message["gone"]:
                path = self._get_path(str(name))
                path.unlink(missing_ok=True)
                self.state.files.pop(str(name), None)
        elif "states" in message:
            self.state = replace(
                self.state, states=message["states"], slurm_error=str(message["error"])
            )
            if message.get("missing"):
                self.state = replace(self.state, slurm_error="its folder is not there any more")

    def _begin_trial(self, name: str, config: Config) -> None:
        """Make the copy of a trial that a worker has begun."""
        number = name.removeprefix(f"{self.run.name}-")
        if not self.origin.is_sweep or not number.isdecimal() or name == number:
            raise self._make_name_error(name)
        run = SweepFolder(self.run.folder).get_trial_run(int(number))
        if run.origin_file.exists():
            return
        require_free_or_copy(run, self.origin.host)
        folder = str(PurePosixPath(self.origin.folder).with_name(run.name))
        origin = replace(
            self.origin,
            folder=folder,
            config=config.to_dict(),
            is_sweep=False,
            sweep=self.run.name,
        )
        _begin_folder(run, origin, config)
        self.new_trials.append(run)

    def _apply_file(self, message: Mapping[str, Any], data: bytes) -> None:
        name, offset = str(message["file"]), int(message["offset"])
        path = self._get_path(name)
        incoming = self._incoming.get(name)
        with self._lock:
            if offset == 0 or incoming is not None:
                incoming = self._incoming.setdefault(name, bytearray())
                incoming += data
                if message["last"]:
                    del self._incoming[name]
                    path.parent.mkdir(parents=True, exist_ok=True)
                    with replace_file(path) as temporary:
                        temporary.write_bytes(incoming)
            elif path.stat().st_size == offset:
                with path.open("ab") as file:
                    file.write(data)
            else:  # another command was faster
                return
        if message["last"]:
            self.state.files[name] = [int(message["size"]), int(message["changed"])]

    def _get_path(self, name: str) -> Path:
        """Return the path of a file here. A login node may write nothing but a run's own files."""
        parts = Path(name).parts
        # Of which login node it is, and by which ssh, is for this machine to say.
        own = (self.run.origin_file, self.run.start_file, self.run.annotations_file)
        is_own = name in [file.name for file in own]
        if not parts or name.startswith(("/", ".")) or ".." in parts or is_own:
            raise self._make_name_error(name)
        return self.run.folder / name

    def _make_name_error(self, name: str) -> EchelonError:
        return EchelonError(
            Fault(f"{self.origin.host} sent a file named {name!r}", "look who runs that host")
        )

    def save(self, unreachable: str = "") -> None:
        """Write how far the copy has come; with `unreachable`, why it could not go on."""
        with self._lock:
            before = read_copy_state(self.run)
            if unreachable:
                self.state = replace(before, unreachable=unreachable, is_settled=False)
            else:
                files = {**before.files, **self.state.files}
                files = {n: signs for n, signs in files.items() if (self.run.folder / n).exists()}
                self.state = replace(self.state, files=files, asked=time.time(), unreachable="")
                self.state = replace(self.state, is_settled=False)
            # A board reads the row again whenever this file changes: not for the time alone.
            is_recent = self.state.asked - before.asked < _WRITE_TIME_EVERY_S
            same = replace(self.state, asked=0.0) == replace(before, asked=0.0, is_settled=False)
            if not (same and is_recent and not before.is_settled):
                self.state.write(self.run)
            if not unreachable and self._is_over():  # as what was just written says
                self.state = replace(self.state, is_settled=True)
                self.state.write(self.run)
        self._point_latest()

    def _is_over(self) -> bool:
        if self.origin.is_sweep:  # its workers are; the trials are runs of their own
            states = [SlurmJobState(*pair[:2]) for pair in self.state.states.values() if pair]
            return not self.state.slurm_error and not any(state.is_active for state in states)
        [status], error = derive_statuses([FolderFacts.read(self.run)])
        is_over = status.state not in ACTIVE_STATES and not self.state.slurm_error
        return is_over and not error and status.state in _SETTLED_STATES

    def _point_latest(self) -> None:
        """Give it the name `latest` once it has trained, unless a later run has."""
        facts = FolderFacts.read(self.run)
        if not facts.has_trained:
            return
        link = self.run.folder.with_name("latest")
        with contextlib.suppress(OSError):
            if link.exists() and link.resolve() != self.run.folder.resolve():
                if FolderFacts.read(Run(link.resolve())).started >= facts.started:
                    return
            elif link.exists():
                return
            point_latest_to(self.run)


def create_copy(run: Run, origin: RunOrigin, config: Config) -> LocalCopy:
    """Make the folder of a run that was submitted, with what is known of it here."""
    _begin_folder(run, origin, config)
    record_start_command(run, config)
    return LocalCopy(run)


def create_sweep_copy(sweep: SweepFolder, origin: RunOrigin) -> LocalCopy:
    """Make a copy of the folder of a sweep, whose file and settings are here already."""
    run = Run(sweep.folder)
    origin.write(run)
    CopyState(read_copy_state(run).files, {}).write(run)
    return LocalCopy(run)


def _begin_folder(run: Run, origin: RunOrigin, config: Config) -> None:
    run.logs_folder.mkdir(parents=True, exist_ok=True)
    run.write_config(config)
    origin.write(run)
    CopyState(read_copy_state(run).files, {}).write(run)


def require_free_or_copy(run: Run, host: str, folder: str | None = None) -> None:
    """Raise a fault if a run of that name is here that is not a copy of one on this cluster."""
    if not run.folder.exists() or not any(run.folder.iterdir()):
        return
    origin = read_origin(run)
    if origin is None or origin.host != host:
        where = f"a run on {origin.host}" if origin else "a run of this machine"
        raise EchelonError(
            Fault(
                f"run.name={run.name}: {run.folder} is {where}, not one on {host}",
                "choose another run.name",
            )
        )
