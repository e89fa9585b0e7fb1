"""What a launcher is: four steps from a configuration to a run, the same for every launcher.

    plan    what will happen, as a value; nothing is touched, so `--dry-run` can print it
    check   what has to hold before anything is written or started
    start   the run itself, or the queueing of its job
    follow  what the command does after `start`: nothing, or watching a job to its end

`echelon.entrypoint.start_run` calls the steps in this order and knows no launcher by name.

To add a launcher NAME:

1. Write `launch/NAME.py` with a subclass of :class:`Launcher`; `launch/local.py` is the shortest
   example. A launcher that starts processes on a node ends in `launch.node.service.run_node`.
2. Add its line to `launch/registry.py`.
3. Add `conf/launch/NAME.yaml` with `kind: NAME`, and NAME to `config.schema.LAUNCHERS`, so that
   `launch=NAME` can be typed. `tests/launch/test_registry.py` says what is missing.
4. Add it to `LAUNCHERS` of `tests/cluster/test_contract.py`, the suite that every launcher passes.
"""

from __future__ import annotations

import os
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import ClassVar

from echelon.config.schema import Config
from echelon.config.validate import check_batch_size, check_fsdp_world_size
from echelon.errors import EchelonError, Exit, Fault
from echelon.launch.plan import LaunchMachine, LaunchPlan
from echelon.runs.process_record import is_alive
from echelon.runs.run_folder import Run


@dataclass(frozen=True)
class LaunchServices:
    """What launchers call of packages above this one.

    The entry point passes them as plain functions, so that `launch` does not import `train`,
    `jobs`, `preflight` or `submit`, and none of them is imported before it is needed.
    """

    train_in_process: Callable[[Config], int]
    """Train as one rank in this process; returns the exit code."""
    run_preflight: Callable[[Config], int]
    """Check the nodes of the run and print the result; returns the exit code."""
    run_wandb_agent: Callable[[Config], int]
    """Run `wandb agent`, which is the program of mode=wandb, on this machine."""
    follow_queued_run: Callable[[Config, bool], int]
    """Print how to follow a queued run or, if asked to wait, follow it to its end."""


class Launcher(ABC):
    """One value of `launch.kind`. Instances have no state; each step is given what it needs."""

    name: ClassVar[str]
    """As it is typed: launch=NAME."""
    applies_trial: ClassVar[bool] = True
    """Whether the parameters of a `wandb agent` trial are put into the configuration before the
    launch. With launch=inline they are not: only rank 0 may take them, once it knows that it is."""

    def prepare(self, config: Config, dry_run: bool) -> Config:
        """Complete the configuration before it is planned: names and secrets.

        By default the variables of `launch.secrets` are set in this process, whose workers inherit
        them. A dry run does not read them.
        """
        os.environ.update(read_launch_secrets(config, dry_run))
        return config

    @abstractmethod
    def plan(self, config: Config, machine: LaunchMachine) -> LaunchPlan:
        """Return what will happen. Pure: it asks no GPU, no Slurm and no network."""

    def find_faults(self, config: Config, plan: LaunchPlan, machine: LaunchMachine) -> list[Fault]:
        """The settings that contradict the plan, such as a batch smaller than the world.

        They are looked for before a dry run as well.
        """
        return [*find_batch_faults(config, plan), *find_fsdp_faults(config, plan)]

    def check_trackers(self, config: Config, plan: LaunchPlan, machine: LaunchMachine) -> None:
        """Raise if rank 0 will be started from here and a tracker that was asked for cannot run."""
        from echelon.tracking.create import require_trackers

        if not config.program and plan.places[0].rank == 0:
            require_trackers(config, machine.env)

    @abstractmethod
    def check(self, config: Config, plan: LaunchPlan, services: LaunchServices) -> None:
        """Raise an :class:`EchelonError` for what must hold before anything is written or started.

        What is merely worth knowing is printed as a warning.
        """

    @abstractmethod
    def start(self, config: Config, plan: LaunchPlan, services: LaunchServices) -> int:
        """Carry out the plan and return the exit code: the training's, or that of the queueing."""

    def follow(self, config: Config, code: int, wait: bool, services: LaunchServices) -> int:
        """Return the exit code of the command. Only a queued run is followed after its start."""
        return code

    def start_multirun(
        self, configs: Sequence[Config], dry_run: bool, start_run: Callable[[Config, bool], int]
    ) -> int:
        """Start the runs of `--multirun`, by default one by one; returns the highest exit code."""
        return max(collect_until_stopped(start_run(config, dry_run) for config in configs))


def collect_until_stopped(codes: Iterable[int]) -> list[int]:
    """The exit codes of runs that are started one by one as this is iterated.

    It ends after a run that was stopped on request: whoever stops one run means those after it too.
    """
    collected: list[int] = []
    for code in codes:
        collected.append(code)
        if code in (Exit.PREEMPTED, Exit.INTERRUPTED):
            break
    return collected


# --- parts of the steps that several launchers share ---


def read_launch_secrets(config: Config, dry_run: bool) -> dict[str, str]:
    """The variables of `launch.secrets`; empty if there is no such file, and in a dry run."""
    if not config.launch.secrets or dry_run:
        return {}
    from echelon.config.defaults_files import read_secrets

    return read_secrets(config.launch.secrets)


def find_batch_faults(config: Config, plan: LaunchPlan) -> list[Fault]:
    """The fault of a global batch with fewer samples than there are processes."""
    if config.program:
        return []
    fault = check_batch_size(config.trainer.batch_size, len(plan.places))
    return [fault] if fault else []


def find_fsdp_faults(config: Config, plan: LaunchPlan) -> list[Fault]:
    """The fault of replica.kind=fsdp with a single process."""
    fault = check_fsdp_world_size(config, len(plan.places))
    return [fault] if fault else []


def require_not_running(config: Config) -> None:
    """Refuse a run that another process is working on: both would write over each other's
    snapshots."""
    run = Run.from_config(config)
    status = run.read_status() if config.run.name else {}
    is_active = status.get("state") in ("starting", "running")
    if is_active and is_alive(status.get("process")):
        raise EchelonError(
            Fault(
                f"run {run.name} is running already, as process {status['process']['pid']}",
                f"follow it with `echelon attach {run.name}`, or end it with "
                f"`echelon cancel {run.name}`",
            )
        )


def require_preflight(config: Config, services: LaunchServices) -> None:
    """With launch.preflight=true, check the nodes from here and raise if one is not ready."""
    if not config.launch.preflight:
        return
    code = services.run_preflight(config)
    if code != Exit.OK:
        raise EchelonError(
            Fault(
                "launch.preflight=true, and the machines are not ready: see above",
                "fix what failed, or start without launch.preflight",
            ),
            exit=Exit(code),
        )


def warn_of_other_users(config: Config, plan: LaunchPlan) -> None:
    """Print who else computes on the devices of the plan: two trainings on one device are slow, or
    one of them runs out of memory."""
    devices = [device for place in plan.places for device in place.devices]
    if not any(device.startswith("cuda") for device in devices):
        return
    from echelon.gpus.availability import describe_other_users

    for line in describe_other_users(devices, os.environ, config.launch.share_devices):
        print(f"warning: {line}", file=sys.stderr, flush=True)
