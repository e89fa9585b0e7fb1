"""One bridge, one namespace and one cable per host, and their names in /etc/hosts."""

from __future__ import annotations

import fcntl
import os
import re
import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from layout import Layout
from shell import Broken, CannotBeMade, run, wait_until, works

HOSTS = Path("/etc/hosts")
DAEMONS = {"slurmd", "slurmstepd", "sshd"}


@contextmanager
def machine_lock() -> Iterator[None]:
    """Allow one `up` or `down` at a time.

    The lock is on /etc/hosts: a file that exists anyway leaves no trace.
    """
    with HOSTS.open() as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def make(layout: Layout) -> None:
    """Make what is missing of bridge, hosts and names, and repair what a test has cut."""
    _make_bridge(layout)
    for host in layout.hosts:
        _make_host(layout, host)
    _write_names(layout)


def remove(layout: Layout) -> None:
    """Remove bridge, hosts and names, if they belong to this cluster."""
    if _is_ours(layout):  # otherwise namespaces of these names are somebody else's
        for host in layout.hosts:
            kill_all(host)
            works(["ip", "netns", "del", host])
            works(["ip", "link", "del", layout.port(host)])
        run(["ip", "link", "del", layout.bridge])
    if not _exists(layout.bridge):
        _forget_names(layout)


def is_any_left() -> bool:
    """Return whether any cluster still has a network device on this machine."""
    return any(Path("/sys/class/net").glob("ech-*"))


def _exists(device: str) -> bool:
    return Path("/sys/class/net", device).exists()


def _is_ours(layout: Layout) -> bool:
    return layout.prefix in prefixes_of(layout.folder)


def prefixes_of(folder: Path) -> list[str]:
    """Return the prefixes of the clusters in a folder, read from the aliases of bridges."""
    aliases = Path("/sys/class/net").glob("ech-*/ifalias")
    bridges = [alias.parent.name for alias in aliases if alias.read_text().strip() == str(folder)]
    return [bridge.removeprefix("ech-") for bridge in bridges]


def _make_bridge(layout: Layout) -> None:
    if not _is_ours(layout):
        _check_free(layout)
        try:
            run(["ip", "link", "add", layout.bridge, "type", "bridge"])
        except Broken as error:
            raise CannotBeMade(f"this machine's kernel makes no bridge ({error})") from error
        run(["ip", "link", "set", layout.bridge, "alias", str(layout.folder)])
    run(["ip", "addr", "replace", f"{layout.net}.1/24", "dev", layout.bridge])
    run(["ip", "link", "set", layout.bridge, "up"])


def _check_free(layout: Layout) -> None:
    """Raise one sentence if the names or the network are used by somebody else."""
    taken = [host for host in layout.hosts if _is_namespace(host)]
    if taken or _exists(layout.bridge):
        raise CannotBeMade(
            f"{(taken or [layout.bridge])[0]} belongs to somebody else: choose another --prefix"
        )
    if run(["ip", "-4", "route", "show", "root", f"{layout.net}.0/24"]).strip():
        raise CannotBeMade(f"{layout.net}.0/24 is in use on this machine: choose another --net")


def _make_host(layout: Layout, host: str) -> None:
    if not _is_namespace(host):
        works(["ip", "netns", "del", host])  # a name without a namespace, left by a crash
        run(["ip", "netns", "add", host])
    port = layout.port(host)
    if not _exists(port):
        run(["ip", "link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", host])
    run(["ip", "link", "set", port, "master", layout.bridge, "up"])
    run(["ip", "-n", host, "addr", "replace", f"{layout.address(host)}/24", "dev", "eth0"])
    run(["ip", "-n", host, "link", "set", "lo", "up"])
    run(["ip", "-n", host, "link", "set", "eth0", "up"])
    shape(layout, host, "")


def _namespace(host: str) -> Path:
    return Path("/run/netns", host)


def _is_namespace(host: str) -> bool:
    return works(["nsenter", f"--net={_namespace(host)}", "true"])


def on_host(host: str, *command: str) -> list[str]:
    """The command as typed on a host.

    Not `ip netns exec`: it remounts /sys, where slurmd then finds no cgroups and dies. All parts
    exec, so the process keeps its id.
    """
    named = 'hostname "$0" && exec "$@"'
    return [
        "nsenter",
        f"--net={_namespace(host)}",
        "unshare",
        "-u",
        "sh",
        "-c",
        named,
        host,
        *command,
    ]


def pids(host: str) -> list[int]:
    """Return all processes in the namespace of a host."""
    return [int(pid) for pid in run(["ip", "netns", "pids", host]).split()]


def processes(host: str) -> dict[int, list[str]]:
    """Command lines of what users run on a host: logins, jobs and what they left behind."""
    found = {}
    for pid in pids(host):
        with suppress(OSError):  # it ended meanwhile
            name = Path(f"/proc/{pid}/comm").read_text().strip()
            words = Path(f"/proc/{pid}/cmdline").read_text(errors="replace")
            if words and name not in DAEMONS:  # a zombie has none
                found[pid] = words.rstrip("\0").split("\0")
    return found


def kill_all(host: str) -> None:
    """Everything in a host's namespace: daemons, job steps, logins."""

    def gone() -> bool:
        for pid in pids(host):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return not pids(host)

    if _is_namespace(host) and not wait_until(gone, limit_s=20):
        raise Broken(f"processes {pids(host)} on {host} survive SIGKILL")


def link(layout: Layout, host: str, state: str) -> None:
    run(["ip", "link", "set", layout.port(host), state])


def shape(layout: Layout, host: str, words: str) -> None:
    """Shape a host's cable both ways, as tc-netem says it (loss, rate, delay); '' restores it."""
    for where in (["-n", host], []):
        device = "eth0" if where else layout.port(host)
        works(["tc", *where, "qdisc", "del", "dev", device, "root"])
        if words:
            _add_qdisc(["tc", *where, "qdisc", "add", "dev", device, "root"], words.split())


def _add_qdisc(add: list[str], words: list[str]) -> None:
    if words[0] == "rate" and len(words) == 2:  # kernels without netem still have tbf
        run([*add, "tbf", *words, "burst", "16kb", "latency", "1s"])
        return
    try:
        run([*add, "netem", *words])
    except Broken as error:
        if "kind is unknown" in str(error):
            raise CannotBeMade("this machine's kernel has no netem: only `rate` works") from error
        raise


def _marks(layout: Layout) -> tuple[str, str]:
    name = f"echelon cluster {layout.prefix}"
    return f"# begin {name}\n", f"# end {name}\n"


def _write_names(layout: Layout) -> None:
    begin, end = _marks(layout)
    lines = "".join(f"{layout.address(host)} {host}\n" for host in layout.hosts)
    if begin + lines + end not in HOSTS.read_text():
        _forget_names(layout)
        text = HOSTS.read_text()
        newline = "" if text.endswith("\n") or not text else "\n"
        _replace_text(text, text + newline + begin + lines + end)
    for host in layout.hosts:
        found = socket.gethostbyname(host)
        if found != layout.address(host):
            raise CannotBeMade(f"{host} already means {found} here: choose another --prefix")


def _forget_names(layout: Layout) -> None:
    begin, end = map(re.escape, _marks(layout))
    text = HOSTS.read_text()
    without = re.sub(f"{begin}.*?{end}", "", text, flags=re.DOTALL)
    _replace_text(text, without)


def _replace_text(old: str, new: str) -> None:
    """Change /etc/hosts in place, as it is often a bind mount. Other clusters look up their names
    meanwhile: the file is never empty, and what stays is not written again."""
    if new == old:
        return
    before, after = old.encode(), new.encode()
    pairs = enumerate(zip(before, after, strict=False))
    same = next((at for at, (a, b) in pairs if a != b), min(len(before), len(after)))
    with HOSTS.open("r+b", buffering=0) as file:
        file.seek(same)
        file.write(after[same:])
        file.truncate()


def can_talk(layout: Layout, here: str, there: str, port: int) -> bool:
    """Return whether one host can open a TCP connection to a port of another."""
    probe = f"exec 3<>/dev/tcp/{layout.address(there)}/{port}"
    return works(on_host(here, "timeout", "5", "bash", "-c", probe))
