"""Agents of a sweep on wandb's server: they ask for trials, start them and report how they end.

One loop serves both kinds of agents. `echelon sweep --engine wandb` has several, whose trials are
runs of their own (engine.py). `wandb agent` in a command file is one agent inside a job, whose
trials fill the job (submission/wandb_agent.py). What differs, which is how a trial is checked,
started and evaluated, is behind TrialBackend.

wandb's own agent is not used. It exits with 0 when a trial fails, polls every five seconds, kills
a trial that has not saved within half a minute of a stop, and knows one machine only. A trial is
still started as that agent would start it, with the same variables and the same file, so that it
behaves the same, and so that agents of other people can work on the same sweep.
"""

from __future__ import annotations

import signal
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import FrameType
from typing import Any, Protocol

from echelon.errors import EchelonError, ExitCode, Fault
from echelon.sweep.wandb.client import ServerUnavailableError, WandbServer
from echelon.sweep.wandb.trial_records import DONE_STATES, WandbTrialRecord
from echelon.utils.text import print_to_stderr

_POLL_S = 0.1
_HEARTBEAT_S = 5.0
RETRY_S = 15.0
"""Time between two requests to a server that does not answer."""
GIVE_UP_S = 600.0
"""An agent without a trial ends when the server has not answered for so long."""
MAX_FAILURES_IN_A_ROW = 3
"""After so many failures the cause is hardly the parameters."""


class AgentTrial(Protocol):
    """A trial that was started by an agent of this process."""

    def poll(self) -> int | None:
        """Return the exit code, or None while the trial runs."""

    def cancel(self) -> None:
        """Ask the trial to save and to end for good: the server stopped it."""

    def interrupt(self, signal_number: int, is_repeated: bool) -> None:
        """Ask the trial to save and to end for now: this process got a signal."""


class TrialBackend(Protocol):
    """How trials are checked, started and evaluated."""

    def has_result(self, trial_id: str) -> bool:
        """Return whether the trial has a result already, and must not run again."""

    def create_trial_record(self, trial_id: str, parameters: Mapping[str, Any]) -> WandbTrialRecord:
        """Return the record of a new trial, or raise EchelonError if it must not run."""

    def can_resume_trial(self, record: WandbTrialRecord) -> bool:
        """Return whether no process of an earlier attempt is left."""

    def start_trial(self, record: WandbTrialRecord) -> AgentTrial:
        """Start the trial."""

    def record_trial_end(
        self, record: WandbTrialRecord, exit_code: int, is_cancelled: bool, is_stopping: bool
    ) -> WandbTrialRecord:
        """Return the record with state, cause and metric of a trial that ended.

        `is_cancelled`: the server had stopped it; `is_stopping`: this process is being stopped.
        """


@dataclass
class AgentSlot:
    """One agent, which runs one trial at a time. wandb's server knows it by its id."""

    id: str = ""
    record: WandbTrialRecord | None = None
    trial: AgentTrial | None = None
    next_heartbeat_at: float = 0.0
    is_done: bool = False
    """It takes no more trials."""
    is_cancelled: bool = False
    """The server has stopped the trial that runs."""


@dataclass
class AgentPool:
    """Runs agents in one thread until the server has no more trials for them."""

    server: WandbServer
    sweep: str
    """ENTITY/PROJECT/SWEEP."""
    backend: TrialBackend
    slots: list[AgentSlot]
    unfinished: list[WandbTrialRecord] = field(default_factory=list)
    """Trials of an earlier process, which run before any new one."""
    max_trials: int | None = None
    max_failures_in_a_row: int = MAX_FAILURES_IN_A_ROW
    prints_rows: bool = True
    """Print a line with the result of each trial on stdout."""
    handled_signals: tuple[signal.Signals, ...] = (signal.SIGINT, signal.SIGTERM)

    ended: list[WandbTrialRecord] = field(default_factory=list)
    """Trials that ended in this process, in that order, and those that were refused."""
    refused: list[WandbTrialRecord] = field(default_factory=list)
    failures_in_a_row: int = 0
    is_stopping: bool = False
    refusal: EchelonError | None = None
    """Why the server is asked no more."""
    _started_count: int = 0
    _received_signals: list[int] = field(default_factory=list)
    _last_answer_at: float = field(default_factory=time.monotonic)
    _is_silence_reported: bool = False

    def run(self) -> None:
        """Return when all agents are done and no trial runs."""
        before = {n: signal.signal(n, self._receive_signal) for n in self.handled_signals}
        try:
            while any(slot.trial or not slot.is_done for slot in self.slots):
                self._handle_signals()
                for slot in self.slots:
                    self._advance(slot)
                if self.refusal or self.failures_in_a_row >= self.max_failures_in_a_row:
                    for slot in self.slots:
                        slot.is_done = True
                time.sleep(_POLL_S)
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    @property
    def failed_trials(self) -> list[WandbTrialRecord]:
        """The trials of this process that failed, those that were refused among them."""
        return [record for record in self.ended if record.state == "failed"]

    # --- the turn of an agent ---

    def _advance(self, slot: AgentSlot) -> None:
        if slot.trial is not None and (exit_code := slot.trial.poll()) is not None:
            self._end_trial(slot, exit_code)
        if slot.trial is None and (self.is_stopping or self._has_enough_trials()):
            slot.is_done = True
        elif slot.trial is None and self.unfinished and not slot.is_done:
            self._resume_unfinished_trial(slot)
        elif time.monotonic() >= slot.next_heartbeat_at and not (slot.is_done and not slot.trial):
            self._send_heartbeat(slot)

    def _has_enough_trials(self) -> bool:
        return self.max_trials is not None and self._started_count >= self.max_trials

    def _send_heartbeat(self, slot: AgentSlot) -> None:
        slot.next_heartbeat_at = time.monotonic() + _HEARTBEAT_S
        try:
            slot.id = slot.id or self.server.register_agent(socket.gethostname(), self.sweep)
            commands = self.server.send_heartbeat(slot.id, [slot.record.id] if slot.record else [])
        except ServerUnavailableError as error:
            self._handle_unavailable_server(slot, str(error))
            return
        except EchelonError as error:
            self.refusal = self.refusal or error
            slot.is_done = True
            return
        self._last_answer_at, self._is_silence_reported = time.monotonic(), False
        for command in commands:
            self._execute_command(slot, command)

    def _handle_unavailable_server(self, slot: AgentSlot, reason: str) -> None:
        slot.next_heartbeat_at = time.monotonic() + RETRY_S
        if not self._is_silence_reported:
            self._is_silence_reported = True
            print_to_stderr(
                f"warning: wandb: no answer from its server ({reason}); running trials continue"
            )
        if slot.trial is None and time.monotonic() - self._last_answer_at > GIVE_UP_S:
            slot.is_done = True
            self.refusal = self.refusal or EchelonError(
                Fault(
                    f"wandb's server has not answered for {GIVE_UP_S / 60:.0f} minutes",
                    "run the same command again later: the sweep continues where it is",
                ),
                exit=ExitCode.FAILED,
            )

    def _execute_command(self, slot: AgentSlot, command: dict[str, Any]) -> None:
        kind = command.get("type")
        if kind in ("run", "resume") and slot.trial is None:
            self._accept_trial(slot, command)
        elif kind == "exit":
            slot.is_done = True
            self._cancel_trial(slot)
        elif kind == "stop" and slot.record and command.get("run_id") == slot.record.id:
            self._cancel_trial(slot)

    def _accept_trial(self, slot: AgentSlot, command: dict[str, Any]) -> None:
        """Start a trial that the server hands out, after it was checked."""
        trial_id = str(command.get("run_id"))
        running_ids = [other.record.id for other in self.slots if other.record]
        if trial_id in running_ids or self.backend.has_result(trial_id):
            return
        try:
            parameters = {name: entry["value"] for name, entry in dict(command["args"]).items()}
            record = self.backend.create_trial_record(trial_id, parameters)
        except (EchelonError, KeyError, TypeError, ValueError) as error:
            cause = error.faults[0].what if isinstance(error, EchelonError) else "no parameters"
            # What was refused is not written to any file, and its id is cut: both may be hostile.
            refused = WandbTrialRecord(trial_id[:100], self.sweep, {}, "failed", cause)
            self.refused.append(refused)
            self._log_trial_result(refused)
            return
        self._start_trial(slot, record)

    # --- a trial ---

    def _start_trial(self, slot: AgentSlot, record: WandbTrialRecord) -> None:
        self._started_count += 1
        slot.record, slot.trial = record, self.backend.start_trial(record)
        slot.next_heartbeat_at = 0.0
        print_to_stderr(f"trial {record.id} begins: {_format_parameters(record, '  ')}")

    def _resume_unfinished_trial(self, slot: AgentSlot) -> None:
        """Start the first trial of an earlier process whose processes have ended."""
        for record in self.unfinished:
            if self.backend.can_resume_trial(record):
                self.unfinished.remove(record)
                self._start_trial(slot, record)
                return

    def _cancel_trial(self, slot: AgentSlot) -> None:
        if slot.trial:
            slot.is_cancelled = True
            slot.trial.cancel()

    def _end_trial(self, slot: AgentSlot, exit_code: int) -> None:
        assert slot.record is not None
        record = self.backend.record_trial_end(
            slot.record, exit_code, slot.is_cancelled, self.is_stopping
        )
        slot.record, slot.trial, slot.is_cancelled = None, None, False
        slot.next_heartbeat_at = 0.0
        self._log_trial_result(record)

    def _log_trial_result(self, record: WandbTrialRecord) -> None:
        self.ended.append(record)
        if self.prints_rows:
            value = "" if record.value is None else f"{record.value:.6g}"
            row = (record.id, record.state, value, _format_parameters(record, " "))
            print("\t".join(row), flush=True)
        if record.state == "failed":
            self.failures_in_a_row += 1
            print_to_stderr(f"trial {record.id} failed: {record.cause}")
        elif record.state in DONE_STATES:
            self.failures_in_a_row = 0

    # --- signals ---

    def _receive_signal(self, number: int, frame: FrameType | None) -> None:
        """Only note the signal: what it asks for is done between two polls."""
        self._received_signals.append(number)

    def _handle_signals(self) -> None:
        if not self._received_signals:
            return
        received, self._received_signals = self._received_signals, []
        is_repeated, self.is_stopping = self.is_stopping, True
        print_to_stderr(
            "stopped at once; the last snapshots stay"
            if is_repeated
            else "stopping after this step and saving; Ctrl-C again stops at once"
        )
        for slot in self.slots:
            if slot.trial:
                slot.trial.interrupt(received[-1], is_repeated)


def _format_parameters(record: WandbTrialRecord, separator: str) -> str:
    return separator.join(f"{name}={value}" for name, value in record.parameters.items())
