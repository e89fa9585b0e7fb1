"""`wandb agent` as a job: one agent on the first node, whose trials run on all nodes of the job.

A command file may hold `wandb agent --count 1 ENTITY/PROJECT/SWEEP`, perhaps with variables before
it or filled in by the job's shell. The job runs that command with a `wandb` of ours first on its
PATH, which hands `wandb agent …` to the agent that `echelon sweep --engine wandb` has too
(sweep/wandb/agent.py). A trial is started the way the job starts any program, and the exit code of
the job is that of the first trial that failed.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path, PurePath
from types import FrameType
from typing import Any, NamedTuple

from echelon.config.schema import Config
from echelon.config.validate import check_run_name
from echelon.errors import EchelonError, ExitCode, Fault
from echelon.launch.slurm import batch_script
from echelon.runs.run_folder import Run
from echelon.runs.trusted_code import require_trusted_code
from echelon.submission.launch_modes import detect_torchrun
from echelon.submission.shell_syntax import ShellCommand, ShellWord
from echelon.sweep.trial_command import DEFAULT_COMMAND, expand_macros
from echelon.sweep.wandb import trial_records
from echelon.sweep.wandb.agent import GIVE_UP_S, RETRY_S, AgentPool, AgentSlot
from echelon.sweep.wandb.client import ServerUnavailableError, WandbServer
from echelon.sweep.wandb.trial_records import WandbTrialRecord
from echelon.tracking import wandb_key
from echelon.utils.os_errors import format_os_error_reason
from echelon.utils.processes import die_with_parent
from echelon.utils.trust import make_trusted_folder

_FORWARDED_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2)
_DEFAULT_PROJECT = "uncategorized"
"""The project that wandb itself takes without another."""


class WandbJobContext(NamedTuple):
    """The job whose nodes run the trials."""

    run: Run
    master: str
    """HOST:PORT of the rendezvous of the nodes."""

    @property
    def tools_folder(self) -> Path:
        """The folder of our `wandb`."""
        return self.run.folder / "tools"


def run_agent_here(config: Config, run: Run) -> int:
    """Run the agent command of a configuration on this machine, without Slurm."""
    return run_agent_command(WandbJobContext(run, "127.0.0.1:0"), config.program)


# --- the command, as it was written ---


def run_agent_command(job: WandbJobContext, words: Sequence[str]) -> int:
    """Run a command that calls `wandb agent`, and return its exit code.

    The command is a process of its own even if it is nothing but `wandb agent`: `env` and `bash`
    may come before, and their variables are for the agent alone.
    """
    _write_shim(job)
    command = ["wandb", *words[1:]] if PurePath(words[0]).name == "wandb" else list(words)
    variables = {"PATH": f"{job.tools_folder}:{os.environ['PATH']}"}
    environment = {"WANDB_DIR": str(job.run.folder)} | os.environ | variables
    try:
        # In a session of its own: a signal that Slurm sends to all processes of the job would
        # reach the agent twice.
        process = subprocess.Popen(
            command,
            env=environment,
            start_new_session=True,
            preexec_fn=partial(die_with_parent, os.getpid(), signal.SIGTERM),
        )
    except OSError as error:
        raise EchelonError(
            Fault(
                f"{words[0]} cannot be run: {format_os_error_reason(error)}", "see the command file"
            ),
            exit=ExitCode.FAILED,
        ) from None
    with _forward_signals(process):
        return _to_exit_code(process.wait())


def _write_shim(job: WandbJobContext) -> None:
    require_trusted_code(job.tools_folder)  # it comes first on the PATH
    make_trusted_folder(job.tools_folder)
    # The folder of the job may hold files named like modules; -P does not look there.
    safe_path = ["-P"] if sys.version_info >= (3, 11) else []
    echelon = [sys.executable, *safe_path, "-m", "echelon"]
    options = [str(job.run.folder), "--master", job.master, "--agent", "--"]
    command = shlex.join([*echelon, "wandb-job", *options])
    shim = job.tools_folder / "wandb"
    shim.write_text(f'#!/bin/sh\nexec {command} "$@"\n', encoding="utf-8", errors="surrogateescape")
    shim.chmod(0o755)


@contextlib.contextmanager
def _forward_signals(process: subprocess.Popen[bytes]) -> Iterator[None]:
    """Pass signals to this process on to the one that it waits for."""

    def forward(number: int, frame: FrameType | None) -> None:
        process.send_signal(number)

    before = {number: signal.signal(number, forward) for number in _FORWARDED_SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _to_exit_code(returncode: int) -> int:
    """Translate the code of a process that a signal ended to that of a shell."""
    return 128 - returncode if returncode < 0 else returncode


# --- the agent ---


def run_wandb_shim(job: WandbJobContext, arguments: Sequence[str]) -> int:
    """Do what `wandb ARGUMENTS` asks for, and return the exit code.

    For `wandb agent` that is the code of the first trial that failed, and 0 if none did. Any other
    command of wandb replaces this process.
    """
    folders = os.environ["PATH"].split(":")
    os.environ["PATH"] = ":".join(f for f in folders if f != str(job.tools_folder))
    if arguments[:1] != ["agent"]:
        os.execvp("wandb", ["wandb", *arguments])
    options = _parse_arguments(arguments[1:])
    server = _open_server()
    sweep = _resolve_sweep(options, server)
    config = _query_config_with_retries(server, sweep)
    backend = JobBackend(job, sweep, config.get("command"), config.get("program"))
    pool = AgentPool(
        server,
        sweep,
        backend,
        [AgentSlot()],
        max_trials=options.count,
        prints_rows=False,
        handled_signals=_FORWARDED_SIGNALS,
    )
    if options.max_consecutive_failed_runs:
        pool.max_failures_in_a_row = options.max_consecutive_failed_runs
    pool.run()
    if code := next((r.exit_code for r in pool.ended if r.exit_code), None):
        return code
    if pool.refusal:
        raise pool.refusal
    return ExitCode.FAILED if pool.refused else ExitCode.OK


def _parse_arguments(arguments: Sequence[str]) -> argparse.Namespace:
    """Parse the options of `wandb agent`. Signals are always forwarded, and a trial has as long to
    save as the job has."""
    parser = argparse.ArgumentParser(prog="wandb agent")
    parser.add_argument("sweep_id")
    parser.add_argument("--project", "-p")
    parser.add_argument("--entity", "-e")
    parser.add_argument("--count", type=int)
    parser.add_argument("--forward-signals", "-f", action="store_true")
    parser.add_argument("--term-timeout", "-t", type=int)
    parser.add_argument("--max-consecutive-failed-runs", type=int)
    return parser.parse_args(arguments)


def _open_server() -> WandbServer:
    problem = wandb_key.find_key_problem(os.environ)
    credentials = wandb_key.read_credentials(os.environ)
    if problem or credentials is None:
        raise EchelonError(
            Fault(
                f"`wandb agent` needs an API key, but {problem or 'there is none'}",
                "log in with `wandb login`, or put WANDB_API_KEY into the file of launch.secrets",
            ),
            exit=ExitCode.FAILED,
        )
    return WandbServer(*credentials)


def _resolve_sweep(options: argparse.Namespace, server: WandbServer) -> str:
    """Return ENTITY/PROJECT/SWEEP, of which a person may leave out the first two."""
    *path, name = str(options.sweep_id).split("/")
    project = path[-1] if path else ""
    entity = path[-2] if len(path) > 1 else ""
    project = project or options.project or os.environ.get("WANDB_PROJECT") or _DEFAULT_PROJECT
    entity = entity or options.entity or os.environ.get("WANDB_ENTITY") or ""
    return f"{entity or _retry(server.query_user)}/{project}/{name}"


def _query_config_with_retries(server: WandbServer, sweep: str) -> dict[str, Any]:
    config: dict[str, Any] = _retry(lambda: server.query_sweep_config(sweep))
    return config


def _retry(request: Any) -> Any:
    """Send a request until the server answers; a job has waited long for its start."""
    deadline = time.monotonic() + GIVE_UP_S
    while True:
        try:
            return request()
        except ServerUnavailableError as error:
            if time.monotonic() > deadline:
                what = f"wandb's server does not answer: {error}"
                raise EchelonError(
                    Fault(what, "submit it again later"), exit=ExitCode.FAILED
                ) from None
        time.sleep(RETRY_S)


# --- a trial ---


@dataclass
class JobBackend:
    """A TrialBackend whose trials fill this job, one after the other.

    Which parameters a trial may have is not checked: they are arguments of the user's own program,
    and never settings of Echelon here. No records are kept, as the server has them.
    """

    job: WandbJobContext
    sweep: str
    command: Sequence[str] | None
    """`command` of the sweep, with macros."""
    program: str | None
    _ended_ids: set[str] = field(default_factory=set)

    def has_result(self, trial_id: str) -> bool:
        """Return whether this agent has run the trial to its end."""
        return trial_id in self._ended_ids

    def create_trial_record(self, trial_id: str, parameters: Mapping[str, Any]) -> WandbTrialRecord:
        """Return a record; EchelonError if the id cannot be part of a file's name."""
        if fault := check_run_name(trial_id):
            raise EchelonError(fault)
        return WandbTrialRecord(trial_id, self.sweep, parameters)

    def can_resume_trial(self, record: WandbTrialRecord) -> bool:
        """Always: trials of earlier jobs are the server's to hand out again."""
        return True

    def start_trial(self, record: WandbTrialRecord) -> JobStepTrial:
        """Start the command of the sweep on all nodes of the job."""
        variables = trial_records.prepare_trial_environment(self.job.run.folder, record)
        return JobStepTrial.start(self.job, self._build_program(record), variables)

    def record_trial_end(
        self, record: WandbTrialRecord, exit_code: int, is_cancelled: bool, is_stopping: bool
    ) -> WandbTrialRecord:
        """Return the record with its state. A trial that the server stopped did not fail."""
        self._ended_ids.add(record.id)
        if exit_code == ExitCode.OK or is_cancelled:
            state = "finished" if exit_code == ExitCode.OK else "stopped"
            return replace(record, state=state, exit_code=ExitCode.OK)
        cause = f"exit code {exit_code}"
        return replace(record, state="failed", cause=cause, exit_code=exit_code)

    def _build_program(self, record: WandbTrialRecord) -> list[str]:
        """Return the words of the trial's program, without a launcher before them."""
        if self.command is None and self.program is None:
            raise EchelonError(
                Fault(f"the sweep {self.sweep} has neither program nor command", "add one to it"),
                exit=ExitCode.FAILED,
            )
        arguments_file = self.job.run.folder / f"trial-{record.id}.json"
        arguments_file.write_text(json.dumps(dict(record.parameters)), encoding="utf-8")
        extra = {"program": [self.program or ""], "args_json_file": [str(arguments_file)]}
        # `python` is that of the job's environment, not ours.
        extra["interpreter"] = [shutil.which("python") or "python"]
        template = [str(word) for word in self.command or DEFAULT_COMMAND]
        program = expand_macros(template, record.parameters, extra)
        words = tuple(ShellWord(word, 0) for word in program)
        torchrun = detect_torchrun(ShellCommand(f"the sweep {self.sweep}", 0, words))
        return [word.text for word in torchrun.words] if torchrun else program


@dataclass(frozen=True)
class JobStepTrial:
    """An AgentTrial: a step of the job, which starts the program on all of its nodes."""

    _run: Run
    _step: subprocess.Popen[bytes]

    @staticmethod
    def start(
        job: WandbJobContext, program: list[str], variables: Mapping[str, str]
    ) -> JobStepTrial:
        """Start the program as a job that was submitted with it would."""
        run = job.run
        config = replace(run.read_config(), program=program, mode="torchrun")
        run.write_config(config)  # the agents of the nodes read it
        run.agent_exit_file.unlink(missing_ok=True)
        host, _, port = job.master.rpartition(":")
        script_variables = {"run": str(run.folder), "master": host, "port": port}
        step = subprocess.Popen(
            _build_step_command(config, job),
            env=os.environ | dict(variables) | script_variables,
            start_new_session=True,  # signals are passed on by interrupt(), once
            preexec_fn=partial(die_with_parent, os.getpid(), signal.SIGTERM),
        )
        return JobStepTrial(run, step)

    def poll(self) -> int | None:
        """Return the exit code, or None while it runs."""
        returncode = self._step.poll()
        if returncode is None:
            return None
        # srun returns the code of the worst node, perhaps of a lost one: the first node knows
        # better. Its file must not stay: the batch script would take it for the whole job's.
        with contextlib.suppress(OSError, ValueError):
            code = int(self._run.agent_exit_file.read_text(encoding="utf-8"))
            self._run.agent_exit_file.unlink()
            return code
        return _to_exit_code(returncode)

    def cancel(self) -> None:
        """Ask the program to end, as wandb's own agent does."""
        self._step.terminate()

    def interrupt(self, signal_number: int, is_repeated: bool) -> None:
        """Pass the signal on, however often it comes."""
        self._step.send_signal(signal_number)


def _build_step_command(config: Config, job: WandbJobContext) -> list[str]:
    if config.launch.kind == "slurm":
        return ["bash", "-c", "\n".join(batch_script.render_agents_step(config))]
    node = ["--nodes", "1", "--node-rank", "0", "--master", job.master, str(job.run.folder)]
    return [sys.executable, "-m", "echelon", "node", *node]
