"""munge, the Slurm controller, one slurmd per node and, if wanted, accounting."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
from pathlib import Path

import daemons
import network
from layout import GPUS, Layout
from packages import find
from shell import Broken, run, wait_until, works

USABLE = {"idle", "mixed", "allocated", "completing"}


def start_all(layout: Layout) -> None:
    """Start munge, accounting if wanted, the controller and every slurmd; wait for the nodes."""
    _write_configuration(layout)
    _make_devices(layout.folder / "gpu")
    for name in ("slurmctld", *(f"spool/{node}" for node in layout.nodes)):
        (layout.folder / name).mkdir(parents=True, exist_ok=True)
    _start_munge(layout)
    if layout.accounting:
        _start_accounting(layout)
    start_controller(layout)
    for node in layout.nodes:
        start_node(layout, node)
    wait_for_nodes(layout, layout.nodes)


def is_configured(layout: Layout) -> bool:
    """Return whether the daemons' files are what the templates would give now."""
    texts = _configuration(layout)
    return all(path.exists() and path.read_text() == text for path, text in texts.items())


def _configuration(layout: Layout) -> dict[Path, str]:
    names = ("slurm.conf", "gres.conf", "slurmdbd.conf")
    return {layout.folder / name: layout.render(name) for name in names}


def _write_configuration(layout: Layout) -> None:
    for path, text in _configuration(layout).items():
        path.write_text(text)
        path.chmod(0o600 if path.name == "slurmdbd.conf" else 0o644)  # slurmdbd insists


def _make_devices(folder: Path) -> None:
    """Make copies of /dev/null as GPUs: Slurm hands out a GPU only if it has a device file."""
    folder.mkdir(exist_ok=True)
    for index in range(GPUS):
        device = folder / str(index)
        if not device.exists():
            os.mknod(device, stat.S_IFCHR | 0o666, os.stat("/dev/null").st_rdev)


def _start_munge(layout: Layout) -> None:
    """As root, who can enter any folder the state may lie in; -f as that may be one of /tmp."""
    folder = layout.folder / "munge"
    folder.mkdir(exist_ok=True)
    key, socket = folder / "key", str(folder / "socket")
    if not key.exists() or key.stat().st_size != 1024:
        key.write_bytes(os.urandom(1024))
    key.chmod(0o400)
    files = [f"--{what}-file={folder / what}" for what in ("key", "log", "pid", "seed")]
    options = ["-F", "-f", f"--socket={socket}", *files]
    daemons.start(layout, "munged", layout.controller, find("munged") or "munged", *options)
    daemons.ready(layout, "munged", lambda: works(["munge", "-n", "-S", socket]), limit_s=20)


def _start_accounting(layout: Layout) -> None:
    """A private database on a socket in the state folder; whoever can open that may use it."""
    data = layout.folder / "mariadb"
    socket = str(data / "socket")
    options = ["--no-defaults", "--user=root", f"--datadir={data}"]
    if not daemons.alive(layout, "mariadbd") and not (data / "made").exists():
        shutil.rmtree(data, ignore_errors=True)
        data.mkdir(mode=0o700)
        run(["mariadb-install-db", *options, "--skip-test-db"])
        (data / "made").touch()
    daemons.start(
        layout,
        "mariadbd",
        layout.controller,
        find("mariadbd") or "mariadbd",
        *options,
        f"--socket={socket}",
        "--skip-networking",
        "--skip-grant-tables",
        "--innodb-flush-log-at-trx-commit=0",
    )
    ping = ["mariadb-admin", "--no-defaults", f"--socket={socket}", "ping"]
    daemons.ready(layout, "mariadbd", lambda: works(ping), limit_s=60)
    daemons.start(
        layout,
        "slurmdbd",
        layout.controller,
        find("slurmdbd") or "slurmdbd",
        "-D",
        MYSQL_UNIX_PORT=socket,
        SLURM_CONF=str(layout.slurm_conf),
    )
    answers = ["sacctmgr", "-n", "show", "cluster"]
    daemons.ready(layout, "slurmdbd", lambda: works(answers, layout.slurm_env), limit_s=60)


def start_controller(layout: Layout) -> None:
    """Start slurmctld and wait until it answers."""
    program = find("slurmctld") or "slurmctld"
    daemons.start(
        layout, "slurmctld", layout.controller, program, "-D", "-f", str(layout.slurm_conf)
    )
    ping = ["scontrol", "ping"]
    daemons.ready(layout, "slurmctld", lambda: works(ping, layout.slurm_env), limit_s=30)


def start_node(layout: Layout, node: str) -> None:
    """Start the slurmd of a node."""
    program = find("slurmd") or "slurmd"
    daemons.start(
        layout, f"slurmd-{node}", node, program, "-D", "-N", node, "-f", str(layout.slurm_conf)
    )


def restart_controller(layout: Layout) -> None:
    """Restart slurmctld; jobs go on and its state comes back from disk."""
    daemons.stop(layout, "slurmctld")
    start_controller(layout)


def node_states(layout: Layout) -> dict[str, str]:
    """Return Slurm's state of each node; empty if the controller does not answer."""
    done = subprocess.run(
        ["sinfo", "-h", "-N", "-o", "%N %T"], capture_output=True, text=True, env=layout.slurm_env
    )
    return dict(line.split() for line in done.stdout.splitlines())


def wait_for_nodes(layout: Layout, nodes: list[str], limit_s: float = 60) -> None:
    """Wait until Slurm would run a job on each node; nodes that a fault drained are resumed.

    Of a node that was cut off Slurm may ask for minutes only now and then. Its slurmd is started
    anew after a while, and then registers by itself.
    """

    def usable() -> bool:
        states = node_states(layout)
        for node in nodes:
            if states.get(node, "").startswith(("drain", "fail")):
                update = ["scontrol", "update", f"nodename={node}", "state=resume"]
                works(update, layout.slurm_env)
        return all(states.get(node) in USABLE and _answers(layout, node) for node in nodes)

    if wait_until(usable, limit_s / 4):
        return
    for node, state in node_states(layout).items():
        if node in nodes and state not in USABLE:
            daemons.stop(layout, f"slurmd-{node}")
            start_node(layout, node)
    if not wait_until(usable, limit_s):
        states = node_states(layout)
        stuck = next((n for n in nodes if states.get(n) not in USABLE), nodes[0])
        raise Broken(
            f"{stuck} was {states.get(stuck, 'unknown')} after {limit_s:g} s\n"
            f"{daemons.tail(layout, f'slurmd-{stuck}')}\n{daemons.tail(layout, 'slurmctld')}"
        )


def _answers(layout: Layout, node: str) -> bool:
    """Return whether slurmd accepts connections: Slurm calls a dead node idle for a while."""
    return network.can_talk(layout, layout.controller, node, 6818)
