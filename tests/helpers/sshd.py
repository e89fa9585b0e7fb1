"""More sshds on the cluster's hosts, each in a world of its own where some files are others."""

from __future__ import annotations

import secrets
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import slurm_cluster
from command_runner import until
from slurm_cluster import TestCluster

HIDE = 'mount -t tmpfs none "$0" && exec "$@"'
"""A folder is empty there."""


@contextmanager
def start_sshd(
    cluster: TestCluster,
    host: str,
    ports: Sequence[int],
    prepare: str,
    folder: Path,
    more: str = "",
) -> Iterator[str]:
    """One more sshd of a host; its address. `prepare` is a script that ends with `exec "$@"`, and
    is given the folder as $0; `more` are lines that go before the others of its configuration."""
    keys, address = cluster.kind.folder / "ssh", cluster.addresses[host]
    config = keys / f"sshd-{secrets.token_hex(4)}"
    listen = "".join(f"ListenAddress {address}:{port}\n" for port in ports)
    text = (keys / f"sshd_{host}").read_text()
    config.write_text(more + text.replace(f"ListenAddress {address}:22\n", listen))
    daemon = ["/usr/sbin/sshd", "-D", "-e", "-f", str(config)]
    on = [
        sys.executable,
        str(slurm_cluster.PROGRAM),
        "--folder",
        str(cluster.kind.folder),
        "exec",
        host,
    ]
    private = ["unshare", "-m", "--propagation", "private", "sh", "-c", prepare, str(folder)]
    process = subprocess.Popen([*on, "--", *private, *daemon], stderr=subprocess.DEVNULL)
    try:
        probe = f"exec 3<>/dev/tcp/{address}/{ports[-1]}"
        until(lambda: subprocess.run(["bash", "-c", probe]).returncode == 0, 300, "another sshd")
        yield address
    finally:
        process.terminate()
        process.wait(60)
        config.unlink()
