"""`echelon dev`: an allocation of Slurm to work in."""

from __future__ import annotations

import argparse

from echelon.commands.arguments import make_parser, parse_with_overrides


def dev(words: list[str]) -> int:
    """`echelon dev`: a shell in an allocation, an ssh entry and forwarded ports."""
    parser = make_parser(
        "dev",
        "Work on the nodes of a cluster: ask Slurm for an allocation, and open a shell on its "
        "first node. `echelon dev` again opens another shell in it, also after a lost connection. "
        "It ends when nobody has used it for a while.",
        """\
Settings are those of launch=slurm: nodes, gpus_per_node, cpus_per_node, partition, account, time
(default: 2:00:00), sbatch, setup. What it costs at most is said before it is asked for.

It is idle while no process of yours in it uses a CPU or a GPU, and nothing is typed. A minute or
two before it ends, its terminals hear of it.

examples:
  echelon dev launch=slurm launch.gpus_per_node=1
  echelon dev launch=slurm launch.nodes=2 launch.time=4:00:00 --dry-run
  echelon dev                     another shell in the allocation that is there
  echelon dev --port 8888         for: jupyter lab --no-browser --port 8888
  echelon dev --list
  echelon dev --end

In the shell, `python train.py launch=local` uses the GPUs of the node, and `srun python train.py`
all nodes. docs/dev.md says more.

--json prints, with --dry-run {version: 1, name, cost: {nodes, per_node, unit, limit, hours, text},
steps, commands, script, shell, launch}; with --list {version, allocations: [{job, name, state,
reason, nodes, time_left, node_count, idle_s, idle_limit_s}]}; with --end {version, name, job};
else, without a shell, {version, name, job, node, nodes, idle_limit_s, ssh: {alias, node, port,
config} or null, forward: [commands]}.""",
    )
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE")
    parser.add_argument(
        "--name", default="dev", help="of several allocations: which one (default: dev)"
    )
    parser.add_argument(
        "--idle",
        type=parse_minutes,
        default=30.0,
        metavar="MINUTES",
        help="end after so long without use (default: 30)",
    )
    parser.add_argument(
        "--port",
        type=parse_port,
        action="append",
        default=[],
        metavar="N",
        help="print how to reach this port of the node from here and from elsewhere; repeatable",
    )
    parser.add_argument(
        "--ssh", action="store_true", help="write an entry for `ssh echelon-dev`; --port does too"
    )
    parser.add_argument("--config", metavar="FILE", help="ssh's (default: ~/.ssh/config)")
    parser.add_argument("--detach", action="store_true", help="open no shell")
    verbs = parser.add_mutually_exclusive_group()
    verbs.add_argument("--list", action="store_true", help="show the allocations")
    verbs.add_argument("--end", action="store_true", help="end the allocation")
    verbs.add_argument("--dry-run", action="store_true", help="print the plan and stop")
    parser.add_argument("--json", action="store_true", help="as JSON; without a shell")
    given = parse_with_overrides(parser, words, _list_launch_settings)
    from echelon.interactive import command

    if given.list:
        return command.print_list(given.json)
    if given.end:
        return command.end_allocation(given.name, given.json)
    wrong = [word for word in given.overrides if word.lstrip("+~").split("=")[0] != "launch"]
    if strange := [word for word in wrong if not word.lstrip("+~").startswith("launch.")]:
        parser.error(f"{strange[0]}: only settings of launch say something of an allocation")
    from echelon.entrypoint import compose_config

    options = command.DevOptions(
        given.name,
        given.idle * 60,
        given.port,
        given.ssh,
        given.config,
        given.detach,
        given.json,
    )
    if given.dry_run:
        return command.print_dry_run(compose_config(given.overrides), options)
    config = compose_config(given.overrides) if given.overrides else None
    return command.open_allocation(config, options)


def _list_launch_settings() -> list[str]:
    from echelon.config.settings_help import list_settings

    return [each.name for each in list_settings() if each.name.startswith("launch")]


def parse_minutes(text: str) -> float:
    """Return a number of minutes, from a tenth of one to a week."""
    try:
        minutes = float(text)
    except ValueError:
        minutes = 0.0
    if not 0.1 <= minutes <= 7 * 24 * 60:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of minutes from 0.1 on")
    return minutes


def parse_port(text: str) -> int:
    """Return a port that programs of a user may listen on."""
    if not text.isdecimal() or not 1024 <= int(text) < 65_536:
        raise argparse.ArgumentTypeError(f"{text!r} is not a port from 1024 to 65535")
    return int(text)
