"""`echelon node`: one node of a run. Batch scripts and ssh call it, and `echelon return-nodes`."""

from __future__ import annotations

import os
import signal

from echelon.commands.arguments import make_parser
from echelon.utils.processes import OUTSIDE_PID_VARIABLE, die_with_process
from echelon.utils.streams import use_tolerant_streams


def node(words: list[str]) -> int:
    """`echelon node`: be one node of a run."""
    parser = make_parser(
        "node", "Be one node of a run. Batch scripts and ssh call this; nobody needs to type it."
    )
    parser.add_argument("run", help="the run's folder")
    parser.add_argument("--nodes", type=int)
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--master", metavar="HOST:PORT", help="where node 0 listens")
    where.add_argument(
        "--tether", action="store_true", help="read messages on standard input, and end with it"
    )
    where.add_argument(
        "--join", type=int, metavar="N", help="be a further node, one of those from number N on"
    )
    parser.add_argument("--node-rank", type=int, help="default: SLURM_NODEID")
    parser.add_argument("--procs", type=int, help="processes here; default: as configured")
    given = parser.parse_args(words)
    if outside_pid := os.environ.pop(OUTSIDE_PID_VARIABLE, ""):
        die_with_process(int(outside_pid), "podman")
    if given.join is None and given.nodes is None:
        parser.error("--nodes is missing")
    if given.tether:
        from echelon.launch.ssh.watchdog import run_watched_node

        return run_watched_node(given.run, given.nodes, given.node_rank, given.procs)
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR2])  # it waits until the agent listens
    from echelon.launch.node.join import join_later, join_run

    with use_tolerant_streams():
        if given.join is not None:
            return join_later(given.run, given.join)
        return join_run(given.run, given.nodes, lambda: given.master, given.node_rank, given.procs)


def pod(words: list[str]) -> int:
    """`echelon pod`: be one pod of a run of launch=k8s."""
    parser = make_parser(
        "pod",
        "Be one pod of a run. The manifest of launch=k8s calls this; nobody needs to type it.",
    )
    parser.add_argument("file", help="the configuration, as the pod's ConfigMap has it")
    given = parser.parse_args(words)
    from echelon.launch.k8s.pod import run_pod

    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR2])  # it waits until the agent listens
    with use_tolerant_streams():
        return run_pod(given.file)


def return_nodes(words: list[str]) -> int:
    """`echelon return-nodes`: start lost nodes of a Slurm job again."""
    parser = make_parser(
        "return-nodes",
        "Start agents again on nodes of this Slurm job that were lost while the others go on. The "
        "batch script calls this; nobody needs to type it.",
    )
    parser.add_argument("run", help="the run's folder")
    given = parser.parse_args(words)
    from echelon.launch.slurm.node_returns import return_lost_nodes

    with use_tolerant_streams():
        return return_lost_nodes(given.run)
