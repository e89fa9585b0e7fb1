"""Nodes of a Slurm job that were lost while the others go on: an agent is started there again.

The batch script runs this beside `srun`, on the first node of the job. With that node the job ends
anyway, while the agent that leads may be another one at any time. The leader says which nodes are
lost (`NodeReport`, in a file of the run folder). As long as Slurm has such a node in the job, a
further step starts an agent there, which joins as a spare does.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from echelon.launch.plan import NodeReport
from echelon.launch.slurm.batch_script import make_return_command
from echelon.runs.run_folder import Run
from echelon.runs.slurm_queue import expand_node_list, list_job_nodes
from echelon.utils.files import read_json_object

_POLL_S, _SIGNAL_POLL_S = 1.0, 0.1
FIRST_WAIT_S = 5.0
"""How long a node has been lost when an agent is started there again; each further try waits twice
as long as the one before."""
_LONGEST_WAIT_S = 300.0
MAX_TRIES = 10
"""A node whose agents do not join, or are lost again soon, is given up after so many."""
_STEADY_S = 600.0
"""An agent that took part for so long has not failed."""
_GRACE_S = 10.0
"""How long agents may take to end when the run is over."""
_JOIN_LIMIT_S = 600.0
"""An agent that takes no part after so long is ended. Slurm may keep its step waiting for ever."""

StartAgent = Callable[[str, int, str], "subprocess.Popen[bytes]"]
"""From the name of a host, a number for its agent and HOST:PORT of the leader's store."""


@dataclass
class _LostHost:
    """A host of which a node was lost."""

    due_s: float
    number: int
    """Of the agent that is to be started there, or was."""
    tries: int = 0
    process: subprocess.Popen[bytes] | None = None
    """The step of the newest agent, until it has ended."""
    started_s: float = 0.0
    joined_s: float | None = None
    is_given_up: bool = False


class NodeReturns:
    """Starts agents on lost nodes until the run is over."""

    def __init__(
        self,
        run: Run,
        hosts: Sequence[str],
        start_agent: StartAgent,
        list_hosts: Callable[[], Sequence[str]],
        first_wait_s: float = FIRST_WAIT_S,
        poll_s: float = _POLL_S,
    ) -> None:
        """`hosts` are those that the job began with, by the numbers of their nodes; `list_hosts`
        returns those that it has now, or nothing where that is not known."""
        self._run, self._start_agent, self._list_hosts = run, start_agent, list_hosts
        self._first_wait_s, self._poll_s = first_wait_s, poll_s
        self._hosts = dict(enumerate(hosts))
        """Number of a node → where it runs or ran."""
        self._lost: dict[str, _LostHost] = {}
        self._over_since_s: float | None = None
        self._is_stopping = self._is_first_step_over = False

    def stop(self) -> None:
        """Start no further agent. Those that take part are waited for. A signal handler may call
        it."""
        self._is_stopping = True

    def end_without_agents(self) -> None:
        """Go on only while an agent takes part that was started here: all others are gone. A signal
        handler may call it."""
        self._is_first_step_over = True

    def run_until_over(self) -> None:
        """Return when the run is over, or nobody is left to wait for."""
        while True:
            may_end = any(self._get_signals())  # before the report: it is newer than the signal
            report = self._read_report()
            if report is not None:
                self._take_members(report)
            if self._has_ended(may_end):
                break
            if report is not None and not self._is_stopping:
                self._start_agents(report)
            self._sleep()
        for lost in self._lost.values():
            _kill(lost)

    def _sleep(self) -> None:
        """Sleep for a while, or until a signal comes for which the batch script waits."""
        until_s, told = time.monotonic() + self._poll_s, self._get_signals()
        while time.monotonic() < until_s and self._get_signals() == told:
            time.sleep(min(_SIGNAL_POLL_S, self._poll_s))

    def _get_signals(self) -> tuple[bool, bool]:
        return self._is_stopping, self._is_first_step_over

    def _read_report(self) -> NodeReport | None:
        with contextlib.suppress(TypeError, KeyError, ValueError):
            if fields := read_json_object(self._run.node_report_file):
                return NodeReport.from_fields(fields)
        return None

    def _has_ended(self, may_end: bool) -> bool:
        """Return whether nobody is left to wait for. Agents end with the run, by themselves."""
        now = time.monotonic()
        if self._over_since_s is None and self._has_exit_code():
            self._over_since_s, self._is_stopping, may_end = now, True, True
        if self._over_since_s is not None and now > self._over_since_s + _GRACE_S:
            return True
        taking_part = [e for e in self._lost.values() if e.joined_s is not None and _is_running(e)]
        return may_end and not taking_part

    def _has_exit_code(self) -> bool:
        with contextlib.suppress(OSError):
            return self._run.agent_exit_file.stat().st_size > 0
        return False

    def _take_members(self, report: NodeReport) -> None:
        """Note which agents take part, and which nodes are lost or lost again."""
        now = time.monotonic()
        for lost in self._lost.values():
            if lost.number in report.nodes and lost.joined_s is None and lost.process is not None:
                lost.joined_s = now
        for node, number in report.returning:
            if (host := self._hosts.get(node)) is None:
                continue
            lost = self._lost.setdefault(host, _LostHost(now + self._first_wait_s, number))
            if lost.number != number:
                _kill(lost)  # of a node that was cut off srun would hear nothing for long
                if lost.joined_s is not None and now > lost.joined_s + _STEADY_S:
                    lost.tries = 0
                lost.number, lost.joined_s = number, None
                lost.due_s = now + self._get_wait_s(lost.tries)

    def _get_wait_s(self, tries: int) -> float:
        return min(self._first_wait_s * 2.0**tries, max(_LONGEST_WAIT_S, self._first_wait_s))

    def _start_agents(self, report: NodeReport) -> None:
        """Start an agent on each lost node whose time it is."""
        if self._run.cancel_file.exists():
            return
        now = time.monotonic()
        for host in [self._hosts[node] for node, _ in report.returning if node in self._hosts]:
            lost = self._lost[host]
            if _is_running(lost):
                if lost.joined_s is None and now > lost.started_s + _JOIN_LIMIT_S:
                    _kill(lost)
                continue
            if lost.is_given_up or now < lost.due_s:
                continue
            if lost.tries == MAX_TRIES:
                self._give_up(host, f"an agent was started there {MAX_TRIES} times in vain")
                continue
            lost.due_s = now + self._get_wait_s(lost.tries + 1)
            if not (present := self._list_hosts()):
                continue  # Slurm does not answer
            if host not in present:
                self._give_up(host, "Slurm has taken it out of this job")
                continue
            _print(f"{host} is lost, and still in this job: starting agent {lost.number} there")
            lost.tries += 1
            lost.started_s, self._hosts[lost.number] = now, host
            lost.process = self._start_agent(host, lost.number, report.master)

    def _give_up(self, host: str, reason: str) -> None:
        self._lost[host].is_given_up = True
        more = f"`echelon scale {self._run.name} nodes=N` gets another node by a further job"
        _print(f"{host} does not come back: {reason}; {more}")


def return_lost_nodes(folder: str) -> int:
    """Start agents again on lost nodes of the job that this process is in, until the run is over;
    returns 0. After TERM it starts no more; by USR1 it is told that `srun` has ended. Then it waits
    for those that it has started and that take part."""
    run, job = Run(Path(folder)), os.environ["SLURM_JOB_ID"]
    hosts = expand_node_list(os.environ["SLURM_JOB_NODELIST"])

    def start_agent(host: str, node: int, master: str) -> subprocess.Popen[bytes]:
        config = run.read_launch_config()
        command = make_return_command(config, run, host, node, len(hosts), master)
        return subprocess.Popen(command, stdin=subprocess.DEVNULL)

    returns = NodeReturns(run, hosts, start_agent, lambda: list_job_nodes(job))
    signal.signal(signal.SIGTERM, lambda number, frame: returns.stop())
    signal.signal(signal.SIGUSR1, lambda number, frame: returns.end_without_agents())
    returns.run_until_over()
    return 0


def _is_running(lost: _LostHost) -> bool:
    return lost.process is not None and lost.process.poll() is None


def _kill(lost: _LostHost) -> None:
    """End the step of an agent, if it runs; so its agent ends too."""
    if lost.process is not None and lost.process.poll() is None:
        lost.process.kill()
        lost.process.wait()


def _print(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
