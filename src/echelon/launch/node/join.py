"""`echelon node`: this machine as one node of a run that another machine planned."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

from echelon.config.schema import Config
from echelon.errors import EchelonError, ExitCode, Fault
from echelon.gpus import count_visible_gpus
from echelon.launch.launcher import Launcher
from echelon.launch.node.host_lock import lock_host
from echelon.launch.node.invitation import wait_for_invitation
from echelon.launch.node.service import (
    make_network_variables,
    make_thread_variables,
    print_failure,
    run_node,
)
from echelon.launch.plan import NodeReport, NodeSpec, ReportNodes
from echelon.launch.registry import make_launcher
from echelon.runs.failure import Failure
from echelon.runs.run_folder import Run
from echelon.runs.writer import claim_run_folder
from echelon.world.device_fit import find_visible_fit_fault, get_default_process_count
from echelon.world.network_key import KEY_VARIABLE

_LOST_AGENT_LIMIT_S = 60.0
"""How long an agent that was cut off may take to end itself: it holds an election first."""


def join_run(
    folder: str,
    nodes: int,
    find_master: Callable[[], str],
    rank: int | None = None,
    procs: int | None = None,
    on_port: Callable[[int], None] | None = None,
    report_failure: Callable[[Failure], None] = print_failure,
    report_nodes: ReportNodes = lambda report: None,
    is_added: bool = False,
) -> int:
    """Take part in the run of this folder as one of `nodes` nodes, spares included; returns the
    exit code of the run.

    `find_master` returns HOST:PORT of node 0, and may wait until that is known. `rank` is the
    number of this node; by default the launcher reads it from the variables. `on_port` is called
    with the port of the leader's store once it is open, `report_failure` with the first failure of
    the world, and `report_nodes` with the nodes that go on where one is gone, each on the leader.
    """
    run = Run(Path(folder))
    if not run.config_file.exists():
        raise EchelonError(
            Fault(
                f"the run folder {folder} is not to be seen on {socket.gethostname()}",
                "give a folder that all nodes share with run.dir=PATH",
            ),
            exit=ExitCode.NOT_FOUND,
        )
    config = run.read_launch_config()
    launcher = make_launcher(config)
    if rank is None:
        rank = launcher.read_node_rank(os.environ)
    host_lock = None
    if launcher.has_one_agent_per_host and not is_added:
        host_lock = lock_host(os.environ, _LOST_AGENT_LIMIT_S if rank >= nodes else 0.0)
    procs = _count_processes(launcher, config, rank, procs, os.environ)
    os.environ |= make_thread_variables(config, procs, os.environ)
    host, _, port = find_master().rpartition(":")
    spares = config.launch.spares
    node = NodeSpec(rank, nodes - spares, procs, host.strip("[]"), int(port), spares, is_added)
    os.environ |= make_network_variables(config, node.master_host, os.environ)

    def report_to_launcher(report: NodeReport) -> None:
        launcher.record_nodes(run, report)
        report_nodes(report)

    with host_lock or contextlib.nullcontext():
        return run_node(
            launcher,
            config,
            node,
            lambda store, ask: _claim_on_node_0(run, launcher, rank),
            on_port,
            report_failure,
            partial(_record_exit_code, run) if launcher.leaves_exit_code else lambda code: None,
            report_to_launcher,
        )


def join_later(folder: str, first_node: int) -> int:
    """Take part in a run that trains already, as a node of a further job; returns the exit code.
    Its nodes have the numbers from `first_node` on."""
    invitation = wait_for_invitation(Run(Path(folder)))
    os.environ[KEY_VARIABLE] = invitation.key
    rank = first_node + int(os.environ.get("SLURM_NODEID", "0"))
    return join_run(folder, invitation.nodes, lambda: invitation.master, rank, is_added=True)


def _claim_on_node_0(run: Run, launcher: Launcher, rank: int) -> Run:
    """Return the run, once node 0 is the writer of its folder, or the command that launched it."""
    if rank == 0:
        claim_run_folder(run, shares_with_command=launcher.command_holds_folder)
    return run


def _record_exit_code(run: Run, code: int) -> None:
    """Leave the exit code of the run in its folder, on the node that leads.

    What started the nodes, such as `srun`, returns that of the worst node, which may be one that
    was killed.
    """
    with contextlib.suppress(OSError):
        run.agent_exit_file.write_text(f"{code:d}\n", encoding="utf-8")


def _count_processes(
    launcher: Launcher, config: Config, rank: int, procs: int | None, env: Mapping[str, str]
) -> int:
    """Return how many processes this node gets: as given, as planned, or by its devices.

    Raises an :class:`EchelonError` where they do not fit onto the devices that are visible here:
    a node may have fewer than the one on which the plan was made.
    """
    launch, visible_devices = config.launch, count_visible_gpus(env)
    procs_known = procs or launcher.get_planned_procs(config)
    devices_per_replica = config.replica.devices
    if config.program and config.mode == "plain":
        procs_known, devices_per_replica = 1, 1
    location = f" on {socket.gethostname()} (node {rank})"
    if fault := find_visible_fit_fault(
        visible_devices, devices_per_replica, procs_known, launch.share_devices, location
    ):
        raise EchelonError(fault)
    return procs_known or get_default_process_count(visible_devices, devices_per_replica)
