"""launch=slurm: a batch job of any number of nodes, which queues again until the run is done."""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from echelon.config.schema import Config
from echelon.errors import EchelonError, ExitCode, Fault
from echelon.launch import network_interface
from echelon.launch.containers.check import require_container_for_jobs
from echelon.launch.containers.command import (
    describe_container,
    make_srun_options,
    pin_runtime,
    wrap_python,
)
from echelon.launch.launcher import (
    Launcher,
    LaunchServices,
    read_launch_secrets,
    require_no_writer,
)
from echelon.launch.node.service import make_thread_variables
from echelon.launch.plan import (
    LaunchPlan,
    LocalMachine,
    NodeReport,
    NodeSpec,
    ProbeCommand,
    ProbePlan,
    describe_failure_policy,
    describe_node_policy,
    describe_program_or_experiment,
    place_ranks,
)
from echelon.launch.slurm import batch_script, requeue
from echelon.launch.slurm.dependency import resolve_dependencies, resolve_dependency
from echelon.launch.slurm.job_array import submit_arrays
from echelon.launch.slurm.sbatch import (
    queue_run,
    require_sbatch,
    require_slurm_accepts,
)
from echelon.runs.create import assign_name
from echelon.runs.failure import Failure
from echelon.runs.run_folder import Run
from echelon.runs.slurm_queue import read_current_job_id
from echelon.utils.files import write_json_atomically
from echelon.utils.text import print_to_stderr

_PROBE_JOB_NAME = "echelon-preflight"


class SlurmLauncher(Launcher):
    """Runs a training as a batch job. The command ends when the job is queued, unless `--wait` is
    given."""

    name = "slurm"
    leaves_exit_code = True
    queue = "Slurm's queue"
    needs_shared_folder = True
    finds_node_0_by_name = True
    has_one_agent_per_host = True
    agents_print_to_screen = False

    def complete_config(self, config: Config, dry_run: bool) -> Config:
        """Name the run, find the jobs that it waits for, and check that the secrets can be read.

        The job reads them itself, so that they are in no script, no log and not in the queue.
        """
        read_launch_secrets(config, dry_run)
        return resolve_dependency(pin_runtime(assign_name(config)))

    def plan(self, config: Config, machine: LocalMachine) -> LaunchPlan:
        launch = config.launch
        assert config.run.name is not None
        run = Run(Path(config.run.dir).absolute() / config.run.name)
        procs = batch_script.count_processes_per_node(config)
        nodes = [f"node {n}" for n in range(launch.nodes)]
        queued = "" if config.program else "; it is queued again"
        submit = ("sbatch", "--parsable", str(run.script_file))
        total = launch.nodes + launch.spares
        each = f"srun starts one agent on each of {total} node{'s' * (total > 1)}"
        if batch_script.is_started_by_srun(config):
            tasks = batch_script.count_tasks_per_node(config, procs)
            each = f"srun starts {tasks} on each of {launch.nodes} nodes"
        return LaunchPlan(
            self.name,
            place_ranks(nodes, [procs] * launch.nodes, launch.gpu_count, config),
            _plan_variables(config, procs, machine),
            (
                f"write {run.script_file}",
                shlex.join(submit),
                *([f"wait for jobs: {launch.after} (launch.after)"] if launch.after else ()),
                *describe_container(config),
                f"{each}: {describe_program_or_experiment(config)}",
                describe_failure_policy(config, launch.nodes * procs),
                *describe_node_policy(config, launch.nodes, queued),
                f"{launch.signal_lead_s} s before the end of its time the run saves, and the "
                "script queues it again",
            ),
            (submit,),
            batch_script.render_script(config, run),
        )

    def find_config_faults(
        self, config: Config, plan: LaunchPlan, machine: LocalMachine
    ) -> list[Fault]:
        """Also a container in which the notice of Lightning's jobs would end what watches it."""
        faults = super().find_config_faults(config, plan, machine)
        is_lightning = bool(config.program) and config.mode == "lightning"
        if is_lightning and batch_script.get_warning_signal(config) == "TERM":
            faults.append(
                Fault(
                    "mode=lightning queues itself again at USR1, which ends podman's monitor of a "
                    "container",
                    "use another launch.container_runtime, or mode=srun",
                )
            )
        return faults

    def check(self, config: Config, plan: LaunchPlan, services: LaunchServices) -> None:
        """Ask Slurm before anything is written. launch.preflight is done by the batch script, on
        the nodes that the job was given."""
        require_no_writer(config)
        require_sbatch()
        require_container_for_jobs(config)
        require_slurm_accepts(plan.script)
        if config.notify.to and batch_script.is_started_by_srun(config):
            print_to_stderr(
                f"warning: notify: with mode={config.mode} Slurm itself starts the processes, so "
                "only --wait, attach and jobs --watch tell how the job ends"
            )

    def start(self, config: Config, plan: LaunchPlan, services: LaunchServices) -> int:
        job, run = queue_run(config, plan.script)
        print(f"job {job}: run {run.name} in {run.folder}")
        return ExitCode.OK

    def follow(self, config: Config, code: int, wait: bool, services: LaunchServices) -> int:
        """Print how to follow the job or, if asked to wait, follow it to its end."""
        return services.follow_queued_run(config, wait)

    def start_multirun(
        self, configs: Sequence[Config], dry_run: bool, start_run: Callable[[Config, bool], int]
    ) -> int:
        """Submit all runs as one job array, or as few arrays as the limits of the cluster allow."""
        read_launch_secrets(configs[0], dry_run)
        if not dry_run:
            require_container_for_jobs(configs[0])
        return submit_arrays(complete_array_configs(configs), dry_run)

    def read_node_rank(self, env: Mapping[str, str]) -> int:
        """Return the number of the node in the step that srun made of this process."""
        return int(env.get("SLURM_NODEID", "0"))

    def get_max_nodes(self, node: NodeSpec) -> None:
        """As many as the queue gives: further ones are a job of their own."""

    def get_planned_procs(self, config: Config) -> int | None:
        return batch_script.count_processes_per_node(config)

    def record_node_start(self, run: Run, node_count: int, world_size: int) -> None:
        """Add what only the job knows. The launching command has written the rest, unless the
        script was submitted by hand, with sbatch."""
        job = read_current_job_id(os.environ)
        run.update_status(launcher=self.name, job=job, world=world_size)

    def record_nodes(self, run: Run, report: NodeReport) -> None:
        """Write it for `echelon return-nodes`, which the batch script runs."""
        with contextlib.suppress(OSError):  # the disk may be full; then no node comes back
            write_json_atomically(run.node_report_file, report._asdict())

    def get_stop_limit_s(self, config: Config) -> float:
        return config.launch.signal_lead_s

    def count_restarts_left(self, run: Run, config: Config) -> int:
        """Return the restarts that are left over all jobs of the run, requeued ones included."""
        return requeue.record_start(run, config.launch)

    def record_failure(self, run: Run, config: Config, failure: Failure) -> None:
        """Write the failure into the status, and decide whether the batch script requeues the
        run."""
        super().record_failure(run, config, failure)
        requeue.request_requeue_if_node_lost(run, config.launch, failure)

    def plan_probes(
        self, config: Config, env: Mapping[str, str], probe: Sequence[str]
    ) -> ProbePlan:
        """Use the allocation that this process is in; else srun asks for one, as the job would."""
        if shutil.which("srun") is None:
            raise EchelonError(
                Fault(
                    "launch=slurm, but there is no srun on this machine's PATH",
                    "type the command on a login node",
                )
            )
        launch = config.launch
        is_in_allocation = "SLURM_JOB_ID" in env
        if is_in_allocation:
            nodes, options = int(env.get("SLURM_NNODES") or launch.nodes), ["--overlap"]
        else:
            # Ask Slurm first: srun would wait for ever for nodes that do not exist.
            named = assign_name(replace(config, launch=replace(launch, after=None)))
            folder = Path(named.run.dir).absolute() / str(named.run.name)
            require_slurm_accepts(batch_script.render_script(named, Run(folder)))
            nodes = launch.nodes + launch.spares
            options = [
                *batch_script.make_srun_allocation_options(config),
                f"--job-name={_PROBE_JOB_NAME}",
            ]
        shape = [f"--nodes={nodes}", "--ntasks-per-node=1", "--export=ALL", "--unbuffered"]
        options += make_srun_options(config)
        words = wrap_python(config, [probe[0], "-u", *probe[1:], "SLURM_PROCID"])
        if launch.setup and not is_in_allocation:
            words = ["bash", "-c", "\n".join([*launch.setup, f"exec {shlex.join(words)}"])]
        return ProbePlan(
            [f"node {n}" for n in range(nodes)],
            [batch_script.count_processes_per_node(config)] * nodes,
            [ProbeCommand(["srun", *options, *shape, *words], range(nodes))],
            is_queued=not is_in_allocation,
        )

    def suggest_after_failed_probe(self) -> str:
        return "compare launch.nodes, partition, account and sbatch with `sinfo -o '%P %D %c %G'`"

    def suggest_after_probe_timeout(self, config: Config) -> str:
        return "see `squeue` and `sinfo`, or wait longer with --wait SECONDS"

    def find_own_address(self, node_count: int, env: Mapping[str, str]) -> str:
        """Return the address on the route to the host of srun, which all nodes reach."""
        if node_count == 1:
            return "127.0.0.1"
        if towards := env.get("SLURM_SRUN_COMM_HOST"):
            return network_interface.find_local_address(towards) or "127.0.0.1"
        return network_interface.find_default_route_address() or "127.0.0.1"

    def choose_master_port(self, env: Mapping[str, str]) -> int:
        """Return the port of the job's own, as the batch script computes it."""
        job = env.get("SLURM_JOB_ID", "")
        return batch_script.FIRST_PORT + int(job) % batch_script.PORTS if job.isdecimal() else 0


def complete_array_configs(configs: Sequence[Config]) -> list[Config]:
    """Return the configurations of runs that are submitted together, with the jobs that they wait
    for and the container runtime of this cluster."""
    return [*map(pin_runtime, resolve_dependencies(configs))]


def _plan_variables(config: Config, procs: int, machine: LocalMachine) -> dict[str, str]:
    """Return the variables that a plan shows. Agents choose the interface; tasks of srun get only
    one that was set."""
    chosen = config.launch.interface
    if batch_script.is_started_by_srun(config):
        return dict.fromkeys(network_interface.INTERFACE_VARIABLES, chosen) if chosen else {}
    return make_thread_variables(
        config, procs, machine.env
    ) | network_interface.plan_interface_variables(chosen, machine.env)
