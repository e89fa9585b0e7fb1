"""`echelon doctor` for this machine, `echelon preflight` for the nodes of a job."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from echelon.commands.arguments import add_dir_argument, make_parser, parse_seconds

if TYPE_CHECKING:
    from echelon.config.schema import Config


def doctor(words: list[str]) -> int:
    """`echelon doctor`: check this machine."""
    parser = make_parser(
        "doctor",
        "Check this machine: Python, torch, driver, GPUs, disks, limits, network, clients. Then "
        "train a step on every device and all-reduce across them (without one, on two processes of "
        "the CPU).",
        """\
Each check is ok, warn (a training runs, but not as it could), fail (it does not run) or – (nothing
to check here), with the command that fixes it. The exit code is 8 if any check fails, else 0.
Piped: state, check, what was found and what to do, between tabs.

--json prints {version: 1, host, echelon, python, worst: ok, warn or fail,
checks: [{check, state: ok, warn, fail or none, found, do}]}.""",
    )
    parser.add_argument("--no-smoke", action="store_true", help="only check, train nothing")
    parser.add_argument("--json", action="store_true")
    add_dir_argument(parser)
    given = parser.parse_args(words)
    from echelon.doctor.command import run_doctor

    return run_doctor(Path(given.dir), given.json, not given.no_smoke)


def preflight(words: list[str]) -> int:
    """`echelon preflight`: check the nodes of a job."""
    parser = make_parser(
        "preflight",
        "Check the very nodes that a job will use, before it does: echelon preflight launch=ssh "
        "'launch.hosts=[a,b]', or launch=slurm launch.nodes=2. launch.preflight=true does the same "
        "before a training.",
        """\
On every node: does it start, versions, code, names both ways, TCP to every other node, interface,
clock, shared folder, disk, GPUs free and healthy, speed of each link, an all-reduce whose sum is
checked. With Slurm inside an allocation on its nodes, else srun asks for them as the job would.

The exit code is 8 if any check fails, else 0.
Piped: state, node, check, what was found and what to do, between tabs.

--json prints {version: 1, launcher, ready, nodes: [{node, host, address}],
checks: [{node, host, check, state: ok, warn, fail or none, found, do}],
links: [{from, to, bytes_per_s}], slowest: host or null}.""",
    )
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="as of `echelon train`")
    parser.add_argument("--run", help="of a run: its name or folder, with its settings")
    parser.add_argument(
        "--limit",
        type=parse_seconds,
        default=60.0,
        metavar="S",
        help="for all checks (default: 60)",
    )
    parser.add_argument(
        "--wait", type=parse_seconds, default=600.0, metavar="S", help="slurm: in the queue (600)"
    )
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--composed", metavar="FILE", help=argparse.SUPPRESS)
    add_dir_argument(parser)
    given = parser.parse_intermixed_args(words)
    if given.composed:
        return _check_nodes_for_laptop(given.composed, given.limit, given.wait)
    if given.run and given.overrides:
        parser.error("a run has its own settings: give --run or KEY=VALUE")
    from echelon.preflight.check_nodes import run_node_checks

    config = (
        _recompose_run_config(given.run, given.dir)
        if given.run
        else _compose_train_config(given.overrides)
    )
    if config.launch.login is not None:
        from echelon.login.preflight import run_preflight_by_login

        return run_preflight_by_login(config, given.json, given.limit, given.wait)
    return run_node_checks(config, given.json, given.limit, given.wait)


def _check_nodes_for_laptop(file: str, limit_s: float, wait_s: float) -> int:
    """Check the nodes of a job whose configuration another machine has composed, and print the
    result as JSON alone: that machine shows it, and gives the exit code."""
    from echelon.config.schema import build_config
    from echelon.errors import EchelonError, ExitCode
    from echelon.preflight.check_nodes import check_nodes
    from echelon.runs.trusted_code import require_trusted_file

    document: dict[str, Any]
    try:
        require_trusted_file(Path(file))
        config = build_config(json.loads(Path(file).read_text(encoding="utf-8")))
        document = check_nodes(config, limit_s, wait_s)
    except EchelonError as error:
        document = {"faults": [[f.what, f.do] for f in error.faults], "exit": int(error.exit)}
    print(json.dumps(document))
    return ExitCode.OK


def _compose_train_config(overrides: Sequence[str]) -> Config:
    """Return the configuration that `echelon train` would compose of the same words."""
    from echelon.entrypoint import compose_config

    return compose_config(overrides)


def _recompose_run_config(name: str, root: str) -> Config:
    """Return the configuration of an old run.

    Name and folder are replaced by where the run is now: the folder may have been moved.
    """
    from echelon.runs.find import find_run

    run = find_run(name, root)
    config = run.read_launch_config()
    return replace(config, run=replace(config.run, name=run.name, dir=str(run.folder.parent)))
