"""The test cluster as tests see it: `cluster/cluster.py` behind typed methods."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

PROGRAM = Path(__file__).parents[2] / "cluster" / "cluster.py"
EXIT_CANNOT_BE_MADE = 3
UP_S = 600.0
"""The first `up` on a machine installs packages."""
LIMIT_S = 300.0
EMPTY_S = 240.0
PATIENCE_S = 240
MAX_SLOTS = 12


@dataclass(frozen=True)
class ClusterKind:
    """Which cluster; several run side by side."""

    folder: Path
    options: tuple[str, ...] = ()
    """Of `cluster.py up`."""


def default_folder() -> Path:
    return Path(os.environ.get("ECHELON_CLUSTER", "/tmp/echelon-cluster"))


class ClusterSlot:
    """The names and networks of one test process's clusters. No other process of this machine has
    the same ones: not another worker of pytest-xdist, nor another checkout's tests."""

    def __init__(self) -> None:
        for number in range(MAX_SLOTS):
            # A name that only the kernel keeps: it is free again when this process ends.
            self._lock = socket.socket(socket.AF_UNIX)
            try:
                self._lock.bind(f"\0{default_folder()} {number}")
            except OSError:
                self._lock.close()
                continue
            self.number = number
            return
        pytest.fail(f"{MAX_SLOTS} test processes have a cluster each on this machine already")

    def make_kind(self, accounting: bool) -> ClusterKind:
        folder = default_folder()
        if not accounting and self.number == 0:  # as `make cluster` makes it for a developer
            return ClusterKind(folder)
        name = f"{folder.name}{'-accounting' if accounting else ''}-{self.number}"
        prefix = ("acct" if accounting else "n") + chr(ord("a") + self.number)
        net = f"10.213.{60 + 2 * self.number + accounting}"
        options = ("--prefix", prefix, "--net", net, *(["--accounting"] if accounting else []))
        return ClusterKind(folder.with_name(name), options)


def manage(
    kind: ClusterKind, *words: str, limit_s: float = LIMIT_S
) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(PROGRAM), "--folder", str(kind.folder), *words]
    return run(command, dict(os.environ), limit_s)


def run(
    command: Sequence[str], env: dict[str, str], limit_s: float, cwd: Path | None = None
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command,
        env=env,
        cwd=cwd,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=limit_s,
    )


def is_up(kind: ClusterKind) -> bool:
    return manage(kind, "status").returncode == 0


def start(kind: ClusterKind) -> TestCluster:
    """The cluster, made or repaired; the test is skipped where none can be made."""
    done = manage(kind, "up", *kind.options, limit_s=UP_S)
    if done.returncode == EXIT_CANNOT_BE_MADE:
        if os.environ.get("ECHELON_REQUIRE_CLUSTER") == "1":
            pytest.fail(done.stderr.strip(), pytrace=False)
        pytest.skip(done.stderr.strip())
    require(done)
    return TestCluster(kind, json.loads(require(manage(kind, "status", "--json"))))


def require(done: subprocess.CompletedProcess[str]) -> str:
    """The standard output of a command that worked."""
    if done.returncode != 0:
        pytest.fail(f"{done.args} ended with {done.returncode}:\n{done.stdout}{done.stderr}")
    return done.stdout


def wait_until(condition: Callable[[], bool], limit_s: float = LIMIT_S) -> None:
    deadline = time.monotonic() + limit_s
    while not condition():
        if time.monotonic() > deadline:
            pytest.fail(f"not within {limit_s:g} s")
        time.sleep(0.1)


class TestCluster:
    """A running cluster. Methods that break something leave it to the fixture `_heal`."""

    __test__ = False  # not a class of tests, though pytest would think so by its name

    def __init__(self, kind: ClusterKind, status: dict[str, object]) -> None:
        hosts, addresses = status["hosts"], status["addresses"]
        assert isinstance(hosts, list)
        assert isinstance(addresses, dict)
        self.kind = kind
        self.nodes: list[str] = hosts
        self.addresses: dict[str, str] = addresses
        self.ssh_config = Path(str(status["ssh_config"]))
        self.slurm_conf = Path(str(status["slurm_conf"]))
        self.broken = False

    @property
    def env(self) -> dict[str, str]:
        """For Slurm's commands, run on this machine."""
        return {**os.environ, "SLURM_CONF": str(self.slurm_conf)}

    def slurm(self, *words: str, cwd: Path | None = None, limit_s: float = LIMIT_S) -> str:
        """A Slurm command that has to work: its standard output."""
        return require(run(words, self.env, limit_s, cwd))

    def job_state(self, job: str) -> str:
        """Slurm's word, such as RUNNING; known until a minute after the job's end."""
        return self.slurm("squeue", "-h", "-t", "all", "-j", job, "-o", "%T").strip()

    def wait_for_job(self, job: str, state: str, limit_s: float = LIMIT_S) -> None:
        """Until Slurm says so of the job; the failure shows how everything stands."""
        self._wait(lambda: self.job_state(job) == state, f"job {job} {state}", limit_s)

    def wait_until_empty(self) -> None:
        """Until no job is left: Slurm asks a node that was killed only now and then whether the
        job it had is gone, and till then nobody gets the whole node."""
        self._wait(lambda: not self.slurm("squeue", "-h"), "all jobs over", EMPTY_S)

    def _wait(self, condition: Callable[[], bool], what: str, limit_s: float) -> None:
        deadline = time.monotonic() + limit_s
        while not condition():
            if time.monotonic() > deadline:
                stands = self.slurm("squeue") + self.slurm("sinfo", "-N", "-l")
                pytest.fail(f"not within {limit_s:g} s: {what}\n{stands}")
            time.sleep(0.1)

    def on(
        self, node: str, *words: str, limit_s: float = LIMIT_S
    ) -> subprocess.CompletedProcess[str]:
        """A command on a host, whether the network reaches it or not."""
        return manage(self.kind, "exec", node, "--", *words, limit_s=limit_s)

    def ssh(
        self, node: str, *words: str, limit_s: float = LIMIT_S
    ) -> subprocess.CompletedProcess[str]:
        return run(["ssh", "-F", str(self.ssh_config), node, *words], self.env, limit_s)

    def processes(self, node: str) -> dict[int, list[str]]:
        """Command lines on a host by process id, without the daemons'."""
        lines = require(manage(self.kind, "processes", node)).splitlines()
        pairs = (line.split(" ", 1) for line in lines)
        return {int(pid): json.loads(words) for pid, words in pairs}

    def is_on(self, pid: int, node: str) -> bool:
        """Whether a process runs on a host."""
        try:
            return os.path.samefile(f"/proc/{pid}/ns/net", f"/run/netns/{node}")
        except OSError:  # it ended meanwhile
            return False

    def link(self, node: str, state: str) -> None:
        """Cut a host off with "down", heal it with "up"."""
        self._break("link", node, state)

    def netem(self, node: str, words: str) -> None:
        """Shape a host's cable; the test is skipped where the kernel cannot."""
        self.broken = True
        done = manage(self.kind, "netem", node, words)
        if done.returncode == EXIT_CANNOT_BE_MADE:
            pytest.skip(done.stderr.strip())
        require(done)

    def kill_node(self, node: str) -> None:
        """SIGKILL to all on a host: daemons, jobs, logins."""
        self._break("kill-node", node)

    def start_node(self, node: str) -> None:
        require(manage(self.kind, "start-node", node, limit_s=2 * LIMIT_S))

    def restart_controller(self) -> None:
        """Jobs go on meanwhile. The nodes are unknown to the new one until they register."""
        self.broken = True
        require(manage(self.kind, "restart-controller"))

    @contextmanager
    def patient_controller(self) -> Iterator[None]:
        """While in this context Slurm gives a silent node several minutes, as on real clusters."""
        written = self.slurm_conf.read_text()
        patient = re.sub(r"(?m)^SlurmdTimeout=\d+$", f"SlurmdTimeout={PATIENCE_S}", written)
        assert patient != written
        try:
            self.slurm_conf.write_text(patient)
            self.slurm("scontrol", "reconfigure")
            yield
        finally:
            self.slurm_conf.write_text(written)
            self.slurm("scontrol", "reconfigure")

    def heal(self) -> None:
        """All cables and nodes as at the start."""
        require(manage(self.kind, "up", *self.kind.options, limit_s=UP_S))
        self.broken = False

    def _break(self, *words: str) -> None:
        self.broken = True
        require(manage(self.kind, *words))
