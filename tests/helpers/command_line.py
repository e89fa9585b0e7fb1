"""The command line of a person at the test cluster, and what their runs left.

Everything that a command starts, on any host and by any daemon, inherits a mark and is found by it.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import command_runner
import slurm_cluster
from command_runner import CommandResult, RunningCommand, until
from slurm_cluster import TestCluster
from worlds import start_forked

from echelon.runs.metrics_file import read_metrics
from echelon.runs.run_folder import Run

ECHELON = (sys.executable, "-m", "echelon")
FAULTY = f"experiment={command_runner.HERE / 'faulty_experiment.py'}:experiment"
REGRESSION = f"experiment={command_runner.HERE / 'toy_experiments.py'}:regression"
START_S = 600.0
"""From typing to the first steps, on a machine with too few cores."""
GONE_S = 60.0
"""The same, from an end to the end of the last process."""


@dataclass
class CommandLine:
    """Types commands in a folder, on this machine or on hosts of the cluster."""

    cluster: TestCluster
    folder: Path
    variables: dict[str, str] = field(default_factory=dict)
    started: list[RunningCommand] = field(default_factory=list)

    def start(self, *words: str, on: str | None = None, **variables: str) -> RunningCommand:
        """`echelon WORDS`, here or on a host, in this folder."""
        return self.program(*ECHELON, *words, on=on, **variables)

    def program(self, *words: str, on: str | None = None, **variables: str) -> RunningCommand:
        slurm = {"SLURM_CONF": str(self.cluster.slurm_conf)}
        variables = slurm | self.variables | variables
        # What is typed is forked; an interpreter with other modules has to be a new one.
        if words[: len(ECHELON)] == ECHELON and "PYTHONPATH" not in variables:
            started = start_forked(words, self.folder, on, **variables)
        else:
            at = [sys.executable, str(slurm_cluster.PROGRAM), "--folder"]
            there = [*at, str(self.cluster.kind.folder), "exec", on, "--"] if on else []
            started = command_runner.start([*there, *words], self.folder, **variables)
        self.started.append(started)
        return started

    def type(
        self, *words: str, on: str | None = None, limit_s: float = 300.0, **variables: str
    ) -> CommandResult:
        return self.start(*words, on=on, **variables).wait(limit_s)

    def env_world(
        self,
        *words: str,
        port: int,
        nodes: int = 2,
        hosts: Sequence[str] = (),
        **variables: str,
    ) -> list[RunningCommand]:
        """The same command on each node, as `launch=env` wants it. A host that is named twice has
        two nodes."""
        hosts = hosts or self.cluster.nodes[:nodes]
        same = {
            "MASTER_ADDR": hosts[0],
            "MASTER_PORT": str(port),
            "WORLD_SIZE": str(len(hosts)),
            **variables,
        }
        return [
            self.start(*words, on=host, NODE_RANK=str(rank), **same)
            for rank, host in enumerate(hosts)
        ]

    @property
    def address(self) -> str:
        """Of this machine, as the hosts reach it."""
        return self.cluster.addresses[self.cluster.nodes[0]].rpartition(".")[0] + ".1"

    @property
    def first_two_nodes(self) -> str:
        """The setting with which a job waits for them. Otherwise Slurm may give it others, while
        one of them still ends the job before."""
        return f"launch.sbatch=['--nodelist={','.join(self.cluster.nodes[:2])}']"

    # --- runs ---

    def run(self, name: str = "a") -> Run:
        return Run(self.folder / "runs" / name)

    def step(self, name: str = "a") -> int:
        """The newest step in the metrics, whose last line may be half written."""
        lines = read_metrics(self.run(name).metrics_file)
        return max((line["step"] for line in lines if "loss" in line), default=0)

    def wait_for_step(self, step: int, name: str = "a", limit_s: float = START_S) -> None:
        until(lambda: self.step(name) >= step, limit_s, f"step {step}", self.describe)

    def wait_for_more(self, name: str = "a", limit_s: float = START_S) -> None:
        """It goes on."""
        self.wait_for_step(self.step(name) + 3, name, limit_s)

    def job(self, name: str = "a") -> str:
        return str(until(lambda: self.run(name).read_job_id(), START_S, "a job's number"))

    def hosts(self, job: str) -> list[str]:
        """Where a job runs, in the order of its nodes."""
        told = self.cluster.slurm("squeue", "-h", "-j", job, "-o", "%N").strip()
        return self.cluster.slurm("scontrol", "show", "hostnames", told).split()

    def output(self) -> str:
        """All that every command has printed."""
        return "\n".join(each.read_output() for each in self.started)

    def recent_output(self) -> str:
        """The end of it, for a message. What is looked for may stand before it."""
        return "\n".join(each.read_output()[-2000:] for each in self.started)

    def describe(self) -> str:
        return "\n".join(each.describe() for each in self.started)

    # --- processes ---

    def agent(self, host: str) -> int:
        """The one on a host, once it has workers."""
        return int(until(lambda: self._agent(host), START_S, f"an agent on {host}", self.describe))

    def worker(self, host: str) -> int:
        """The first one of a host's agent."""
        return command_runner.workers(self.agent(host))[0]

    def _agent(self, host: str) -> int:
        for pid in self._ours(host):
            is_typed = any(pid == each.process.pid for each in self.started)
            if (is_typed or "echelon" in _words(pid)) and command_runner.workers(pid):
                return pid
        return 0

    def _ours(self, *hosts: str) -> list[int]:
        """What our commands started and still runs, on all hosts or on these."""
        found = command_runner.find_processes(self.started)
        return [
            pid
            for pid in found
            if not hosts or any(self.cluster.is_on(pid, host) for host in hosts)
        ]

    def left(self, *hosts: str) -> list[str]:
        """The same, for a message."""
        return [f"{pid} {' '.join(_words(pid))[:120]}" for pid in self._ours(*hosts)]

    def require_nothing_left(self, *hosts: str, limit_s: float = GONE_S) -> None:
        try:
            until(lambda: not self.left(*hosts), limit_s, "nothing left")
        except AssertionError:
            raise AssertionError(f"left after {limit_s} s: {self.left(*hosts)}") from None


@contextmanager
def open_command_line(cluster: TestCluster, folder: Path) -> Iterator[CommandLine]:
    """Whatever a test does, no job and no process of it outlives the test."""
    command_line = CommandLine(cluster, folder)
    try:
        yield command_line
    finally:
        lines = cluster.slurm("squeue", "-h", "-o", "%i|%Z").splitlines()
        jobs = [line.split("|")[0] for line in lines if line.split("|")[1].startswith(str(folder))]
        if jobs:
            cluster.slurm("scancel", *jobs)
        for each in command_line.started:
            each.end()


# --- what a run left ---


def curve(run: Run) -> list[tuple[int, float]]:
    return command_runner.curve(run.folder) if run.metrics_file.exists() else []


def evaluations(run: Run) -> list[tuple[int, float]]:
    return command_runner.evaluations(run.folder)


def logs(run: Run, ranks: int) -> list[str]:
    return [run.get_rank_log_file(rank).read_text() for rank in range(ranks)]


_NOISE = re.compile(
    r"step \d+/|\[W.*hostname of the client socket|waiting for rank |rank \d+ waits "
)


def normalize_log(text: str) -> list[str]:
    """A log without what differs from time to time: numbers, how often progress was shown, that a
    rank had to wait for another, and what torch says of hosts that have no name."""
    lines = [line.strip() for line in text.splitlines() if not _NOISE.match(line)]
    return [re.sub(r"[\d.]+|[▁▂▃▄▅▆▇█]+", "#", line) for line in lines if line]


def _words(pid: int) -> list[str]:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text(errors="replace").rstrip("\0").split("\0")
    except OSError:
        return []
