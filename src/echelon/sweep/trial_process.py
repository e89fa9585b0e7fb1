"""The process of a trial, which starts all its ranks: forked on this machine, or a Slurm step."""

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
from echelon.launch.slurm.batch_script import (
    FIRST_PORT,
    PORTS,
    count_processes_per_node,
    make_trial_step_command,
)
from echelon.runs.create import create_run
from echelon.runs.process_record import make_starting_status
from echelon.runs.run_folder import Run
from echelon.runs.slurm_queue import read_current_job_id
from echelon.runs.writer import release_run_folder
from echelon.utils.processes import die_with_parent

_ENTRY_POINT = "echelon.entrypoint:start_from_json"
_PRELOADED_MODULES = ("torch", "echelon.train.worker", "echelon.recipes")
"""Imported once, before the first fork: importing torch takes longer than many a trial."""


class TrialProcess(Protocol):
    """A trial that runs."""

    def poll(self, wait_s: float) -> int | None:
        """Wait a little, and return the exit code, or None while it runs."""

    def request_stop(self) -> None:
        """Ask it to save and end."""

    def kill(self) -> None:
        """End it at once."""


class TrialStarter(Protocol):
    """Starts trials."""

    def start(self, config: Config, run: Run, variables: Mapping[str, str]) -> TrialProcess:
        """Start one, with additional environment variables."""


class ForkedTrialStarter:
    """Starts trials by a fork server that has imported torch; they end with this process.

    The forked process launches the run as `echelon train` would: inline, local or over ssh.
    """

    def __init__(self) -> None:
        self._fork_server = ForkServer(_PRELOADED_MODULES)

    def start(self, config: Config, run: Run, variables: Mapping[str, str]) -> TrialProcess:
        """Fork a process for the trial. A fork server that was killed is replaced first.

        The log is opened by the new process, so its folder is made here; the rest of the run folder
        is made by the launch, which knows whether the run is new.
        """
        run.logs_folder.mkdir(parents=True, exist_ok=True)
        log = str(run.logs_folder / "trial.log")
        request = WorkerSpawnRequest(
            0, dict(variables), _ENTRY_POINT, [json.dumps(config.to_dict())], log
        )
        if self._fork_server.is_gone:
            self._fork_server = self._fork_server.start_replacement()
        return _ForkedTrial(self._fork_server, request)


class _ForkedTrial:
    def __init__(self, fork_server: ForkServer, request: WorkerSpawnRequest) -> None:
        self._fork_server, self._pid = fork_server, 0
        self._code: int | None = None
        try:
            fork_server.request_worker(request)
        except ForkServerGone:
            self._code = -signal.SIGKILL  # as if it had been killed: it is tried again
        while not self._pid and self._code is None:
            fork_server.wait_for_event(1.0)
            self._read_events()

    def _read_events(self) -> None:
        for event in self._fork_server.read_events():
            self._pid = event.get("started", self._pid)
            if "gone" in event:
                self._code = -signal.SIGKILL
            elif event.get("exited") == self._pid:
                self._code = int(event["code"])

    def poll(self, wait_s: float) -> int | None:
        if self._code is None:
            self._fork_server.wait_for_event(wait_s)
            self._read_events()
        return self._code

    def request_stop(self) -> None:
        self._signal(signal.SIGTERM)

    def kill(self) -> None:
        self._signal(signal.SIGKILL)

    def _signal(self, number: int) -> None:
        if self._code is None and self._pid:
            # No exit was reported, so its id cannot belong to another process yet.
            os.kill(self._pid, number)


class SlurmStepStarter:
    """Starts trials as steps that fill the Slurm job whose batch script runs this worker."""

    def start(self, config: Config, run: Run, variables: Mapping[str, str]) -> TrialProcess:
        """Create the run folder, and start the step."""
        created = create_run(config)
        # Of the trial's last start. It would be read as the result of this one if srun failed.
        created.agent_exit_file.unlink(missing_ok=True)
        world_size = config.launch.nodes * count_processes_per_node(config)
        status = make_starting_status("slurm", config.launch.nodes, world_size)
        job = {"process": None, "job": read_current_job_id(os.environ), "in_sweep": True}
        created.update_status(**status | job)
        release_run_folder(created)  # the agent of node 0 claims it
        command = make_trial_step_command(config, run, _find_master_address(os.environ))
        return _SlurmStepTrial(command, run, variables)


class _SlurmStepTrial:
    def __init__(self, command: Sequence[str], run: Run, variables: Mapping[str, str]) -> None:
        parent = os.getpid()
        with run.job_log_file.open("a", encoding="utf-8") as log:
            self._process = subprocess.Popen(
                command,
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
        # srun returns the code of the worst node, perhaps of a lost one; node 0 knows better.
        with contextlib.suppress(OSError, ValueError):
            code = int(self._run.agent_exit_file.read_text(encoding="utf-8"))
        with contextlib.suppress(OSError):  # the batch script does not write it: the job continues
            self._run.exit_code_file.write_text(f"{code}\n", encoding="utf-8")
        return code

    def request_stop(self) -> None:
        self._process.send_signal(signal.SIGUSR2)  # on SIGTERM srun would kill its tasks

    def kill(self) -> None:
        self._process.kill()


def _find_master_address(env: Mapping[str, str]) -> str:
    """Return HOST:PORT for the rendezvous: the first node, and a port by the number of the job."""
    job = int(env["SLURM_JOB_ID"])
    done = subprocess.run(
        ["scontrol", "show", "hostnames", env["SLURM_JOB_NODELIST"]],
        capture_output=True,
        encoding="utf-8",
        errors="replace",
        check=True,
    )
    return f"{done.stdout.split()[0]}:{FIRST_PORT + job % PORTS}"
