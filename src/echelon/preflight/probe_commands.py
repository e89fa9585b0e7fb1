"""The commands that start a probe on each of the nodes that a job would use."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from echelon.config.schema import Config
from echelon.errors import EchelonError, Fault
from echelon.hosts.ask import join_last_lines
from echelon.hosts.ssh import require_ssh
from echelon.launch.slurm.batch_script import count_processes_per_node, render_script, srun_options
from echelon.launch.slurm.launcher import require_slurm_accepts
from echelon.launch.ssh import remote_command
from echelon.launch.ssh.host_check import explain_ssh_failure
from echelon.launch.ssh.host_list import SshHost, list_hosts
from echelon.preflight.probe_client import ProbeCommand, ProbeExit
from echelon.runs.create import assign_name
from echelon.runs.run_folder import Run

_PROBE_ARGV = (sys.executable, "-m", "echelon.preflight.node_probe")
_JOB_NAME = "echelon-preflight"
START_TIMEOUT_S = 60.0
"""How long a login and the start of Python may take on a busy machine."""


class ProbePlan(NamedTuple):
    """The nodes of a job and the commands that start their probes."""

    names: list[str]
    """Of the nodes as they are configured; with Slurm only the probes know the real names."""
    procs: list[int | None]
    """Processes on each node; None means one per device."""
    commands: list[ProbeCommand]
    devices_per_process: int = 1


def plan_probes(config: Config, env: Mapping[str, str]) -> ProbePlan:
    """Return the plan for the launcher of a configuration; launch=env is a fault."""
    return _plan_for_launcher(config, env)._replace(devices_per_process=config.replica.devices)


def _plan_for_launcher(config: Config, env: Mapping[str, str]) -> ProbePlan:
    launch = config.launch
    if launch.kind in ("inline", "local"):
        return ProbePlan(["this machine"], [launch.procs], [ProbeCommand([*_PROBE_ARGV, "0"], [0])])
    if launch.kind == "ssh":
        return _plan_over_ssh(config, env)
    if launch.kind == "slurm":
        return _plan_by_srun(config, env)
    raise EchelonError(
        Fault(
            "launch=env starts nothing on other nodes, so they cannot be checked from here",
            "type `echelon doctor` on each, or name them: launch=ssh 'launch.hosts=[a,b]'",
        )
    )


def _plan_over_ssh(config: Config, env: Mapping[str, str]) -> ProbePlan:
    require_ssh(config.launch.ssh, "launch.ssh")
    hosts = list_hosts(config.launch)
    variables = remote_command.encode_variables(
        remote_command.select_variables(env, config.launch.carry)
    )
    folders = (os.getcwd(), "/")
    return ProbePlan(
        [host.name for host in hosts],
        [host.procs for host in hosts],
        [
            ProbeCommand(
                remote_command.make_argv(
                    config.launch, host.name, folders, [*_PROBE_ARGV, str(node)]
                ),
                [node],
                variables,
            )
            for node, host in enumerate(hosts)
        ],
    )


def _plan_by_srun(config: Config, env: Mapping[str, str]) -> ProbePlan:
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
        named = assign_name(config)
        folder = Path(named.run.dir).absolute() / str(named.run.name)
        require_slurm_accepts(render_script(named, Run(folder)))
        nodes, options = launch.nodes, [*srun_options(config), f"--job-name={_JOB_NAME}"]
    shape = [f"--nodes={nodes}", "--ntasks-per-node=1", "--export=ALL", "--unbuffered"]
    probe = [sys.executable, "-u", *_PROBE_ARGV[1:]]
    if launch.setup and not is_in_allocation:
        probe = ["bash", "-c", "\n".join([*launch.setup, f"exec {shlex.join(probe)}"])]
    command = ProbeCommand(["srun", *options, *shape, *probe], range(nodes))
    return ProbePlan(
        [f"node {n}" for n in range(nodes)], [count_processes_per_node(config)] * nodes, [command]
    )


def explain_missing_node(
    config: Config, name: str, probe_exit: ProbeExit | None, limit_s: float
) -> Fault:
    """Return the fault for a node whose probe did not start; no exit means that it still runs."""
    if config.launch.kind == "ssh" and probe_exit:
        host = SshHost(name, None)
        return explain_ssh_failure(
            config.launch, host, sys.executable, probe_exit.code, probe_exit.output
        )
    if probe_exit:
        reason = join_last_lines(probe_exit.output) or f"exit code {probe_exit.code}"
        return Fault(f"no check could be started on {name}: {reason}", _suggest_check(config))
    return Fault(f"{name} did not start within {limit_s:g} s", _suggest_wait(config))


def _suggest_check(config: Config) -> str:
    if config.launch.kind == "slurm":
        return "compare launch.nodes, partition, account and sbatch with `sinfo -o '%P %D %c %G'`"
    return "echelon doctor"


def _suggest_wait(config: Config) -> str:
    if config.launch.kind == "slurm":
        return "see `squeue` and `sinfo`, or wait longer with --wait SECONDS"
    return f"check whether `{config.launch.ssh} HOST true` ends"
