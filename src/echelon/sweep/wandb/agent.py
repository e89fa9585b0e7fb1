"""`--engine wandb`: the search is on wandb's server, the trials are whole runs started from here.

The agents are our own. `wandb agent` exits 0 when its run fails, looks only every five seconds,
kills what has not saved within half a minute of a stop, and gives up after three quick failures. A
trial is still started as `wandb agent` would start it, by a few variables and a file, so that it is
the same whoever does, and so that agents of others can work on the same sweep.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import FrameType
from typing import Any

from echelon.errors import EchelonError, Exit, Fault
from echelon.jobs.status import read_run_status
from echelon.launch.process_record import is_alive
from echelon.runs.run_folder import Run
from echelon.sweep.display import print_report
from echelon.sweep.lock import SweepLock
from echelon.sweep.metric_history import MetricHistory, to_file_key
from echelon.sweep.plan import SweepPlan
from echelon.sweep.sweep_file import SweepFile
from echelon.sweep.sweep_folder import SweepSettings, unwritable_folder_error
from echelon.sweep.wandb import server_sweep, trial_history
from echelon.sweep.wandb.client import ServerUnavailableError, WandbServer
from echelon.sweep.wandb.report import build_server_report
from echelon.sweep.wandb.trial_history import DONE_STATES, WandbTrialRecord
from echelon.sweep.wandb.trial_process import (
    WandbTrialProcess,
    build_attach_command,
    build_trial_command,
)
from echelon.tracking import wandb_run

_POLL_S = 0.1
_HEARTBEAT_S = 5.0
_RETRY_S = 15.0
"""After a server did not answer."""
_GIVE_UP_S = 600.0
_MAX_FAILURES_IN_A_ROW = 3
"""So many failures, and the fault is hardly the parameters'."""


def run_agents(file: SweepFile, plan: SweepPlan, parallel: int, as_json: bool = False) -> int:
    """Work on the sweep until its server says that it is over.

    What the sweep's folder holds is gone on with. The exit code is that of the trials: 1 when any
    of them failed.
    """
    server_sweep.require_wandb(os.environ)
    settings, folder = plan.settings, plan.sweep.folder
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise unwritable_folder_error(folder, error) from None
    with SweepLock(plan.sweep.lock_file, f"the sweep {plan.sweep.name} is at work already"):
        server, sweep = server_sweep.open_server_sweep(file, settings, folder)
        agents = [_AgentSlot() for _ in range(parallel)]
        pool = _AgentPool(server, sweep, settings, folder, agents, prints_rows=not as_json)
        try:
            return pool.run()
        finally:
            if as_json:
                print_report(build_server_report(plan.sweep), as_json)


@dataclass
class _AgentSlot:
    """Has one trial at a time; wandb's server knows it by its id."""

    id: str = ""
    trial_record: WandbTrialRecord | None = None
    process: WandbTrialProcess | None = None
    next_heartbeat_at: float = 0.0
    is_done: bool = False
    """It takes no more."""
    is_stop_requested: bool = False
    """Its server wants no more of the trial."""


@dataclass
class _AgentPool:
    server: WandbServer
    sweep: str
    settings: SweepSettings
    folder: Path
    """The sweep's own, beside those of its trials."""
    agents: list[_AgentSlot]
    prints_rows: bool = True
    """Print a line for each trial that ends."""
    unfinished: list[WandbTrialRecord] = field(default_factory=list)
    """What was begun and is to be ended before anything new."""
    failed: list[WandbTrialRecord] = field(default_factory=list)
    refused: list[WandbTrialRecord] = field(default_factory=list)
    failures_in_a_row: int = 0
    is_stopping: bool = False
    signals_received: int = 0
    """Signals; what they ask for is done between two looks."""
    signals_handled: int = 0
    last_answer_at: float = field(default_factory=time.monotonic)
    is_silence_reported: bool = False
    refusal: EchelonError | None = None

    def run(self) -> int:
        self.unfinished = trial_history.read_unfinished(self.folder)
        before = {n: signal.signal(n, self._count_signal) for n in (signal.SIGINT, signal.SIGTERM)}
        try:
            while any(agent.process or not agent.is_done for agent in self.agents):
                self._handle_signals()
                for agent in self.agents:
                    self._advance_agent(agent)
                if self.refusal or self.failures_in_a_row >= _MAX_FAILURES_IN_A_ROW:
                    for agent in self.agents:
                        agent.is_done = True
                time.sleep(_POLL_S)
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
        return self._conclude()

    # --- an agent's turn ---

    def _advance_agent(self, agent: _AgentSlot) -> None:
        if agent.process is not None and (code := agent.process.poll()) is not None:
            self._finish_trial(agent, code)
        if agent.process is None and self.is_stopping:
            agent.is_done = True
        elif agent.process is None and self.unfinished and not agent.is_done:
            self._resume_unfinished(agent)
        elif time.monotonic() >= agent.next_heartbeat_at and not (
            agent.is_done and agent.process is None
        ):
            self._send_heartbeat(agent)

    def _send_heartbeat(self, agent: _AgentSlot) -> None:
        agent.next_heartbeat_at = time.monotonic() + _HEARTBEAT_S
        try:
            agent.id = agent.id or self.server.register_agent(socket.gethostname(), self.sweep)
            commands = self.server.send_heartbeat(
                agent.id, [agent.trial_record.id] if agent.trial_record else []
            )
        except ServerUnavailableError as error:
            self._handle_silence(agent, str(error))
            return
        except EchelonError as error:
            self.refusal = self.refusal or error
            agent.is_done = True
            return
        self.last_answer_at, self.is_silence_reported = time.monotonic(), False
        for command in commands:
            self._execute_command(agent, command)

    def _handle_silence(self, agent: _AgentSlot, reason: str) -> None:
        agent.next_heartbeat_at = time.monotonic() + _RETRY_S
        if not self.is_silence_reported:
            self.is_silence_reported = True
            _print_status(
                f"warning: wandb: no answer from its server ({reason}); trials that run go on"
            )
        if agent.process is None and time.monotonic() - self.last_answer_at > _GIVE_UP_S:
            agent.is_done = True
            self.refusal = self.refusal or EchelonError(
                Fault(
                    f"wandb's server has not answered for {_GIVE_UP_S / 60:.0f} minutes",
                    "type the same command again later: the sweep goes on where it is",
                ),
                exit=Exit.FAILED,
            )

    def _execute_command(self, agent: _AgentSlot, command: dict[str, Any]) -> None:
        kind = command.get("type")
        if kind in ("run", "resume") and agent.process is None:
            self._accept_trial(agent, command)
        elif kind == "exit":
            agent.is_done = True
            self._stop_trial(agent)
        elif (
            kind == "stop" and agent.trial_record and command.get("run_id") == agent.trial_record.id
        ):
            self._stop_trial(agent)

    def _accept_trial(self, agent: _AgentSlot, command: dict[str, Any]) -> None:
        """What a server hands out is checked before it is even written down."""
        id = str(command.get("run_id"))
        known = {
            trial_record.id: trial_record.state
            for trial_record in trial_history.read_records(self.folder)
        }
        at_work = [other.trial_record.id for other in self.agents if other.trial_record]
        if known.get(id) in DONE_STATES or id in at_work:
            return
        try:
            given = {name: entry["value"] for name, entry in dict(command["args"]).items()}
            told = WandbTrialRecord(id, self.sweep, given)
            told.to_trial()
        except (EchelonError, KeyError, TypeError, ValueError) as error:
            what = error.faults[0].what if isinstance(error, EchelonError) else "no parameters"
            self.refused.append(WandbTrialRecord(id[:100], self.sweep, {}, "failed", what))
            self._report_trial(self.refused[-1])
            return
        self._start_trial(agent, told)

    # --- a trial ---

    def _start_trial(self, agent: _AgentSlot, trial_record: WandbTrialRecord) -> None:
        trial_history.write_record(self.folder, replace(trial_record, state="running"))
        agent.trial_record, agent.process = trial_record, self._start_process(trial_record)
        agent.next_heartbeat_at = 0.0
        given = "  ".join(
            f"{name}={value}" for name, value in trial_record.to_trial().values.items()
        )
        _print_status(f"trial {trial_record.id} begins: {given}")

    def _resume_unfinished(self, agent: _AgentSlot) -> None:
        """With what a broken-off sweep left, once the process that had it has saved."""
        for told in self.unfinished:
            if not is_alive(self._trial_run(told).read_status().get("process")):
                self.unfinished.remove(told)
                self._start_trial(agent, told)
                return

    def _start_process(self, trial_record: WandbTrialRecord) -> WandbTrialProcess:
        """A job of Slurm's outlives whoever looked at it, and is looked at again."""
        run, trial = self._trial_run(trial_record), trial_record.to_trial()
        standing = read_run_status(run) if run.read_status().get("launcher") == "slurm" else None
        queued = standing is not None and standing.job and standing.is_active
        command = build_trial_command(self.settings, trial, self.folder.parent)
        return WandbTrialProcess.start(
            trial, build_attach_command(run) if queued else command, self.folder
        )

    def _stop_trial(self, agent: _AgentSlot) -> None:
        """The server wants no more of it: save, end, do not come back."""
        if agent.process and agent.trial_record:
            agent.is_stop_requested = True
            agent.process.cancel(self._trial_run(agent.trial_record))

    def _finish_trial(self, agent: _AgentSlot, code: int) -> None:
        assert agent.trial_record is not None
        run = self._trial_run(agent.trial_record)
        ended = replace(agent.trial_record, state=self._determine_state(agent, run, code))
        if ended.state == "failed":
            ended = replace(
                ended, cause=_find_failure_cause(run, trial_history.log_file(self.folder, ended.id))
            )
        agent.trial_record, agent.process, agent.is_stop_requested = None, None, False
        agent.next_heartbeat_at = 0.0
        ended = replace(ended, value=self._read_metric_value(run))
        trial_history.write_record(self.folder, ended)
        self._report_trial(ended)

    def _determine_state(self, agent: _AgentSlot, run: Run, code: int) -> str:
        """torchrun and the like have codes of their own, and so has what ends while it starts."""
        if code == Exit.OK:
            return "finished"
        saved = code == Exit.PREEMPTED or run.read_status().get("state") == "preempted"
        if agent.is_stop_requested or (saved and run.cancel_file.exists() and not self.is_stopping):
            return "stopped"
        return "preempted" if saved or self.is_stopping else "failed"

    def _report_trial(self, trial_record: WandbTrialRecord) -> None:
        value = "" if trial_record.value is None else f"{trial_record.value:.6g}"
        given = " ".join(f"{name}={value}" for name, value in trial_record.given.items())
        if self.prints_rows:
            print("\t".join((trial_record.id, trial_record.state, value, given)), flush=True)
        if trial_record.state == "failed":
            self.failed.append(trial_record)
            self.failures_in_a_row += 1
            _print_status(f"trial {trial_record.id} failed: {trial_record.cause}")
        elif trial_record.state in DONE_STATES:
            self.failures_in_a_row = 0

    def _read_metric_value(self, run: Run) -> float | None:
        key = to_file_key(self.settings.metric["name"], bool(self.settings.program))
        values = MetricHistory(run.metrics_file, key).read()
        return values[-1] if values else None

    def _trial_run(self, trial_record: WandbTrialRecord) -> Run:
        return Run(self.folder.with_name(trial_record.to_trial().run_name))

    # --- the end ---

    def _count_signal(self, number: int, frame: FrameType | None) -> None:
        self.signals_received += 1

    def _handle_signals(self) -> None:
        if self.signals_handled == self.signals_received:
            return
        self.signals_handled, again, self.is_stopping = (
            self.signals_received,
            self.is_stopping,
            True,
        )
        _print_status(
            "stopped at once; the last snapshots stand"
            if again
            else "stopping after this step and saving; Ctrl-C again stops at once"
        )
        for agent in self.agents:
            if agent.process and agent.trial_record:
                agent.process.stop(self._trial_run(agent.trial_record), now=again)

    def _conclude(self) -> int:
        records = trial_history.read_records(self.folder)
        states = Counter(one.state for one in (*records, *self.refused))
        counts = ", ".join(f"{number} {state}" for state, number in states.items())
        _print_status(f"sweep {self.sweep}: {counts or 'no trial'}")
        self._report_unsent(records)
        if self.refusal:
            raise self.refusal
        if self.failures_in_a_row >= _MAX_FAILURES_IN_A_ROW:
            first = self.failed[-self.failures_in_a_row]
            log = trial_history.log_file(self.folder, first.id)
            raise EchelonError(
                Fault(
                    f"{self.failures_in_a_row} trials in a row have failed, the first, {first.id}, because: "
                    f"{first.cause}",
                    "look at the sweep there" if first in self.refused else f"look into {log}",
                ),
                exit=Exit.FAILED,
            )
        if self.is_stopping:
            _print_status("the same command goes on with it")
            return Exit.PREEMPTED
        return Exit.FAILED if self.failed else Exit.OK

    def _report_unsent(self, records: Sequence[WandbTrialRecord]) -> None:
        """Where a server was out of reach, the files are there to be sent."""
        for one in records:
            if command := wandb_run.get_summary_rows(self._trial_run(one)).get("send it"):
                _print_status(f"trial {one.id} did not reach the server: {command}")


def _find_failure_cause(run: Run, log: Path) -> str:
    """In one line: what the run itself says, else the end of what its command said."""
    failure = run.read_status().get("failure")
    if isinstance(failure, dict) and failure.get("summary"):
        return str(failure["summary"])
    lines = log.read_text(errors="replace", encoding="utf-8").split("\n") if log.exists() else []
    errors = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    spoken = [line.strip() for line in lines if line.strip()]
    return (errors[:1] or spoken[-1:] or ["it said nothing"])[0]


def _print_status(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
