"""One submission, carried out once, whatever becomes of the connection that asked for it.

The laptop has given it an id. It is carried out by a process of its own session, which goes on when
the connection is lost, and what came of it is in `.echelon/submissions/ID.json`. Whoever asks for
the same id again is told that, or waits for that process, or has the submission finished.
"""

from __future__ import annotations

import contextlib
import io
import os
import shutil
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from echelon.config.schema import Config, build_config
from echelon.errors import EchelonError, ExitCode, Fault
from echelon.launch.containers.check import require_container_for_jobs
from echelon.launch.launcher import LaunchServices, read_launch_secrets, require_no_writer
from echelon.launch.plan import LocalMachine
from echelon.launch.registry import make_launcher
from echelon.launch.slurm.batch_script import ScriptEnvironment, render_script
from echelon.launch.slurm.job_array import group_alike, plan_arrays, queue_array
from echelon.launch.slurm.launcher import complete_array_configs
from echelon.launch.slurm.sbatch import find_in_queue, queue_run, require_sbatch
from echelon.login.host.detached import start_detached
from echelon.login.host.source_store import SourceStore
from echelon.notify.registry import require_channels
from echelon.runs.run_folder import Run
from echelon.utils.files import read_json_object, write_json_atomically
from echelon.utils.locks import FileLock

_WAIT_S = 600.0
_KEPT_S = 60 * 86400.0
"""How long it is remembered what became of a submission."""


class OnceOnly(Protocol):
    """What a laptop asks for once."""

    @property
    def id(self) -> str:
        """The id that the laptop gave it."""

    def carry_out(self, store: SourceStore, files: SubmissionFiles) -> dict[str, Any]:
        """Submit it, or find out that an earlier process did before it was killed; returns
        `{runs: …}`, or `{faults, exit}` with nothing queued and nothing left. Where Slurm has taken
        some jobs and then refused one, `{runs: …, refused: {faults, exit}}`."""


@dataclass(frozen=True)
class RunRequest:
    """Runs that the laptop asks for."""

    id: str
    digest: str
    """Of the source tree."""
    configs: Sequence[dict[str, Any]]
    work_lines: Sequence[str] | None = None
    """Of commands that each have a copy of the source as their working folder: the lines that enter
    their environment. None of runs that share the source."""
    call: Mapping[str, Any] | None = None
    """The function that the only run calls, with its arguments."""

    def make_environment(self, tree: Path) -> ScriptEnvironment | None:
        """Return what a batch script adds to such a command. The files of a tree are read-only."""
        if self.work_lines is None:
            return None
        return ScriptEnvironment(tree, ("chmod -R u+w .", *self.work_lines))

    def carry_out(self, store: SourceStore, files: SubmissionFiles) -> dict[str, Any]:
        """Submit the runs, or find out that an earlier process did before it was killed."""
        configs = [build_config(config) for config in self.configs]
        groups = list(_split_by_sbatch_call(configs))
        runs = [Run.from_config(config) for config in configs]
        had_folder = {run.folder: run.folder.exists() for run in runs}
        printed = io.StringIO()
        queued: list[Sequence[Config]] = []
        try:
            tree = store.get_tree(self.digest)
            environment = self.make_environment(tree)
            os.chdir(tree)
            queued += [group for group in groups if _take_over_earlier_job(group, files)]
            unsubmitted = [group for group in groups if group not in queued]
            with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
                left = [complete_array_configs(group) for group in unsubmitted]
                for group in left:
                    _check(group, is_new=environment is not None)
                for run in runs if left else ():
                    store.point_code_link(run.name, tree)
                if left and not files.begun.exists():  # its time says which jobs are of this id
                    files.begun.touch()
                if left and self.call is not None:
                    runs[0].folder.mkdir(parents=True)
                    write_json_atomically(runs[0].call_file, dict(self.call), names_code=True)
                for group in left:
                    _start(group, environment)
                    queued.append(group)
        except (EchelonError, OSError) as error:
            _remove_unsubmitted(runs, had_folder, store)
            if queued:
                there = [Run.from_config(config) for group in queued for config in group]
                refused = {"refused": describe_error(error)}
                return _describe_result(there, printed.getvalue()) | refused
            return describe_error(error)
        return _describe_result(runs, printed.getvalue())


def submit_once(store: SourceStore, submission: OnceOnly) -> dict[str, Any]:
    """Return what became of a submission: `{runs: [{name, folder, job}], …}` or `{faults, exit}`.

    A submission that failed has queued nothing, and may be asked for again. `{unknown: true}` means
    that the process which carried it out was killed: the same id again finds out what became of it.
    """
    files = SubmissionFiles(store.folder, submission.id)
    files.folder.mkdir(parents=True, exist_ok=True)
    _remove_old(files.folder)
    if not _is_done(files.read_result()):
        _carry_out_in_own_session(store, submission, files)
    result = files.read_result()
    if result is None:  # the process was ended in the middle; what it began is found next time
        return {"unknown": True}
    if not _is_done(result):
        files.remove()
    return result


def read_submission(store: SourceStore, submission_id: str) -> dict[str, Any] | None:
    """Return what became of an earlier submission; None if nothing of it is known."""
    files = SubmissionFiles(store.folder, submission_id)
    _wait_for_lock(files)
    result = files.read_result()
    return result if _is_done(result) else None


class SubmissionFiles:
    """The files of one submission."""

    def __init__(self, state_folder: Path, submission_id: str) -> None:
        if not submission_id.isalnum():
            raise ValueError(f"{submission_id!r} is no id of a submission")
        self.folder = state_folder / "submissions"
        self.result = self.folder / f"{submission_id}.json"
        self.begun = self.folder / f"{submission_id}.begun"
        """Made just before anything is written for the runs."""
        self.lock = self.folder / f"{submission_id}.lock"

    def read_result(self) -> dict[str, Any] | None:
        """Return the result, or None while there is none."""
        return read_json_object(self.result)

    def remove(self) -> None:
        """Remove all of them."""
        for file in (self.result, self.begun, self.lock):
            file.unlink(missing_ok=True)


def _is_done(result: Mapping[str, Any] | None) -> bool:
    return bool(result and result.get("runs"))


def _remove_old(folder: Path) -> None:
    for file in folder.iterdir():
        with contextlib.suppress(OSError):
            if time.time() - file.stat().st_mtime > _KEPT_S:
                file.unlink()


def _wait_for_lock(files: SubmissionFiles) -> None:
    """Wait for a process that works on the submission, if there is one."""
    deadline = time.monotonic() + _WAIT_S
    if not files.lock.exists():
        return
    lock = FileLock(files.lock)
    while not lock.try_acquire():
        if time.monotonic() > deadline:
            raise EchelonError(
                Fault(
                    "another submission of the same command is still at work",
                    "look at `squeue` there, or type the command again later",
                )
            )
        time.sleep(0.1)
    lock.release()


def _carry_out_in_own_session(
    store: SourceStore, submission: OnceOnly, files: SubmissionFiles
) -> None:
    """Fork a process that no lost connection ends, and wait for it."""

    def carry_out() -> None:
        try:
            with FileLock(files.lock):
                if not _is_done(files.read_result()):
                    write_json_atomically(files.result, submission.carry_out(store, files))
        except BaseException:
            text = traceback.format_exc()
            write_json_atomically(files.result, {"faults": [[text, _BUG_HINT]], "exit": 1})

    os.waitpid(start_detached(carry_out), 0)
    _wait_for_lock(files)


JOB_PYTHON = "{python of the jobs}"
"""A word of a program that stands for it, as long as only the login node knows it."""
_BUG_HINT = "this is an error of Echelon's: please report it"


def _split_by_sbatch_call(configs: Sequence[Config]) -> Iterator[Sequence[Config]]:
    """Yield the runs of each call of sbatch: one alone, or an array that the cluster takes."""
    for group in group_alike(configs):
        if len(group) == 1:
            yield group
        else:
            yield from (array.configs for array in plan_arrays(group))


def _check(group: Sequence[Config], is_new: bool) -> None:
    """Raise what keeps runs from being submitted, before anything is written. They differ in
    settings of the training alone, so one of them is asked about."""
    taken = [config for config in group if Run.from_config(config).folder.exists()]
    if is_new and taken:
        raise EchelonError(
            Fault(
                f"{Run.from_config(taken[0]).folder} is there already, and each command of a file "
                "is a new run",
                "give another name with --name",
            )
        )
    launcher = make_launcher(group[0])
    launcher.complete_config(group[0], False)
    if group[0].notify.to:
        require_channels(group[0].notify, os.environ | read_launch_secrets(group[0], False))
    plan = launcher.plan(group[0], _describe_machine())
    if faults := launcher.find_config_faults(group[0], plan, _describe_machine()):
        raise EchelonError(*faults)
    if len(group) == 1:
        launcher.check(group[0], plan, _NO_SERVICES)
        return
    # An array is one question to the controller: where sbatch refuses it, its folders go again.
    require_sbatch()
    require_container_for_jobs(group[0])
    for config in group:
        require_no_writer(config)


def _start(group: Sequence[Config], environment: ScriptEnvironment | None) -> None:
    """Queue one run, or an array of several."""
    if len(group) > 1:
        for array in plan_arrays(group, environment):
            queue_array(array)
        return
    [config] = group
    queue_run(config, render_script(config, Run.from_config(config), environment))


def _describe_machine() -> LocalMachine:
    return LocalMachine(os.environ, os.uname().nodename, 0)


def _not_here(*_: Any) -> int:
    raise AssertionError("a login node only queues jobs")


_NO_SERVICES = LaunchServices(_not_here, _not_here, _not_here, _not_here)


def _take_over_earlier_job(group: Sequence[Config], files: SubmissionFiles) -> bool:
    """Return whether an earlier process has queued these runs for this submission, and write down
    their jobs if it was killed before it could.

    It may have been killed between sbatch's answer and the record of it, and the job may be over
    by now. So the folder is asked, into which the job writes its number, and then the queue.
    """
    try:
        begun = files.begun.stat().st_mtime
    except FileNotFoundError:
        return False
    runs = [Run.from_config(config) for config in group]
    if _has_job_since(runs[0], begun):
        return True
    job = find_in_queue(runs[0].name, begun)
    if job is None:
        return False
    for index, run in enumerate(runs):
        number = job if len(runs) == 1 else f"{job}_{index}"
        run.job_id_file.write_text(f"{number}\n", encoding="utf-8")
    return True


def _has_job_since(run: Run, begun: float) -> bool:
    with contextlib.suppress(OSError):
        return run.job_id_file.stat().st_mtime >= begun and bool(run.read_job_id())
    return False


def _remove_unsubmitted(
    runs: Sequence[Run], had_folder: Mapping[Path, bool], store: SourceStore
) -> None:
    """Remove the folders that this submission has made, where no job was queued."""
    for run in runs:
        if not had_folder[run.folder] and not run.read_job_id():
            shutil.rmtree(run.folder, ignore_errors=True)
            store.get_code_link(run.name).unlink(missing_ok=True)


def _describe_result(runs: Sequence[Run], text: str) -> dict[str, Any]:
    described = [
        {"name": run.name, "folder": str(run.folder), "job": run.read_job_id()} for run in runs
    ]
    return {"runs": described, "text": text, "time": time.time()}


def describe_error(error: BaseException) -> dict[str, Any]:
    """Return what the laptop is told of a submission that failed."""
    return {
        "faults": [[fault.what, fault.do] for fault in describe_faults(error)],
        "exit": int(error.exit if isinstance(error, EchelonError) else ExitCode.FAILED),
    }


def describe_faults(error: BaseException, step: str = "submitting the job") -> Sequence[Fault]:
    """Return the faults of an error on the login node; of a full disk, a sentence with the step in
    which it was met."""
    if isinstance(error, EchelonError):
        return error.faults
    if isinstance(error, OSError):
        where = f" ({error.filename})" if error.filename else ""
        return [
            Fault(
                f"{step}: a file could not be written there: {error.strerror or error}{where}",
                "free some space or quota there, or give another folder with "
                "launch.remote_dir=PATH; what is in its .echelon may be removed",
            )
        ]
    text = "".join(traceback.format_exception(error))
    return [Fault(text, _BUG_HINT)]


def with_job_python(
    config: dict[str, Any], python: str, lines: Sequence[str], secrets: str | None
) -> dict[str, Any]:
    """Return a configuration whose job uses this Python and these secrets, as plain data."""
    built = build_config(config)
    setup = [*built.launch.setup, *lines]
    launch = replace(built.launch, python=python, setup=setup, secrets=secrets)
    program = [python if word == JOB_PYTHON else word for word in built.program]
    return replace(built, launch=launch, program=program).to_dict()
