"""`echelon preflight` on real hosts, each time with a fault: the report names node and cause."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from command_line import CommandLine
from fake_nvml import FakeDriver, gpu
from sshd import start_sshd

from echelon.errors import ExitCode
from echelon.utils import text

pytestmark = [pytest.mark.slow, pytest.mark.cluster]

OURS = os.environ.get("PYTHONPATH", "")
ANOTHER_WORLD = f"""
mount --bind "$0/hosts" /etc/hosts && mount --bind "$0/faults" "$0/only" &&
mount --bind "$0/old_text.py" {text.__file__} && mount --bind "$0/old.py" "$0/mine.py" &&
mount -t tmpfs -o ro none "$0/work" && exec "$@"
"""
AHEAD = """
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>
int clock_gettime(clockid_t which, struct timespec *now) {
  int code = syscall(SYS_clock_gettime, which, now);
  if (which == CLOCK_REALTIME) now->tv_sec += 90;
  return code;
}
"""


def words(command_line: CommandLine, *more: str, config: Path | None = None) -> tuple[str, ...]:
    hosts = ",".join(command_line.cluster.nodes)
    ssh = f"launch.ssh='ssh -F {config or command_line.cluster.ssh_config}'"
    return ("preflight", "--json", "launch=ssh", ssh, f"launch.hosts=[{hosts}]", *more)


def bad(report: dict[str, Any]) -> dict[tuple[str, str], str]:
    """(host, check) → what was found."""
    wrong = [check for check in report["checks"] if check["state"] in ("warn", "fail")]
    assert all(check["do"] for check in wrong)
    return {(check["host"], check["check"]): check["found"] for check in wrong}


def test_sound_nodes_are_ready(command_line: CommandLine) -> None:
    done = command_line.type(*words(command_line))
    report = json.loads(done.out)
    assert done.code == ExitCode.OK, bad(report)
    assert (report["ready"], report["launcher"], bad(report)) == (True, "ssh", {})
    assert [node["host"] for node in report["nodes"]] == command_line.cluster.nodes
    assert len(report["links"]) == 6, "each pair, both ways"
    assert report["slowest"] in command_line.cluster.nodes
    sums = [c["found"] for c in report["checks"] if c["check"] == "all-reduce"]
    assert len(sums) == 3
    assert all("the sum is right" in found for found in sums)
    assert done.left == []
    assert list((command_line.folder / "runs").iterdir()) == [], "no run, and no token left"


def test_all_that_may_differ_on_a_node(command_line: CommandLine, tmp_path: Path) -> None:
    """One host whose world differs from that of the others: a name, torch's version, a file of ours
    and one of the user's, the clock, the folder of runs, a GPU that is lost."""
    first, odd, _ = command_line.cluster.nodes
    command_line.folder = tmp_path / "work"
    for folder in ("work", "only", "faults"):
        (tmp_path / folder).mkdir()
    wrong = command_line.cluster.addresses[first].rpartition(".")[0] + ".99"
    (tmp_path / "hosts").write_text(f"127.0.0.1 localhost\n{wrong} {first}\n")
    metadata = tmp_path / "faults" / "torch-9.9.9.dist-info" / "METADATA"
    metadata.parent.mkdir()
    metadata.write_text("Metadata-Version: 2.1\nName: torch\nVersion: 9.9.9\n")
    mine = tmp_path / "mine.py"
    mine.write_text("def experiment(cfg):\n    return cfg\n")
    (tmp_path / "old.py").write_text("def experiment(cfg):\n    return None\n")
    (tmp_path / "old_text.py").write_text(Path(text.__file__).read_text() + "# old\n")
    driver = FakeDriver(tmp_path / "driver", gpu(0), gpu(1, code=15)).library.parent
    more = f"SetEnv LD_LIBRARY_PATH={driver} LD_PRELOAD={clock_ahead(tmp_path)}\n"
    with start_sshd(command_line.cluster, odd, [2225], ANOTHER_WORLD, tmp_path, more):
        config = tmp_path / "config"
        config.write_text(
            f"Host {odd}\n    Port 2225\n" + command_line.cluster.ssh_config.read_text()
        )
        python = f"{tmp_path / 'only'}:{OURS}"
        experiment = f"experiment={mine}:experiment"
        done = command_line.type(*words(command_line, experiment, config=config), PYTHONPATH=python)
    assert done.code == ExitCode.NOT_READY, done.out + done.err
    report = json.loads(done.out)
    found = bad(report)
    assert {host for host, _ in found} == {odd}, found
    assert f"{first} resolves to {wrong} here" in found[odd, "name"]
    assert found[odd, "versions"].startswith("torch is 9.9.9, but")
    ours, users = found[odd, "code"].split("; ")
    assert ours.startswith(f"Echelon's own files differ from those of {first} (")
    assert users.startswith(f"the experiment's file differs from those of {first} (")
    assert found[odd, "clock"] == f"90 s ahead of {first}'s"
    assert found[odd, "folder"].endswith("is not shared and cannot be made there")
    assert found[odd, "gpus"] == "GPU 1: lost: reboot or reset"
    told = [c["found"] for c in report["checks"] if c["check"] == "all-reduce"]
    assert set(told) == {f"not tried: see versions of {odd}"}


def clock_ahead(folder: Path) -> Path:
    """For one host alone: a clock itself belongs to all hosts of a machine."""
    source, library = folder / "ahead.c", folder / "ahead.so"
    source.write_text(AHEAD)
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", library, source], check=True, timeout=300)
    return library


def test_a_closed_port_and_a_host_that_is_not_there(
    command_line: CommandLine, tmp_path: Path
) -> None:
    first, second, _ = command_line.cluster.nodes
    with closed(command_line, second, command_line.cluster.addresses[first]):
        config = tmp_path / "config"
        nobody = command_line.cluster.addresses[first].rpartition(".")[0] + ".99"
        gone = (
            f"Host {command_line.cluster.nodes[2]}\n    HostName {nobody}\n    ConnectTimeout 2\n"
        )
        config.write_text(gone + command_line.cluster.ssh_config.read_text())
        done = command_line.type(*words(command_line, config=config))
    assert done.code == ExitCode.NOT_READY, done.out + done.err
    found = bad(json.loads(done.out))
    assert found[second, "tcp"].startswith(f"cannot reach {first} (")
    assert "permission denied" in found[second, "tcp"]
    assert (
        "cannot be reached: ssh: connect to host" in found[command_line.cluster.nodes[2], "start"]
    )
    assert done.left == []


@contextmanager
def closed(command_line: CommandLine, host: str, address: str) -> Iterator[None]:
    """TCP from a host to an address, but for the ports of daemons."""
    rule = ("to", address, "ipproto", "tcp", "dport", "1024-65534", "prohibit")
    made = command_line.cluster.on(host, "ip", "rule", "add", *rule)
    if made.returncode:
        pytest.skip(f"this kernel has no such rule: {made.stderr.strip()}")
    try:
        yield
    finally:
        command_line.cluster.on(host, "ip", "rule", "del", *rule)


def test_a_slow_link_is_blamed_on_its_node(command_line: CommandLine) -> None:
    last = command_line.cluster.nodes[-1]
    command_line.cluster.netem(last, "rate 1mbit")
    done = command_line.type(*words(command_line))
    assert done.code == ExitCode.NOT_READY, done.out + done.err
    report = json.loads(done.out)
    assert report["slowest"] == last
    found = bad(report)
    assert list(found) == [(last, "link")]
    assert found[last, "link"].startswith(("0.", "1 Mbit/s", "1.")), found
    assert done.left == []


def test_a_job_looks_at_its_own_nodes_first(command_line: CommandLine) -> None:
    """An interface that one of them lacks: the training does not start."""
    first = command_line.cluster.nodes[0]
    launch = ("launch=slurm", "launch.nodes=2", "launch.interface=fast0")
    make = ("ip", "link", "add", "fast0", "type", "bridge")
    assert command_line.cluster.on(first, *make).returncode == 0
    try:
        command_line.cluster.on(first, "ip", "link", "set", "fast0", "up")
        nodes = command_line.first_two_nodes
        train = ("train", *launch, nodes, "launch.preflight=true", "run.name=a", "--wait")
        done = command_line.type(*train)
    finally:
        command_line.cluster.on(first, "ip", "link", "del", "fast0")
    run = command_line.run()
    said = run.job_log_file.read_text()
    second = command_line.cluster.nodes[1]
    assert f"fail\t{second}\tinterface\tthere is no interface fast0 that is up" in said
    assert done.code == ExitCode.NOT_READY, said + done.err
    assert run.exit_code_file.read_text().strip() == str(int(ExitCode.NOT_READY))
    assert not run.metrics_file.exists(), "nothing was trained"
