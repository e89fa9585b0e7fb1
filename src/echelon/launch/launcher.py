"""What a launcher is: four steps from a configuration to a run, the same for every launcher.

    plan    what will happen, as a value; nothing is touched, so `--dry-run` can print it
    check   what has to hold before anything is written or started
    start   the run itself, or the queueing of its job
    follow  what the command does after `start`: nothing, or watching a job to its end

`echelon.entrypoint.start_run` calls the steps in this order and knows no launcher by name. Neither
do the agents of a node (`launch/node/`) and `preflight`: what differs between launchers there is a
value or a method of :class:`Launcher` too, below the four steps, with a default for most.

To add a launcher NAME:

1. Write `launch/NAME_launcher.py` with a subclass of :class:`Launcher`; `local_launcher.py` is
   the shortest example. A launcher that starts processes on a node ends in
   `launch.node.service.run_node`.
2. Add its line to `launch/registry.py`.
3. Add `conf/launch/NAME.yaml` with `kind: NAME`, and NAME to `config.schema.LAUNCHERS`, so that
   `launch=NAME` can be typed. `tests/launch/test_registry.py` says what is missing.
4. Add it to `LAUNCHERS` of `tests/cluster/test_contract.py`, the suite that every launcher passes;
   there it is said why `k8s` cannot be.
"""

from __future__ import annotations

import os
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import ClassVar

from echelon.config.schema import Config
from echelon.config.validate import find_size_faults
from echelon.errors import EchelonError, ExitCode, Fault
from echelon.launch.plan import (
    LaunchPlan,
    LocalMachine,
    NodeReport,
    NodeSpec,
    ProbeExit,
    ProbePlan,
)
from echelon.runs.failure import Failure
from echelon.runs.process_record import make_starting_status
from echelon.runs.run_folder import Run
from echelon.runs.writer import find_writer, make_writer_error


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
    trains_in_process: ClassVar[bool] = False
    """Whether `start` trains in the process that calls it, and starts no other one."""
    has_compared_devices: ClassVar[bool] = False
    """Whether `start` has compared the devices of the nodes, so that the agents need not."""
    leaves_exit_code: ClassVar[bool] = False
    """Whether node 0 writes its exit code into the run folder. The batch script needs it: srun
    returns the code of the worst node, perhaps of a lost one."""
    queue: ClassVar[str] = ""
    """Where a job waits for its nodes, in words; empty if the nodes are there from the start."""
    needs_shared_folder: ClassVar[bool] = False
    """Whether all nodes must see the folder of the run."""
    finds_node_0_by_name: ClassVar[bool] = False
    """Whether ranks receive the host name of node 0 instead of its address. The name then has to
    resolve on every node."""
    is_followed_by_folder: ClassVar[bool] = True
    """Whether the folder of a run that was queued is to be seen where it was typed, so that what
    becomes of the run is read there."""
    has_one_agent_per_host: ClassVar[bool] = False
    """Whether no two agents of a start share a host. One that is started there again then waits
    until the lost one has ended."""
    agents_print_to_screen: ClassVar[bool] = True
    """Whether somebody sees what agents print. In a job it is a log beside those of the ranks."""
    command_holds_folder: ClassVar[bool] = False
    """Whether the command that launched the run is the writer of its folder while agents run
    elsewhere; see `runs/writer.py`. Otherwise node 0 is."""

    def complete_config(self, config: Config, dry_run: bool) -> Config:
        """Complete the configuration before it is planned: names and secrets.

        By default the variables of `launch.secrets` are set in this process, whose workers inherit
        them. A dry run does not read them.
        """
        os.environ.update(read_launch_secrets(config, dry_run))
        return config

    @abstractmethod
    def plan(self, config: Config, machine: LocalMachine) -> LaunchPlan:
        """Return what will happen. Pure: it asks no GPU, no Slurm and no network."""

    def find_config_faults(
        self, config: Config, plan: LaunchPlan, machine: LocalMachine
    ) -> list[Fault]:
        """Return the faults of settings that contradict the plan, such as a batch smaller than the
        world. A dry run reports them too."""
        return find_size_faults(config, len(plan.places))

    def check_trackers(self, config: Config, plan: LaunchPlan, machine: LocalMachine) -> None:
        """Raise if rank 0 will be started from here and a tracker that was asked for cannot run. In
        a container, other packages are installed than here."""
        from echelon.tracking.create import require_trackers

        has_own_packages = bool(config.program) or config.launch.container is not None
        if not has_own_packages and plan.places[0].rank == 0:
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
        return max(collect_exit_codes(start_run(config, dry_run) for config in configs))

    # --- on a node: asked by `launch/node/` in the processes that carry out the plan ---

    def read_node_rank(self, env: Mapping[str, str]) -> int:
        """Return the number of this node, where `echelon node` was not given it."""
        return 0

    def get_planned_procs(self, config: Config) -> int | None:
        """Processes on each node as planned; None means one per replica that its devices hold."""
        return config.launch.procs

    def get_max_nodes(self, node: NodeSpec) -> int | None:
        """Return to how many nodes a run that trains can be scaled; None: there is no limit. It is
        called on a node. By default, 0: nobody starts further nodes."""
        return 0

    def record_node_start(self, run: Run, node_count: int, world_size: int) -> None:
        """Write the start of the run into its status, on node 0, before the workers start."""
        run.update_status(**make_starting_status(self.name, node_count, world_size))

    def record_nodes(self, run: Run, report: NodeReport) -> None:  # noqa: B027  not all need it
        """Write down which nodes go on and which ones are lost, after each change, on the node that
        leads. By default nobody reads it."""

    def get_stop_limit_s(self, config: Config) -> float | None:
        """Return how long after the request to stop everything has to be over; None: nobody says.
        What still runs then is killed."""
        return None

    def count_restarts_left(self, run: Run, config: Config) -> int:
        """Return how often the workers may be restarted. It is called once, on node 0."""
        return config.launch.max_restarts

    def record_failure(self, run: Run, config: Config, failure: Failure) -> None:
        """Write the first failure of the world into the status of the run."""
        run.update_status(state="failed", step=failure.step, failure=asdict(failure))

    # --- preflight: how the nodes of a job are reached before there is a job ---

    def plan_probes(
        self, config: Config, env: Mapping[str, str], probe: Sequence[str]
    ) -> ProbePlan:
        """Return how a probe is started on every node: `probe`, a command of this interpreter,
        followed by the number of the node or by the name of a variable that holds it.

        By default there is no way, which is a fault.
        """
        raise EchelonError(
            Fault(
                f"launch={self.name} starts nothing on other nodes, so they cannot be checked from "
                "here",
                "type `echelon doctor` on each, or name them: launch=ssh 'launch.hosts=[a,b]'",
            )
        )

    def explain_failed_probe(
        self, config: Config, node_name: str, probe_exit: ProbeExit
    ) -> Fault | None:
        """Return the fault of a node on which no probe could be started.

        With None, the report shows the last output of the command and `suggest_after_failed_probe`.
        """
        return None

    def suggest_after_failed_probe(self) -> str:
        """Return what to do about a node on which no probe could be started."""
        return "echelon doctor"

    def suggest_after_probe_timeout(self, config: Config) -> str:
        """Return what to do about a node whose probe did not start in time."""
        return "echelon doctor"

    def find_own_address(self, node_count: int, env: Mapping[str, str]) -> str:
        """Return the address at which the other nodes reach this one. It is called on the node."""
        return "127.0.0.1"

    def choose_master_port(self, env: Mapping[str, str]) -> int:
        """Return the port that node 0 will listen on; 0 means any free port. It is called on node
        0."""
        return 0


def collect_exit_codes(codes: Iterable[int]) -> list[int]:
    """Return the exit codes of runs; each run is started when its code is taken from `codes`.

    No further run is started after one that was stopped on request: a user who stops one run means
    the rest too.
    """
    collected: list[int] = []
    for code in codes:
        collected.append(code)
        if code in (ExitCode.PREEMPTED, ExitCode.INTERRUPTED):
            break
    return collected


# --- parts of the steps that several launchers share ---


def read_launch_secrets(config: Config, dry_run: bool) -> dict[str, str]:
    """Return the variables of `launch.secrets`; empty if there is no such file, and in a dry
    run."""
    if not config.launch.secrets or dry_run:
        return {}
    from echelon.config.defaults_files import read_secrets

    return read_secrets(config.launch.secrets)


def require_no_writer(config: Config) -> None:
    """Refuse a run that somebody else writes, before anything that takes long is begun. That it
    stays so is made sure by create_run()."""
    if not config.run.name:
        return
    run = Run.from_config(config)
    if writer := find_writer(run):
        raise make_writer_error(run, writer)


def require_preflight(config: Config, services: LaunchServices) -> None:
    """With launch.preflight=true, check the nodes from here and raise if one is not ready."""
    if not config.launch.preflight:
        return
    code = services.run_preflight(config)
    if code != ExitCode.OK:
        raise EchelonError(
            Fault(
                "launch.preflight=true, and the machines are not ready: see above",
                "fix what failed, or start without launch.preflight",
            ),
            exit=ExitCode(code),
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
