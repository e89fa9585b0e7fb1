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
from echelon.launch.slurm import script
from echelon.runs import Run
from echelon.submit.modes import without_torchrun
from echelon.submit.words import Command, Word
from echelon.utils.files import write_json_atomically
from echelon.utils.os_errors import describe_os_error

_STOOD_IN = ("python", "python3", "torchrun")
_STARTS = b"About to run command"
"""wandb's agent, of each trial."""
_PASSED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2)


class Place(NamedTuple):
    """Where the trials of a job happen."""

    run: Run
    master: str
    """HOST:PORT where their nodes meet."""


def run_here(config: Config, run: Run) -> int:
    """The same on this machine, without Slurm."""
    return watch(Place(run, "127.0.0.1:0"), config.program)


# --- the agent ---


def watch(place: Place, words: Sequence[str]) -> int:
    """Run wandb's agent to its end; the code is that of its trials."""
    run = place.run
    tools, codes = run.folder / "tools", run.folder / ".trials"
    codes.unlink(missing_ok=True)
    _make_tools(tools, place)
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
    with _passing_on(agent):
        assert agent.stderr is not None
        for line in agent.stderr:
            begun += _STARTS in line
            sys.stderr.buffer.write(line)
            sys.stderr.flush()
        code = _code(agent.wait())
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


def _make_tools(folder: Path, place: Place) -> None:
    folder.mkdir(exist_ok=True)
    safe = ["-P"] if sys.version_info >= (3, 11) else []
    us = [sys.executable, *safe, "-m", "echelon", "wandb-job", str(place.run.folder)]
    for name in _STOOD_IN:
        words = shlex.join([*us, "--master", place.master, "--instead-of", name, "--"])
        (folder / name).write_text(
            f'#!/bin/sh\nexec {words} "$@"\n', encoding="utf-8", errors="surrogateescape"
        )
        (folder / name).chmod(0o755)


# --- a trial ---


def start(place: Place, name: str, arguments: Sequence[str]) -> int:
    """Instead of what wandb's agent believes to start."""
    run = place.run
    path = [p for p in os.environ["PATH"].split(":") if p != str(run.folder / "tools")]
    os.environ["PATH"] = ":".join(path)
    real = shutil.which(name) or name
    program = [real, *arguments] if name != "torchrun" else _without_torchrun(arguments)
    config = replace(run.config(), program=program, mode="torchrun")
    write_json_atomically(run.config_file, config.to_dict())  # what the agents of the nodes read
    run.code_file.unlink(missing_ok=True)
    host, _, port = place.master.rpartition(":")
    known = {"run": str(run.folder), "master": host, "port": port}
    step = subprocess.Popen(_on_all_nodes(config, place), env=os.environ | known)
    with _passing_on(step):
        code = _code(step.wait())
    with contextlib.suppress(OSError, ValueError):
        code = int(run.code_file.read_text(encoding="utf-8"))
        run.code_file.unlink()  # the batch script would take it for that of the whole job
    with (run.folder / ".trials").open("a", encoding="utf-8") as file:
        file.write(f"{code}\n")
    return code


def _without_torchrun(arguments: Sequence[str]) -> list[str]:
    words = tuple(Word(word, 0) for word in ("torchrun", *arguments))
    way = without_torchrun(Command("the sweep's command", 0, words))
    assert way is not None
    return [word.text for word in way.words]


def _on_all_nodes(config: Config, place: Place) -> list[str]:
    if config.launch.kind == "slurm":
        return ["bash", "-c", "\n".join(script.agents(config))]
    node = ["--nodes", "1", "--node-rank", "0", "--master", place.master, str(place.run.folder)]
    return [sys.executable, "-m", "echelon", "node", *node]


# --- both ---


@contextlib.contextmanager
def _passing_on(process: subprocess.Popen[bytes]) -> Iterator[None]:
    """A signal to us is one to what we wait for."""

    def pass_on(number: int, frame: FrameType | None) -> None:
        process.send_signal(number)

    before = {number: signal.signal(number, pass_on) for number in _PASSED_ON}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _code(returned: int) -> int:
    return 128 - returned if returned < 0 else returned
