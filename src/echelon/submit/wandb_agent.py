"""`wandb agent` as a job: one agent, its trial on all of the job's nodes, the trial's exit code.

wandb's agent knows one machine: it starts `python program.py …` here, and it ends with 0 whatever
became of that. So on its PATH the first `python` is ours. It starts the real one the way the job
starts any program, with the variables of the trial, and notes how that ended. The agent itself is
the one of the job's environment and is not touched.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import NamedTuple

from echelon.config.schema import Config
from echelon.errors import EchelonError, Exit, Fault
from echelon.launch.slurm import batch_script
from echelon.runs.run_folder import Run
from echelon.submit.launch_modes import parse_torchrun
from echelon.submit.shell_syntax import ShellCommand, ShellWord
from echelon.utils.files import write_json_atomically
from echelon.utils.os_errors import describe_os_error

_SHIM_NAMES = ("python", "python3", "torchrun")
_TRIAL_START_LINE = b"About to run command"
"""wandb's agent, of each trial."""
_FORWARDED_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2)


class WandbAgentJob(NamedTuple):
    """Where the trials of a job happen."""

    run: Run
    master: str
    """HOST:PORT where their nodes meet."""


def run_agent_here(config: Config, run: Run) -> int:
    """The same on this machine, without Slurm."""
    return run_agent(WandbAgentJob(run, "127.0.0.1:0"), config.program)


# --- the agent ---


def run_agent(job: WandbAgentJob, words: Sequence[str]) -> int:
    """Run wandb's agent to its end; the code is that of its trials."""
    run = job.run
    tools, codes = run.folder / "tools", run.folder / ".trials"
    codes.unlink(missing_ok=True)
    _write_shims(tools, job)
    env = {"WANDB_DIR": str(run.folder)} | os.environ | {"PATH": f"{tools}:{os.environ['PATH']}"}
    try:
        # In a session of its own: what Slurm sends to all of the job's would reach it twice.
        agent = subprocess.Popen(words, env=env, stderr=subprocess.PIPE, start_new_session=True)
    except OSError as error:
        raise EchelonError(
            Fault(
                f"{words[0]} cannot be run: {describe_os_error(error)}",
                "name wandb in the environment's files, such as requirements.txt",
            ),
            exit=Exit.FAILED,
        ) from None
    begun = 0
    with _forward_signals(agent):
        assert agent.stderr is not None
        for line in agent.stderr:
            begun += _TRIAL_START_LINE in line
            sys.stderr.buffer.write(line)
            sys.stderr.flush()
        code = _to_exit_code(agent.wait())
    ended = (
        [int(text) for text in codes.read_text(encoding="utf-8").split()] if codes.exists() else []
    )
    if begun > len(ended) and not any(ended):
        raise EchelonError(
            Fault(
                "the sweep's command started a trial by another way than python or torchrun, so "
                "that nobody knows how it ended",
                "let `command:` of the sweep begin with ${env} ${interpreter} ${program}",
            ),
            exit=Exit.FAILED,
        )
    return next((each for each in ended if each), code)


def _write_shims(folder: Path, job: WandbAgentJob) -> None:
    folder.mkdir(exist_ok=True)
    safe = ["-P"] if sys.version_info >= (3, 11) else []
    us = [sys.executable, *safe, "-m", "echelon", "wandb-job", str(job.run.folder)]
    for name in _SHIM_NAMES:
        words = shlex.join([*us, "--master", job.master, "--instead-of", name, "--"])
        (folder / name).write_text(
            f'#!/bin/sh\nexec {words} "$@"\n', encoding="utf-8", errors="surrogateescape"
        )
        (folder / name).chmod(0o755)


# --- a trial ---


def run_trial(job: WandbAgentJob, name: str, arguments: Sequence[str]) -> int:
    """Instead of what wandb's agent believes to start."""
    run = job.run
    path = [p for p in os.environ["PATH"].split(":") if p != str(run.folder / "tools")]
    os.environ["PATH"] = ":".join(path)
    real = shutil.which(name) or name
    program = [real, *arguments] if name != "torchrun" else _strip_torchrun(arguments)
    config = replace(run.read_config(), program=program, mode="torchrun")
    write_json_atomically(run.config_file, config.to_dict())  # what the agents of the nodes read
    run.agent_exit_file.unlink(missing_ok=True)
    host, _, port = job.master.rpartition(":")
    known = {"run": str(run.folder), "master": host, "port": port}
    step = subprocess.Popen(_build_step_command(config, job), env=os.environ | known)
    with _forward_signals(step):
        code = _to_exit_code(step.wait())
    with contextlib.suppress(OSError, ValueError):
        code = int(run.agent_exit_file.read_text(encoding="utf-8"))
        run.agent_exit_file.unlink()  # the batch script would take it for that of the whole job
    with (run.folder / ".trials").open("a", encoding="utf-8") as file:
        file.write(f"{code}\n")
    return code


def _strip_torchrun(arguments: Sequence[str]) -> list[str]:
    words = tuple(ShellWord(word, 0) for word in ("torchrun", *arguments))
    way = parse_torchrun(ShellCommand("the sweep's command", 0, words))
    assert way is not None
    return [word.text for word in way.words]


def _build_step_command(config: Config, job: WandbAgentJob) -> list[str]:
    if config.launch.kind == "slurm":
        return ["bash", "-c", "\n".join(batch_script.render_agents_step(config))]
    node = ["--nodes", "1", "--node-rank", "0", "--master", job.master, str(job.run.folder)]
    return [sys.executable, "-m", "echelon", "node", *node]


# --- both ---


@contextlib.contextmanager
def _forward_signals(process: subprocess.Popen[bytes]) -> Iterator[None]:
    """A signal to us is one to what we wait for."""

    def pass_on(number: int, frame: FrameType | None) -> None:
        process.send_signal(number)

    before = {number: signal.signal(number, pass_on) for number in _FORWARDED_SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _to_exit_code(returned: int) -> int:
    return 128 - returned if returned < 0 else returned
