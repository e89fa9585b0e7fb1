"""`echelon node`: this machine as one node of a run that another one planned."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

from echelon.config.schema import Config
from echelon.errors import EchelonError, Exit, Fault
from echelon.failure import Failure
from echelon.gpus import visible_count
from echelon.launch.node import network_variables, serve, show, variables
from echelon.launch.plan import Node, processes_for, replica_fault
from echelon.launch.slurm.script import processes
from echelon.runs import Run


def join(
    folder: str,
    nodes: int,
    find_master: Callable[[], str],
    rank: int | None = None,
    procs: int | None = None,
    on_port: Callable[[int], None] | None = None,
    tell: Callable[[Failure], None] = show,
) -> int:
    run = Run(Path(folder))
    if not run.config_file.exists():
        raise EchelonError(
            Fault(
                f"the run folder {folder} is not to be seen on {socket.gethostname()}",
                "give a folder that all nodes share with run.dir=PATH",
            ),
            exit=Exit.NOT_FOUND,
        )
    config = run.config()
    if rank is None:
        rank = int(os.environ.get("SLURM_NODEID", "0"))  # of the step that srun made of us
    procs = _procs(config, rank, procs, os.environ)
    os.environ |= variables(config, procs, os.environ)
    host, _, port = find_master().rpartition(":")
    node = Node(rank, nodes, procs, host.strip("[]"), int(port))
    os.environ |= network_variables(config, node.host, os.environ)
    serving = partial(serve, config, node, lambda store, ask: run, on_port, tell)
    return _noted(run, serving) if config.launch.kind == "slurm" and rank == 0 else serving()


def _noted(run: Run, serving: Callable[[], int]) -> int:
    """Node 0's code is the run's; srun's is that of the worst node, perhaps of a dead one."""
    code = int(Exit.FAILED)
    try:
        code = serving()
    except EchelonError as error:
        code = error.exit
        raise
    finally:
        with contextlib.suppress(OSError):
            run.code_file.write_text(f"{code:d}\n", encoding="utf-8")
    return code


def _procs(config: Config, rank: int, procs: int | None, env: Mapping[str, str]) -> int:
    launch, visible = config.launch, visible_count(env)
    planned = processes(config) if launch.kind == "slurm" else launch.procs
    known, each = procs or planned, config.replica.devices
    if config.program and config.mode == "plain":
        known, each = 1, 1
    where = f" on {socket.gethostname()} (node {rank})"
    if fault := replica_fault(visible, each, known, where):
        raise EchelonError(fault)
    procs = known or processes_for(visible, each)
    if visible and procs > visible and not launch.share_devices:
        raise EchelonError(
            Fault(
                f"{procs} processes are wanted{where}, where {visible} devices are visible",
                f"set launch.procs={visible}, ask for more GPUs, or allow it with "
                "launch.share_devices=true",
            )
        )
    return procs
