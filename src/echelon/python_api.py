"""`echelon.submit`: commands and functions as jobs, from Python."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

from echelon.entrypoint import load_project_defaults
from echelon.errors import EchelonError, ExitCode, Fault
from echelon.jobs.cancel import cancel_runs
from echelon.launch.slurm.batch_script import count_processes_per_node
from echelon.runs.create import create_run, generate_run_name
from echelon.runs.process_record import identify_process, make_starting_status
from echelon.runs.run_folder import Run
from echelon.runs.status import RunStatus, read_run_status
from echelon.runs.writer import release_run_folder
from echelon.submission import call_function
from echelon.submission.command_file import parse_commands, quote_words
from echelon.submission.enqueue import enqueue_jobs, prepare_submission, prepare_work_folder
from echelon.submission.plan import Submission, SubmitRequest, plan_submission
from echelon.submission.prerequisites import require_prerequisites
from echelon.utils.files import read_json_object

_CALLER = "echelon.submit"
"""What stands in messages in place of a command file."""
_FIRST_POLL_S, _LAST_POLL_S = 0.05, 3.0
_TAIL_LINES = 20


class Job:
    """A command or a function that was submitted. `echelon.submit` returns it.

    job.run        the name of its run, as `echelon show` takes it
    job.folder     the folder of its run
    job.state      queued, running, finished, failed, cancelled, …
    job.wait()     waits for its end and returns its exit code
    job.result()   waits, and returns what the function returned or what the command printed
    job.logs()     what it has printed so far
    job.cancel()   asks it to save and end

    The job does not depend on this object, and goes on when the program that submitted it ends.
    """

    def __init__(self, run: Run, process: subprocess.Popen[bytes] | None = None) -> None:
        self._run = run
        self._process = process
        """The agent of a job on this machine; None with Slurm."""

    def __repr__(self) -> str:
        return f"<echelon job {self.run}: {self.state}>"

    @property
    def run(self) -> str:
        """The name of its run."""
        return self._run.name

    @property
    def folder(self) -> Path:
        """The folder of its run. What the command wrote by relative paths is in `folder/"work"`."""
        return self._run.folder

    @property
    def state(self) -> str:
        """The state of its run, as `echelon jobs` shows it."""
        return self._read_status().state

    def wait(self, timeout_s: float | None = None) -> int:
        """Wait until the job is over, and return its exit code.

        Raises TimeoutError after `timeout_s` seconds; the job goes on.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        pause_s = _FIRST_POLL_S
        with self._following():
            while (status := self._read_known_status()).is_active:
                left_s = None if deadline is None else deadline - time.monotonic()
                if left_s is not None and left_s <= 0:
                    raise TimeoutError(f"run {self.run} is {status.state} after {timeout_s} s")
                time.sleep(pause_s if left_s is None else min(pause_s, left_s))
                pause_s = min(2 * pause_s, _LAST_POLL_S)
        return int(status.exit or ExitCode.OK)

    def result(self, timeout_s: float | None = None) -> Any:
        """Wait until the job is over, and return what its function returned.

        The result of a command is what it printed, as text. A job that failed raises EchelonError,
        with the exception of the function and the end of the log.
        """
        code = self.wait(timeout_s)
        if self._is_elsewhere:  # the logs, which a follower that has seen the end may lack
            self._refresh(with_logs=True)
        is_call = self._run.call_file.exists()
        outcome = (read_json_object(self._run.result_file) or {}) if is_call else {}
        if code == ExitCode.OK and "result" in outcome:
            return outcome["result"]
        if code == ExitCode.OK and not is_call:
            return _read_log(self._run.get_rank_log_file(0))
        ended_early = "its function ended the process" if code == ExitCode.OK else ""
        raise self._make_error(code, str(outcome.get("error") or ended_early))

    def cancel(self, now: bool = False) -> None:
        """Ask the job to save and end, as `echelon cancel` does; with `now` it is killed."""
        if self._is_elsewhere:
            from echelon.login.remote_commands import run_there

            run_there([self._run], lambda there: ["cancel", *["--now"] * now, *there])
        else:
            cancel_runs([self._run], now)

    def logs(self) -> str:
        """Return what the job has printed so far: its batch script, and its process of rank 0."""
        self._refresh(with_logs=True)
        of_agent = self._run.get_node_log_file(0)  # it repeats what rank 0 prints
        of_rank_0 = of_agent if of_agent.exists() else self._run.get_rank_log_file(0)
        return _read_log(self._run.job_log_file) + _read_log(of_rank_0)

    @property
    def _is_elsewhere(self) -> bool:
        """Whether the run is on a cluster that is reached by `launch.login`."""
        return self._run.origin_file.exists()

    def _refresh(self, with_logs: bool = False) -> None:
        if self._is_elsewhere:
            from echelon.login.refresh import refresh_runs

            refresh_runs([self._run], with_logs)

    def _following(self) -> AbstractContextManager[None]:
        if not self._is_elsewhere:
            return nullcontext()
        from echelon.login.refresh import following

        return following([self._run])

    def _read_status(self) -> RunStatus:
        self._refresh()
        return self._read_known_status()

    def _read_known_status(self) -> RunStatus:
        if self._process is not None:
            self._process.poll()  # takes its exit code, so that the kernel forgets the process
        return read_run_status(self._run)

    def _make_error(self, code: int, reason: str) -> EchelonError:
        status = self._read_status()
        how = reason or f"{status.state} with exit code {code}. {status.note}".rstrip(". ")
        tail = "\n".join(f"  | {line}" for line in self.logs().splitlines()[-_TAIL_LINES:])
        return EchelonError(
            Fault(
                f"run {self.run}: {how}" + (f"\n{tail}" if tail else ""),
                f"echelon logs {self._run.folder}",
            ),
            exit=ExitCode.FAILED,
        )


def _read_log(file: Path) -> str:
    return file.read_text(encoding="utf-8", errors="replace") if file.exists() else ""


def submit(
    command: str | Sequence[str],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    launch: str = "slurm",
    name: str | None = None,
    source: str | Path = ".",
    env: str = "cache",
    links: Sequence[str] = (),
    requeue: bool = False,
    overrides: Sequence[str] = (),
    **launch_settings: Any,
) -> Job:
    """Run a command or a function as a job, from the code as it is now, and return at once.

        job = echelon.submit("python main.py --lr 1", nodes=2, time="1:00:00")
        job = echelon.submit("work.py:train", kwargs={"lr": 0.1}, launch="local")
        print(job.run, job.state)
        print(job.result())

    Parameters:

    command    A command as text, by the rules of a command file; or as a list of words; or a
               function, as "package.module:function" or "file.py:function".
    args       The arguments of the function. JSON carries them: numbers, texts, lists, dicts.
    kwargs     Its keyword arguments.
    launch     "slurm", or "local" for this machine.
    name       The name of the run. A name in use gets a number: job.run says which.
    source     The folder that is copied, and in a copy of which the job runs.
    env        Where the environment of a command is kept: "cache", "source" or "none". A function
               runs in the interpreter of this program; with login=HOST in the environment that the
               source asks for there.
    links      Paths in `source` to link to instead of copying them, such as data.
    requeue    Whether the job is queued again when its time is over, because it can resume.
    overrides  More settings, such as ["mode=srun", "run.dir=/scratch/runs"].

    All other keywords are settings of launch: nodes=2 is launch.nodes=2. `echelon train --help`
    lists them. Whatever cannot be done raises echelon.errors.EchelonError before anything starts.
    """
    text, function = _read_command(command, args, kwargs or {})
    request = SubmitRequest(
        [f"launch={launch}", *make_launch_overrides(launch_settings), *overrides],
        source=Path(source),
        name=name or (generate_run_name([], function.rpartition(":")[2]) if function else None),
        env="none" if function else env,
        links=tuple(links),
        requeue=requeue,
        commands=tuple(parse_commands(text, _CALLER)),
    )
    call = {"function": function, "args": list(args), "kwargs": dict(kwargs or {})}
    submission = _plan(request, function)
    if submission.configs[0].launch.login is not None:
        from echelon.login.command_submission import submit_one_by_login

        request = replace(request, env=env)  # the interpreter of this program is not there
        return Job(submit_one_by_login(submission, request, call if function else None))
    submission = prepare_submission(submission, os.environ)
    [config] = submission.configs
    run = Run.from_config(config)
    if function:
        call_function.write_call(run, call)
    if submission.launcher_kind == "slurm":
        for _ in enqueue_jobs(submission.build_jobs()):
            pass
        return Job(run)
    return Job(run, _start_in_background(submission, run))


def _read_command(
    command: str | Sequence[str], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[str, str]:
    """Return the line of a command file that runs the command, and the function, if it is one."""
    if callable(command):
        where = getattr(command, "__module__", "MODULE")
        path = f"{'FILE.py' if where == '__main__' else where}:{command.__name__}"
        raise _make_usage_error(
            f"{_CALLER} was given the function {command.__name__} itself, which another process "
            "cannot import by its value",
            f'give its path as a text: "{path}"',
        )
    if not isinstance(command, str):
        return quote_words([str(word) for word in command]), ""
    if not call_function.is_function_path(command):
        if args or kwargs:
            raise _make_usage_error(
                f"{command!r} is a command, and args and kwargs are for a function",
                'write them into the command, or give a function: "FILE.py:FUNCTION"',
            )
        return command, ""
    for value, what in ((list(args), "args"), (dict(kwargs), "kwargs")):
        if problem := call_function.find_json_problem(value, what):
            raise _make_usage_error(
                f"{command}: JSON cannot hold the arguments: {problem}",
                "give numbers, texts, lists and dicts; write the rest to a file and give its path",
            )
    return quote_words(call_function.make_call_command()), command


def _plan(request: SubmitRequest, function: str) -> Submission:
    """Return the plan of one command; EchelonError with all that the job would not find."""
    if len(request.commands) > 1:
        raise _make_usage_error(
            f"{_CALLER} was given {len(request.commands)} commands",
            "call it once for each; `echelon submit --configs FILE` makes them one array",
        )
    defaults = load_project_defaults(request.source or Path())
    submission = plan_submission(request, defaults, os.environ)
    if submission.configs[0].launch.login is None:
        require_prerequisites(submission, os.environ)
    file = function.rpartition(":")[0]
    if file.endswith(".py") and not submission.source.contains(os.path.normpath(file)):
        raise _make_usage_error(
            f"{function}: {file} is not in {submission.source.folder}, or git ignores it",
            "give its path in the source folder, or another folder with source=DIR",
        )
    if submission.launcher_kind != "slurm" and submission.configs[0].mode == "wandb":
        raise _make_usage_error(
            "`wandb agent` is submitted from Python to Slurm alone",
            "type `echelon submit launch=local`, which runs it here",
        )
    return submission


def make_launch_overrides(launch_settings: Mapping[str, Any]) -> list[str]:
    """Return settings of launch as the words that a person would type."""
    return [f"launch.{key}={_format_value(value)}" for key, value in launch_settings.items()]


def _format_value(value: Any) -> str:
    """Return a value as Hydra parses it."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, (list, tuple)):
        return f"[{','.join(map(_format_value, value))}]"
    if isinstance(value, (int, float)):
        return str(value)
    escaped = str(value).replace("'", "\\'")
    return f"'{escaped}'"


def _start_in_background(submission: Submission, run: Run) -> subprocess.Popen[bytes]:
    """Start a run on this machine, in a process that does not end with this one."""
    variables = prepare_work_folder(submission, run, os.environ)
    [config] = submission.configs
    create_run(config)
    # The folder of the job may hold files named like modules; -P does not look there.
    safe_path = ["-P"] if sys.version_info >= (3, 11) else []
    node = ["--nodes", "1", "--node-rank", "0", "--master", "127.0.0.1:0", str(run.folder)]
    agent = [sys.executable, *safe_path, "-m", "echelon", "node", *node]
    # The shell waits until its process is in the status, and then becomes the agent: from then on
    # two processes write the status.
    gate = ["bash", "-c", 'read -r _ && exec "$@" < /dev/null', "bash"]
    with run.get_node_log_file(0).open("ab") as log:
        process = subprocess.Popen(
            [*gate, *agent],
            cwd=run.work_folder,
            env=variables,
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=log,
            start_new_session=True,  # Ctrl-C in a notebook is not meant for it
        )
    start = make_starting_status("local", 1, count_processes_per_node(config))
    run.update_status(**start | {"process": identify_process(process.pid)})
    release_run_folder(run)  # the agent claims it
    assert process.stdin is not None
    process.stdin.write(b"\n")
    process.stdin.close()
    return process


def _make_usage_error(what: str, do: str) -> EchelonError:
    return EchelonError(Fault(what, do))
