"""How a station is started on each of the nodes that a job would use."""

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
from echelon.runs import run_folder
from echelon.runs.run_folder import Run

_PROBE_ARGV = (sys.executable, "-m", "echelon.preflight.node_probe")
START_TIMEOUT_S = 60.0
"""Of a login and of Python, on a busy machine."""


class ProbePlan(NamedTuple):
    names: list[str]
    """Of the nodes, as they were typed; with Slurm they are known once they are there."""
    procs: list[int | None]
    """Processes on each; None: one per device."""
    commands: list[ProbeCommand]
    devices: int = 1
    """Of one process."""


def plan_probes(config: Config, env: Mapping[str, str]) -> ProbePlan:
    return _plan_for_launcher(config, env)._replace(devices=config.replica.devices)


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
            "launch=env starts nothing on other nodes, so they cannot be asked from here",
            "type `echelon doctor` on each, or name them: launch=ssh 'launch.hosts=[a,b]'",
        )
    )


def _plan_over_ssh(config: Config, env: Mapping[str, str]) -> ProbePlan:
    require_ssh(config.launch.ssh, "launch.ssh")
    hosts = list_hosts(config.launch)
    first = remote_command.encode_variables(
        remote_command.select_variables(env, config.launch.carry)
    )
    where = (os.getcwd(), "/")
    return ProbePlan(
        [host.name for host in hosts],
        [host.procs for host in hosts],
        [
            ProbeCommand(
                remote_command.make_argv(
                    config.launch, host.name, where, [*_PROBE_ARGV, str(node)]
                ),
                [node],
                first,
            )
            for node, host in enumerate(hosts)
        ],
    )


def _plan_by_srun(config: Config, env: Mapping[str, str]) -> ProbePlan:
    """In the allocation that this process is in; else srun asks for one, as the job would."""
    if shutil.which("srun") is None:
        raise EchelonError(
            Fault(
                "launch=slurm, but there is no srun on this machine's PATH",
                "type the command on a login node",
            )
        )
    launch = config.launch
    inside = "SLURM_JOB_ID" in env
    if not inside:  # srun would wait for nodes that there will never be
        named = run_folder.assign_name(config)
        folder = Path(named.run.dir).absolute() / str(named.run.name)
        require_slurm_accepts(render_script(named, Run(folder)))
    nodes = int(env.get("SLURM_NNODES") or launch.nodes) if inside else launch.nodes
    options = ["--overlap"] if inside else [*srun_options(config), f"--job-name={_JOB_NAME}"]
    shape = [f"--nodes={nodes}", "--ntasks-per-node=1", "--export=ALL", "--unbuffered"]
    station = [sys.executable, "-u", *_PROBE_ARGV[1:]]
    if launch.setup and not inside:
        station = ["bash", "-c", "\n".join([*launch.setup, f"exec {shlex.join(station)}"])]
    command = ProbeCommand(["srun", *options, *shape, *station], range(nodes))
    return ProbePlan(
        [f"node {n}" for n in range(nodes)], [count_processes_per_node(config)] * nodes, [command]
    )


_JOB_NAME = "echelon-preflight"


def explain_missing_node(
    config: Config, name: str, probe_exit: ProbeExit | None, limit_s: float
) -> Fault:
    """Of a node whose station did not come up."""
    if config.launch.kind == "ssh" and probe_exit:
        host = SshHost(name, None)
        return explain_ssh_failure(
            config.launch, host, sys.executable, probe_exit.code, probe_exit.output
        )
    if probe_exit:
        words = join_last_lines(probe_exit.output) or f"exit code {probe_exit.code}"
        return Fault(f"no check could be started on {name}: {words}", _suggest_check(config))
    return Fault(f"{name} was not there within {limit_s:g} s", _suggest_wait(config))


def _suggest_check(config: Config) -> str:
    if config.launch.kind == "slurm":
        return "compare launch.nodes, partition, account and sbatch with `sinfo -o '%P %D %c %G'`"
    return "echelon doctor"


def _suggest_wait(config: Config) -> str:
    if config.launch.kind == "slurm":
        return "look at `squeue` and `sinfo`, or wait longer with --wait SECONDS"
    return f"look whether `{config.launch.ssh} HOST true` ends"
