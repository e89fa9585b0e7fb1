"""How a station is started on each of the nodes that a job would use."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from echelon import runs
from echelon.check.conduct import Command, Gone
from echelon.config.schema import Config
from echelon.errors import EchelonError, Fault
from echelon.launch.slurm.launcher import require_accepted
from echelon.launch.slurm.script import processes, render, srun_options
from echelon.launch.ssh import remote
from echelon.launch.ssh.hosts import Host, listed
from echelon.launch.ssh.survey import refusal
from echelon.runs import Run

_STATION = (sys.executable, "-m", "echelon.check.station")
START_S = 60.0
"""Of a login and of Python, on a busy machine."""


class Places(NamedTuple):
    names: list[str]
    """Of the nodes, as they were typed; with Slurm they are known once they are there."""
    procs: list[int | None]
    """Processes on each; None: one per device."""
    commands: list[Command]
    devices: int = 1
    """Of one process."""


def stations(config: Config, env: Mapping[str, str]) -> Places:
    return _places(config, env)._replace(devices=config.replica.devices)


def _places(config: Config, env: Mapping[str, str]) -> Places:
    launch = config.launch
    if launch.kind in ("inline", "local"):
        return Places(["this machine"], [launch.procs], [Command([*_STATION, "0"], [0])])
    if launch.kind == "ssh":
        return _over_ssh(config, env)
    if launch.kind == "slurm":
        return _by_srun(config, env)
    raise EchelonError(
        Fault(
            "launch=env starts nothing on other nodes, so they cannot be asked from here",
            "type `echelon doctor` on each, or name them: launch=ssh 'launch.hosts=[a,b]'",
        )
    )


def _over_ssh(config: Config, env: Mapping[str, str]) -> Places:
    remote.require_ssh(config.launch)
    hosts = listed(config.launch)
    first = remote.first_line(remote.carried(env, config.launch.carry))
    where = (os.getcwd(), "/")
    return Places(
        [host.name for host in hosts],
        [host.procs for host in hosts],
        [
            Command(
                remote.argv(config.launch, host.name, where, [*_STATION, str(node)]), [node], first
            )
            for node, host in enumerate(hosts)
        ],
    )


def _by_srun(config: Config, env: Mapping[str, str]) -> Places:
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
        named = runs.named(config)
        folder = Path(named.run.dir).absolute() / str(named.run.name)
        require_accepted(render(named, Run(folder)))
    nodes = int(env.get("SLURM_NNODES") or launch.nodes) if inside else launch.nodes
    options = ["--overlap"] if inside else [*srun_options(config), f"--job-name={_JOB}"]
    shape = [f"--nodes={nodes}", "--ntasks-per-node=1", "--export=ALL", "--unbuffered"]
    station = [sys.executable, "-u", *_STATION[1:]]
    if launch.setup and not inside:
        station = ["bash", "-c", "\n".join([*launch.setup, f"exec {shlex.join(station)}"])]
    command = Command(["srun", *options, *shape, *station], range(nodes))
    return Places([f"node {n}" for n in range(nodes)], [processes(config)] * nodes, [command])


_JOB = "echelon-preflight"


def why_absent(config: Config, name: str, gone: Gone | None, limit_s: float) -> Fault:
    """Of a node whose station did not come up."""
    if config.launch.kind == "ssh" and gone:
        host = Host(name, None)
        return refusal(config.launch, host, sys.executable, gone.code, gone.said)
    if gone:
        words = remote.last_words(gone.said) or f"exit code {gone.code}"
        return Fault(f"no check could be started on {name}: {words}", _look(config))
    return Fault(f"{name} was not there within {limit_s:g} s", _wait(config))


def _look(config: Config) -> str:
    if config.launch.kind == "slurm":
        return "compare launch.nodes, partition, account and sbatch with `sinfo -o '%P %D %c %G'`"
    return "echelon doctor"


def _wait(config: Config) -> str:
    if config.launch.kind == "slurm":
        return "look at `squeue` and `sinfo`, or wait longer with --wait SECONDS"
    return f"look whether `{config.launch.ssh} HOST true` ends"
