"""One sshd per node with its own host key, one throw-away client key, one `ssh -F` file."""

from __future__ import annotations

import shutil
from pathlib import Path

import daemons
import network
from layout import Layout
from packages import find
from shell import run, works

RUN = Path("/run/sshd")
MADE_HERE = RUN / "made-by-echelon-cluster"


def start_all(layout: Layout) -> None:
    """Make the keys and start an sshd on every node."""
    _make_keys(layout)
    for node in layout.nodes:
        start(layout, node)


def start(layout: Layout, node: str) -> None:
    """Start the sshd of a node and wait until a login works."""
    _make_run_folder()
    config = layout.folder / "ssh" / f"sshd_{node}"
    config.write_text(
        layout.render(
            "sshd_config", node=node, address=layout.address(node), use_pam=_pam_for_locked_root()
        )
    )
    name = f"sshd-{node}"
    # A re-executed sshd forgets nothing but has to be named by its full path.
    daemons.start(layout, name, node, find("sshd") or "sshd", "-D", "-e", "-f", str(config))
    login = ["ssh", "-F", str(layout.ssh_config), node, "true"]
    daemons.ready(layout, name, lambda: works(login), limit_s=20)


def _make_run_folder() -> None:
    """Make the folder without which no sshd starts; a machine whose own sshd is off has none."""
    if not RUN.exists():
        RUN.mkdir(mode=0o755)
        MADE_HERE.touch()


def remove_run_folder() -> None:
    """Remove that folder again if it was made here and no cluster is left."""
    if MADE_HERE.exists() and not network.is_any_left():
        shutil.rmtree(RUN)


def _make_keys(layout: Layout) -> None:
    folder = layout.folder / "ssh"
    folder.mkdir(exist_ok=True)
    _make_key(folder / "client")
    (folder / "authorized_keys").write_text((folder / "client.pub").read_text())
    known = ""
    for node in layout.nodes:
        _make_key(folder / f"host_{node}")
        known += f"{node} {(folder / f'host_{node}.pub').read_text()}"
    (folder / "known_hosts").write_text(known)
    hosts = [layout.render("ssh_config", node=n, address=layout.address(n)) for n in layout.nodes]
    layout.ssh_config.write_text("".join(hosts))


def _make_key(file: Path) -> None:
    if not works(["ssh-keygen", "-l", "-f", str(file)]):  # missing, or half written by a crash
        file.unlink(missing_ok=True)
        run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "echelon", "-f", str(file)])


def _pam_for_locked_root() -> str:
    """Return `yes` if root's password is locked: without PAM sshd would refuse the key."""
    password = Path("/etc/shadow").read_text().partition("root:")[2].partition(":")[0]
    return "yes" if password.startswith("!") else "no"
