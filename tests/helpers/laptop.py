"""A laptop beside the test cluster: a host without Slurm's commands, with a home of its own.

It is one of the cluster's hosts, where jobs of these tests do not run, and reaches the login node,
another one, by ssh alone. What it does not share with the cluster is what it cannot see: Slurm is
not on its PATH, and its folders are others.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import command_runner
import slurm_cluster
from command_runner import ECHELON, CommandResult, RunningCommand, until
from slurm_cluster import TestCluster
from sshd import start_sshd

from echelon.runs.run_folder import Run

_PORT = 2222
_PROGRAMS = ("ssh", "git", "sh", "bash", "env")


@dataclass
class Laptop:
    """Types commands where no Slurm is."""

    cluster: TestCluster
    folder: Path
    """Its project; the home is beside it."""
    remote: Path
    """The project's folder on the cluster."""
    ssh_config: Path
    started: list[RunningCommand] = field(default_factory=list)

    @property
    def host(self) -> str:
        return self.cluster.nodes[2]

    @property
    def home(self) -> Path:
        return self.folder.parent / "home"

    @property
    def words(self) -> tuple[str, ...]:
        """The settings of the cluster."""
        return (
            "launch=slurm",
            "launch.login=login",
            f"launch.ssh=ssh -F {self.ssh_config}",
            f"launch.remote_dir={self.remote}",
            f"launch.python={sys.executable}",
            f"launch.sbatch=['--exclude={self.host}']",
        )

    def start(self, *words: str, **variables: str) -> RunningCommand:
        """`echelon WORDS` in the project's folder."""
        return self._start([*ECHELON, *words], variables)

    def run_program(self, *words: str, limit_s: float = 300.0) -> CommandResult:
        """Any program in the project's folder."""
        return self._start(words, {}).wait(limit_s)

    def _start(self, words: Sequence[str], variables: Mapping[str, str]) -> RunningCommand:
        at = [sys.executable, str(slurm_cluster.PROGRAM), "--folder", str(self.cluster.kind.folder)]
        path = self.home / "bin"
        env = ["env", "-u", "SLURM_CONF", f"HOME={self.home}", f"PATH={path}"]
        env += [f"{name}={value}" for name, value in variables.items()]
        command = [*at, "exec", self.host, "--", *env, *words]
        started = command_runner.start(command, self.folder, ECHELON_CACHE=str(self.home / "cache"))
        self.started.append(started)
        return started

    def type(self, *words: str, limit_s: float = 300.0, **variables: str) -> CommandResult:
        return self.start(*words, **variables).wait(limit_s)

    def train(self, *words: str) -> CommandResult:
        """`echelon train` of the toy on the cluster."""
        return self.type("train", *self.words, "trainer.epochs=1", "samples=64", *words)

    def kill(self, command: RunningCommand) -> None:
        """SIGKILL to a command and the ssh that it started, as the end of a laptop's battery. What
        runs for it on the login node is another machine's."""
        for pid in command.find_all():
            with contextlib.suppress(OSError):
                if str(pid) not in self._login_pids():
                    os.kill(pid, signal.SIGKILL)
        command.process.wait()

    def kill_answering_processes(self) -> int:
        """SIGKILL to what answers laptops on the login node, as its owner may do with processes
        that are there for long; returns how many there were."""
        found = 0
        for pid in self._login_pids():
            with contextlib.suppress(OSError):
                command = Path(f"/proc/{pid}/cmdline").read_bytes()
                if b"i.readline" in command and not command.startswith(b"sh\0"):
                    os.kill(int(pid), signal.SIGKILL)
                    found += 1
        return found

    def _login_pids(self) -> set[str]:
        return {str(pid) for pid in self.cluster.processes(self.cluster.nodes[0])}

    def run(self, name: str) -> Run:
        """The copy of a run."""
        return Run(self.folder / "runs" / name)

    def jobs(self) -> list[dict[str, Any]]:
        """What `echelon jobs --json` shows."""
        found: list[dict[str, Any]] = json.loads(self.type("jobs", "--json").out)
        return found

    def queue(self, name: str) -> list[str]:
        """The jobs of a run's name, as Slurm has them."""
        return self.cluster.slurm("squeue", "-h", "-n", name, "-o", "%i").split()

    def wait_for_state(self, name: str, *states: str) -> str:
        """Until the copy says so; the laptop asks as a person would, again and again."""

        def find() -> str:
            shown = [job["state"] for job in self.jobs() if job["run"] == name]
            return shown[0] if shown and shown[0] in states else ""

        return str(until(find, 300, f"run {name} {states}", self.describe))

    def describe(self) -> str:
        return "\n".join(each.read_output()[-2000:] for each in self.started)


@contextmanager
def open_laptop(cluster: TestCluster, folder: Path) -> Iterator[Laptop]:
    """A laptop, and a login node that has Slurm; no job and no process of it outlives the test."""
    project = folder / "laptop" / "project"
    binaries = folder / "laptop" / "home" / "bin"
    for each in (project, binaries):
        each.mkdir(parents=True)
    for name in _PROGRAMS:
        found = shutil.which(name)
        if found:
            (binaries / name).symlink_to(os.path.realpath(found))
    ssh_config = folder / "ssh_config"
    with start_login_sshd(cluster, folder / "there"):
        write_ssh_config(cluster, ssh_config)
        laptop = Laptop(cluster, project, folder / "there" / "project", ssh_config)
        try:
            yield laptop
        finally:
            for command in laptop.started:
                command.end()
            end_jobs(cluster, folder)


def end_jobs(cluster: TestCluster, folder: Path) -> None:
    """Cancel the jobs that were submitted from below a folder."""
    lines = cluster.slurm("squeue", "-h", "-o", "%i|%Z").splitlines()
    jobs = [line.split("|")[0] for line in lines if line.split("|")[1].startswith(str(folder))]
    if jobs:
        cluster.slurm("scancel", *jobs)


@contextmanager
def start_login_sshd(
    cluster: TestCluster,
    home: Path,
    port: int = _PORT,
    prepare: str = 'exec "$@"',
    variables: str = "",
) -> Iterator[str]:
    """The sshd of a login node on the first host: those who log in find Slurm, and a home."""
    home.mkdir(parents=True, exist_ok=True)
    more = f"SetEnv SLURM_CONF={cluster.slurm_conf} HOME={home} {variables}\n"
    with start_sshd(cluster, cluster.nodes[0], [port], prepare, home, more) as address:
        yield address


def write_ssh_config(
    cluster: TestCluster, file: Path, name: str = "login", port: int = _PORT, more: str = ""
) -> None:
    """An ssh configuration in which the login node has a name."""
    text = cluster.ssh_config.read_text()
    first = f"Host {cluster.nodes[0]}\n"
    assert first in text
    file.write_text(text.replace(first, f"Host {name}\n    Port {port}\n{more}"))
