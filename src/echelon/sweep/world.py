"""The world of one trial, started and stopped by its worker."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from typing import Protocol

from echelon import runs
from echelon.config.schema import Config
from echelon.launch.process import launched
from echelon.launch.slurm.queue import this_job
from echelon.launch.slurm.script import FIRST_PORT, PORTS, processes, step_words
from echelon.launch.zygote import Order, Zygote, ZygoteGone
from echelon.runs import Run
from echelon.utils.processes import die_with_parent

_ENTRY = "echelon.entry:start_resolved"
_PRELOADED = ("torch", "torch._dynamo", "echelon.train.worker", "echelon.experiments")


class World(Protocol):
    def poll(self, wait_s: float) -> int | None:
        """Its exit code, once it is over."""

    def stop(self) -> None:
        """Ask it to save and end."""

    def kill(self) -> None: ...


class Starter(Protocol):
    def start(self, config: Config, run: Run, variables: Mapping[str, str]) -> World: ...


class Forking:
    """Worlds of this machine, or started from it: each in a process that is forked from one that
    has imported torch, and ends with this one."""

    def __init__(self) -> None:
        self._zygote = Zygote(_PRELOADED)

    def start(self, config: Config, run: Run, variables: Mapping[str, str]) -> World:
        run.logs.mkdir(parents=True, exist_ok=True)
        log = str(run.logs / "trial.log")
        order = Order(0, dict(variables), _ENTRY, [json.dumps(config.to_dict())], log)
        if self._zygote.gone:
            self._zygote = self._zygote.again()
        return _Forked(self._zygote, order)


class _Forked:
    def __init__(self, zygote: Zygote, order: Order) -> None:
        self._zygote, self._pid = zygote, 0
        self._code: int | None = None
        try:
            zygote.start(order)
        except ZygoteGone:
            self._code = -signal.SIGKILL
        while not self._pid and self._code is None:
            zygote.wait(1.0)
            self._hear()

    def _hear(self) -> None:
        for news in self._zygote.news():
            self._pid = news.get("started", self._pid)
            if "gone" in news:
                self._code = -signal.SIGKILL
            elif news.get("exited") == self._pid:
                self._code = int(news["code"])

    def poll(self, wait_s: float) -> int | None:
        if self._code is None:
            self._zygote.wait(wait_s)
            self._hear()
        return self._code

    def stop(self) -> None:
        self._signal(signal.SIGTERM)

    def kill(self) -> None:
        self._signal(signal.SIGKILL)

    def _signal(self, number: int) -> None:
        if self._code is None and self._pid:
            os.kill(self._pid, number)  # not yet waited for, so it is nobody else's number


class Stepping:
    """Worlds that fill the Slurm job in which this process is the batch script's."""

    def start(self, config: Config, run: Run, variables: Mapping[str, str]) -> World:
        made = runs.create(config)
        made.code_file.unlink(missing_ok=True)
        world = config.launch.nodes * processes(config)
        begun = launched("slurm", config.launch.nodes, world)
        job = {"process": None, "job": this_job(os.environ), "in_sweep": True}
        made.update_status(**begun | job)
        return _Stepped(step_words(config, run, _master(os.environ)), run, variables)


class _Stepped:
    def __init__(self, words: Sequence[str], run: Run, variables: Mapping[str, str]) -> None:
        parent = os.getpid()
        with run.job_log.open("a", encoding="utf-8") as log:
            self._process = subprocess.Popen(
                words,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=os.environ | dict(variables),
                preexec_fn=lambda: die_with_parent(parent),
            )
        self._run = run

    def poll(self, wait_s: float) -> int | None:
        try:
            code = self._process.wait(wait_s)
        except subprocess.TimeoutExpired:
            return None
        # srun gives the code of the worst node, perhaps of a dead one; node 0 knows better
        with contextlib.suppress(OSError, ValueError):
            code = int(self._run.code_file.read_text(encoding="utf-8"))
        with contextlib.suppress(OSError):  # the job goes on, with another trial
            self._run.exit_file.write_text(f"{code}\n", encoding="utf-8")
        return code

    def stop(self) -> None:
        self._process.send_signal(signal.SIGUSR2)  # on TERM srun would kill its tasks

    def kill(self) -> None:
        self._process.kill()


def _master(env: Mapping[str, str]) -> str:
    job = int(env["SLURM_JOB_ID"])
    done = subprocess.run(
        ["scontrol", "show", "hostnames", env["SLURM_JOB_NODELIST"]],
        capture_output=True,
        encoding="utf-8",
        errors="replace",
        check=True,
    )
    return f"{done.stdout.split()[0]}:{FIRST_PORT + job % PORTS}"
