"""The world of one trial, started and stopped by its worker."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from typing import Protocol

from echelon.config.schema import Config
from echelon.launch.node.fork_server import ForkServer, ForkServerGone, WorkerSpawnRequest
from echelon.launch.process_record import make_starting_status
from echelon.launch.slurm.batch_script import (
    FIRST_PORT,
    PORTS,
    count_processes_per_node,
    srun_step_command,
)
from echelon.launch.slurm.queue import read_job_id
from echelon.runs import run_folder
from echelon.runs.run_folder import Run
from echelon.utils.processes import die_with_parent

_ENTRY_POINT = "echelon.entrypoint:start_from_json"
_PRELOADED_MODULES = ("torch", "torch._dynamo", "echelon.train.worker", "echelon.recipes")


class TrialProcess(Protocol):
    def poll(self, wait_s: float) -> int | None:
        """Its exit code, once it is over."""

    def stop(self) -> None:
        """Ask it to save and end."""

    def kill(self) -> None: ...


class TrialStarter(Protocol):
    def start(self, config: Config, run: Run, variables: Mapping[str, str]) -> TrialProcess: ...


class ForkedTrialStarter:
    """Worlds of this machine, or started from it: each in a process that is forked from one that
    has imported torch, and ends with this one."""

    def __init__(self) -> None:
        self._zygote = ForkServer(_PRELOADED_MODULES)

    def start(self, config: Config, run: Run, variables: Mapping[str, str]) -> TrialProcess:
        run.logs_folder.mkdir(parents=True, exist_ok=True)
        log = str(run.logs_folder / "trial.log")
        order = WorkerSpawnRequest(
            0, dict(variables), _ENTRY_POINT, [json.dumps(config.to_dict())], log
        )
        if self._zygote.is_gone:
            self._zygote = self._zygote.start_replacement()
        return _ForkedTrial(self._zygote, order)


class _ForkedTrial:
    def __init__(self, zygote: ForkServer, order: WorkerSpawnRequest) -> None:
        self._zygote, self._pid = zygote, 0
        self._code: int | None = None
        try:
            zygote.start_worker(order)
        except ForkServerGone:
            self._code = -signal.SIGKILL
        while not self._pid and self._code is None:
            zygote.wait_for_event(1.0)
            self._read_events()

    def _read_events(self) -> None:
        for news in self._zygote.read_events():
            self._pid = news.get("started", self._pid)
            if "gone" in news:
                self._code = -signal.SIGKILL
            elif news.get("exited") == self._pid:
                self._code = int(news["code"])

    def poll(self, wait_s: float) -> int | None:
        if self._code is None:
            self._zygote.wait_for_event(wait_s)
            self._read_events()
        return self._code

    def stop(self) -> None:
        self._signal(signal.SIGTERM)

    def kill(self) -> None:
        self._signal(signal.SIGKILL)

    def _signal(self, number: int) -> None:
        if self._code is None and self._pid:
            os.kill(self._pid, number)  # not yet waited for, so it is nobody else's number


class SlurmStepStarter:
    """Worlds that fill the Slurm job in which this process is the batch script's."""

    def start(self, config: Config, run: Run, variables: Mapping[str, str]) -> TrialProcess:
        made = run_folder.create_run(config)
        made.agent_exit_file.unlink(missing_ok=True)
        world = config.launch.nodes * count_processes_per_node(config)
        begun = make_starting_status("slurm", config.launch.nodes, world)
        job = {"process": None, "job": read_job_id(os.environ), "in_sweep": True}
        made.update_status(**begun | job)
        return _SlurmStepTrial(
            srun_step_command(config, run, _find_master_address(os.environ)), run, variables
        )


class _SlurmStepTrial:
    def __init__(self, words: Sequence[str], run: Run, variables: Mapping[str, str]) -> None:
        parent = os.getpid()
        with run.job_log_file.open("a", encoding="utf-8") as log:
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
            code = int(self._run.agent_exit_file.read_text(encoding="utf-8"))
        with contextlib.suppress(OSError):  # the job goes on, with another trial
            self._run.exit_code_file.write_text(f"{code}\n", encoding="utf-8")
        return code

    def stop(self) -> None:
        self._process.send_signal(signal.SIGUSR2)  # on TERM srun would kill its tasks

    def kill(self) -> None:
        self._process.kill()


def _find_master_address(env: Mapping[str, str]) -> str:
    job = int(env["SLURM_JOB_ID"])
    done = subprocess.run(
        ["scontrol", "show", "hostnames", env["SLURM_JOB_NODELIST"]],
        capture_output=True,
        encoding="utf-8",
        errors="replace",
        check=True,
    )
    return f"{done.stdout.split()[0]}:{FIRST_PORT + job % PORTS}"
