#!/usr/bin/env python3
"""A Slurm cluster of three hosts on one machine, for tests: see README.md beside this file."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
from pathlib import Path

import daemons
import network
import packages
import slurm
import ssh
from layout import Layout, boot_id, default_folder, load
from shell import Broken, CannotBeMade

EXIT_BROKEN = 1
EXIT_DOWN = 1
EXIT_CANNOT_BE_MADE = 3


def up(wanted: Layout) -> None:
    """Start what is missing of a cluster; one that runs is left as it is."""
    wanted.check()
    packages.check_machine()
    packages.install_missing(wanted.accounting)
    found = load(wanted.folder)
    if found and not (found == wanted and slurm.is_configured(wanted)):
        down(found)  # a reboot, another network, another configuration
    wanted.save()
    try:
        network.make(wanted)
    except CannotBeMade:
        down(wanted)
        raise
    ssh.start_all(wanted)
    slurm.start_all(wanted)
    first, second = wanted.nodes[:2]
    if not network.can_talk(wanted, first, second, 22):
        raise Broken(f"{first} cannot reach {second}: does a firewall filter bridges here?")


def down(layout: Layout) -> None:
    """Remove a cluster: its processes, namespaces, lines in /etc/hosts and folder."""
    network.remove(layout)
    ssh.remove_run_folder()
    packages.remove_policy()
    if load(layout.folder):  # any other folder is not ours
        shutil.rmtree(layout.folder)


def _without_folder(folder: Path) -> list[Layout]:
    """Return the clusters that still run, or are in /etc/hosts, though their folder was removed."""
    return [Layout(folder, prefix) for prefix in network.prefixes_of(folder) or [Layout.prefix]]


def status(layout: Layout) -> dict[str, object]:
    """Return which daemons run and how to use the cluster, as `status --json` prints it."""
    names = ["munged", "slurmctld"]
    names += ["mariadbd", "slurmdbd"] if layout.accounting else []
    names += [f"{kind}-{node}" for kind in ("slurmd", "sshd") for node in layout.nodes]
    running = {name: daemons.alive(layout, name) for name in names}
    return {
        "up": all(running.values()),
        "folder": str(layout.folder),
        "slurm_conf": str(layout.slurm_conf),
        "ssh_config": str(layout.ssh_config),
        "controller": layout.controller,
        "hosts": layout.nodes,
        "addresses": {host: layout.address(host) for host in layout.hosts},
        "accounting": layout.accounting,
        "daemons": running,
        "nodes": slurm.node_states(layout) if running["slurmctld"] else {},
    }


def start_node(layout: Layout, node: str) -> None:
    """Start the daemons of a node and wait until Slurm would run a job on it."""
    ssh.start(layout, node)
    slurm.start_node(layout, node)
    slurm.wait_for_nodes(layout, [node])


def how_to_use(layout: Layout) -> str:
    """Return the lines to type before using Slurm or ssh on this cluster."""
    return (
        f"export SLURM_CONF={layout.slurm_conf}\n"
        f"ssh -F {layout.ssh_config} {layout.nodes[0]}    # hosts: {' '.join(layout.nodes)}"
    )


def parser() -> argparse.ArgumentParser:
    main = argparse.ArgumentParser(prog="cluster.py", description=__doc__)
    main.add_argument(
        "--folder", type=Path, default=default_folder(), help="all state (default: %(default)s)"
    )
    commands = main.add_subparsers(dest="command", required=True, metavar="COMMAND")
    make = commands.add_parser("up", help="start it, or what of it does not run")
    make.add_argument("--accounting", action="store_true", help="with slurmdbd, so sacct works")
    make.add_argument("--prefix", default="n", help="hosts are PREFIX1 … (default: n)")
    make.add_argument("--net", default="10.213.37", help="a free /24 (default: 10.213.37)")
    commands.add_parser("down", help="remove every trace")
    show = commands.add_parser("status", help="what runs; exit code 1 if not all of it does")
    show.add_argument("--json", action="store_true")
    link = commands.add_parser("link", help="cut a host off, or reconnect it")
    link.add_argument("host")
    link.add_argument("state", choices=["up", "down"])
    netem = commands.add_parser("netem", help="'loss 20%%', 'rate 1mbit' …; '' ends it")
    netem.add_argument("host")
    netem.add_argument("shape")
    for name, what in (("kill-node", "SIGKILL all on a node"), ("start-node", "bring it back")):
        commands.add_parser(name, help=what).add_argument("host")
    commands.add_parser("restart-controller", help="jobs go on meanwhile")
    commands.add_parser("processes", help="what runs on a host but daemons").add_argument("host")
    on = commands.add_parser("exec", help="run a command on a host")
    on.add_argument("host")
    on.add_argument("words", nargs=argparse.REMAINDER, metavar="COMMAND")
    return main


def act(args: argparse.Namespace) -> int:
    """Do what the command line asks for; return the exit code."""
    folder = args.folder.absolute()
    found = load(folder)
    if args.command == "up":
        with network.machine_lock():
            wanted = Layout(folder, args.prefix, args.net, args.accounting, boot_id())
            up(wanted)
        print(how_to_use(wanted))
        return 0
    if args.command == "down":
        with network.machine_lock():
            for left in [found] if found else _without_folder(folder):
                down(left)
        return 0
    if found is None:
        print(f"no cluster in {folder}: `cluster.py up` makes one", file=sys.stderr)
        return EXIT_DOWN
    if args.command == "status":
        return show_status(found, args.json)
    return act_on_host(found, args)


def show_status(layout: Layout, as_json: bool) -> int:
    now = status(layout)
    if as_json:
        print(json.dumps(now))
    else:
        print(*(f"{key}: {value}" for key, value in now.items()), sep="\n")
    return 0 if now["up"] else EXIT_DOWN


def act_on_host(layout: Layout, args: argparse.Namespace) -> int:
    """Do what a command asks for on one host, or restart the controller."""
    if args.command == "restart-controller":
        slurm.restart_controller(layout)
        return 0
    known = layout.nodes if args.command in ("kill-node", "start-node") else layout.hosts
    if args.host not in known:
        print(f"unknown host {args.host!r}: there are {', '.join(known)}", file=sys.stderr)
        return 2
    if args.command == "link":
        network.link(layout, args.host, args.state)
    elif args.command == "netem":
        network.shape(layout, args.host, args.shape)
    elif args.command == "kill-node":
        network.kill_all(args.host)
    elif args.command == "start-node":
        start_node(layout, args.host)
    elif args.command == "processes":
        for pid, words in network.processes(args.host).items():
            print(pid, json.dumps(words))
    elif args.command == "exec":
        words = args.words[1:] if args.words[:1] == ["--"] else args.words
        os.execvpe("nsenter", network.on_host(args.host, *words), layout.slurm_env)
    return 0


def main() -> int:
    try:
        return act(parser().parse_args())
    except CannotBeMade as error:
        print(f"cannot make a test cluster: {error}", file=sys.stderr)
        return EXIT_CANNOT_BE_MADE
    except Broken as error:
        print(error, file=sys.stderr)
        return EXIT_BROKEN


if __name__ == "__main__":
    sys.exit(main())
