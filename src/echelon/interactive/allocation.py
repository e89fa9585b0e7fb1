"""An allocation to work in: its name, folder and scripts, and what it costs at most."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from echelon.config.schema import Config
from echelon.config.validate import NAME_CHARACTERS, parse_sbatch_time
from echelon.errors import EchelonError, Fault
from echelon.launch.slurm.batch_script import make_sbatch_options, render_setup
from echelon.utils.cache_root import get_cache_root
from echelon.utils.files import read_json_object
from echelon.utils.text import format_count

DEFAULT_NAME = "dev"
DEFAULT_TIME = "2:00:00"
_JOB_NAME_PREFIX = "echelon-"
_RUN_ONLY_OPTIONS = ("--signal", "--requeue", "--no-requeue", "--open-mode", "--no-kill")
"""Options of the batch job of a run that an allocation has no use for."""


class AllocationCost(NamedTuple):
    """What an allocation costs if it is used up to its time limit."""

    nodes: int
    per_node: int
    unit: str
    """GPU or CPU: what is counted."""
    limit: str
    hours: float | None
    """Of all units together; None without a time limit."""

    def __str__(self) -> str:
        shape = f"{format_count(self.nodes, 'node')} × {format_count(self.per_node, self.unit)}"
        if self.hours is None:
            return f"{shape}, without a time limit"
        return f"at most {self.hours:g} {self.unit}-hours: {shape} × {self.limit}"


@dataclass(frozen=True)
class AllocationFolder:
    """The files of an allocation, in the user's cache, which the nodes see too."""

    name: str
    folder: Path

    @classmethod
    def find(cls, name: str, env: Mapping[str, str]) -> AllocationFolder:
        """Return the folder of the allocation of this name; raise if it is no name."""
        if not name or not set(name) <= NAME_CHARACTERS or name[0] in ".-" or len(name) > 60:
            raise EchelonError(
                Fault(
                    f"--name {name!r} is not a name for an allocation",
                    "use up to 60 letters, digits, '.', '_' and '-'",
                )
            )
        return cls(name, list_folder(env) / name)

    @property
    def job_name(self) -> str:
        """The name of the job, and of the host in ssh's configuration: `echelon-dev`."""
        return make_job_name(self.name)

    @property
    def job_script(self) -> Path:
        return self.folder / "job.sh"

    @property
    def shell_script(self) -> Path:
        return self.folder / "shell.sh"

    @property
    def log_file(self) -> Path:
        return self.folder / "job.log"

    @property
    def state_file(self) -> Path:
        """What the keeper says of the job, while it runs."""
        return self.folder / "state.json"

    @property
    def variables_file(self) -> Path:
        """The variables of the job, as every shell in it gets them. The keeper writes it."""
        return self.folder / "job.env"

    @property
    def ended_file(self) -> Path:
        """Why the keeper has ended the job."""
        return self.folder / "ended"

    @property
    def ssh_request_file(self) -> Path:
        """It asks the keeper for an sshd of its own."""
        return self.folder / "ssh-wanted"

    @property
    def ssh_config_file(self) -> Path:
        return self.folder / "ssh_config"

    def read_state(self, job: str) -> dict[str, Any] | None:
        """Return what the keeper of this job has written; None before it has, and of another
        job."""
        state = read_json_object(self.state_file)
        return state if state and state.get("job") == job else None

    def prepare(self) -> None:
        """Make the folder, and remove what an earlier allocation of this name has left."""
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self.folder.chmod(0o700)  # keys are in it, and what a shell executes
        left = (self.state_file, self.ended_file, self.ssh_request_file, self.ssh_config_file)
        for file in (*left, self.log_file, *self.folder.glob("activity-*")):
            file.unlink(missing_ok=True)


def list_folder(env: Mapping[str, str]) -> Path:
    """Return the folder of the folders of all allocations."""
    return get_cache_root(env) / "dev"


def make_job_name(name: str) -> str:
    """Return the name of the job of an allocation: `echelon-dev`, or `echelon-dev-NAME`."""
    middle = "" if name == DEFAULT_NAME else f"{DEFAULT_NAME}-"
    return f"{_JOB_NAME_PREFIX}{middle}{name}"


def parse_job_name(job_name: str) -> str | None:
    """Return the name of the allocation whose job has this name; None of any other job."""
    if job_name == make_job_name(DEFAULT_NAME):
        return DEFAULT_NAME
    prefix = f"{_JOB_NAME_PREFIX}{DEFAULT_NAME}-"
    return job_name.removeprefix(prefix) if job_name.startswith(prefix) else None


def complete_dev_config(config: Config) -> Config:
    """Return the configuration with a time limit: one that nobody has set may be a week."""
    if config.launch.kind != "slurm":
        raise EchelonError(
            Fault(
                f"echelon dev asks Slurm for an allocation, and launch={config.launch.kind} has "
                "nothing to allocate: its machines are there already",
                "add launch=slurm, or log in where you want to work",
            )
        )
    if config.launch.time:
        return config
    return replace(config, launch=replace(config.launch, time=DEFAULT_TIME))


def compute_cost(config: Config) -> AllocationCost:
    """Return what the allocation costs at most, in GPU-hours, or without GPUs in CPU-hours."""
    launch = config.launch
    limit = str(launch.time)
    seconds = parse_sbatch_time(limit)
    unit = "GPU" if launch.gpu_count else "CPU"
    count = launch.gpu_count or launch.cpus_per_node or launch.procs or 1
    hours = None if seconds is None else round(launch.nodes * count * seconds / 3600, 2)
    return AllocationCost(launch.nodes, count, unit, limit, hours)


def render_job_script(config: Config, files: AllocationFolder, idle_s: float) -> str:
    """Return the batch script, which is the keeper."""
    keeper = [sys.executable, "-m", "echelon.interactive.keeper", str(files.folder)]
    return "\n".join(
        [
            "#!/bin/bash",
            f"#SBATCH --job-name={files.job_name}",
            f'#SBATCH --output="{files.log_file}"',
            *(f"#SBATCH {option}" for option in _make_options(config)),
            "",
            f"# It ends this job when nobody has used it for {idle_s / 60:g} minutes.",
            f"exec {shlex.join(keeper)} --idle-s {idle_s:g}",
            "",
        ]
    )


def _make_options(config: Config) -> Iterator[str]:
    launch = config.launch
    alone = replace(config, launch=replace(launch, spares=0))
    for option in make_sbatch_options(alone, procs=launch.procs or 1):
        if not option.startswith(_RUN_ONLY_OPTIONS):
            yield option
    # To the keeper alone, which tells it to the terminals.
    yield f"--signal=B:USR2@{launch.signal_lead_s}"
    yield "--no-requeue"


def select_job_variables(env: Mapping[str, str]) -> dict[str, str]:
    """Return the variables by which Slurm describes a job to a shell of `salloc`, from those of its
    batch script."""
    named = ("SLURM_JOBID", "SLURM_NNODES", "SLURM_NODELIST", "SLURM_CLUSTER_NAME", "SLURM_CONF")
    return {k: v for k, v in env.items() if k.startswith("SLURM_JOB_") or k in named}


def render_shell_script(config: Config, files: AllocationFolder) -> str:
    """Return the script of every shell in the allocation.

    A shell is a step of one task, and srun describes this step in variables of the job as well.
    What is started in it would take the task for the whole: `srun` would start one process, and a
    training would be one rank of a world that is not there. So the environment becomes that of the
    job, as in a shell of `salloc`.
    """
    return "\n".join(
        [
            "#!/bin/bash",
            "# This step is one task. What is started here is to see the whole job, as in salloc.",
            "unset ${!SLURM_@} ${!SRUN_@}",
            f". {shlex.quote(str(files.variables_file))}",
            "fail() { echo 'the shell starts without it' >&2; }",
            *render_setup(config.launch, has_key=False),
            "",
            '"${SHELL:-/bin/bash}" -i',
            "exit 0  # whatever was typed last: srun would call it an error",
            "",
        ]
    )
