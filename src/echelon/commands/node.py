"""`echelon node`: one node of a run. Batch scripts and ssh call it."""

from __future__ import annotations

import signal

from echelon.commands.arguments import make_parser
from echelon.utils.streams import use_tolerant_streams


def node(words: list[str]) -> int:
    """`echelon node`: be one node of a run."""
    parser = make_parser(
        "node", "Be one node of a run. Batch scripts and ssh call this; nobody needs to type it."
    )
    parser.add_argument("run", help="the run's folder")
    parser.add_argument("--nodes", type=int, required=True)
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--master", metavar="HOST:PORT", help="where node 0 listens")
    where.add_argument(
        "--tether", action="store_true", help="read messages on standard input, and end with it"
    )
    parser.add_argument("--node-rank", type=int, help="default: SLURM_NODEID")
    parser.add_argument("--procs", type=int, help="processes here; default: as configured")
    given = parser.parse_args(words)
    if given.tether:
        from echelon.launch.ssh.watchdog import run_watched_node

        return run_watched_node(given.run, given.nodes, given.node_rank, given.procs)
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR2])  # it waits until the agent listens
    from echelon.launch.node.join import join_run

    with use_tolerant_streams():
        return join_run(given.run, given.nodes, lambda: given.master, given.node_rank, given.procs)
