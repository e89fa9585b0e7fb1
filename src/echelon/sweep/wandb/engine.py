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
from echelon.jobs.standing import stand_of
from echelon.launch.process import is_alive
from echelon.runs import Run
from echelon.sweep.begin import Prepared
from echelon.sweep.file import SweepFile
from echelon.sweep.folder import Settings, not_writable
from echelon.sweep.lock import SweepLock
from echelon.sweep.metrics import History, key_of
from echelon.sweep.show import show
from echelon.sweep.wandb import creation, record
from echelon.sweep.wandb.client import Server, Silent
from echelon.sweep.wandb.look import looked_at
from echelon.sweep.wandb.process import Process, command_of, following
from echelon.sweep.wandb.record import DONE, Told
from echelon.track import wandb_run

_LOOK_S = 0.1
_BEAT_S = 5.0
_AGAIN_S = 15.0
"""After a server did not answer."""
_GIVE_UP_S = 600.0
_IN_A_ROW = 3
"""So many failures, and the fault is hardly the parameters'."""


def serve(file: SweepFile, prepared: Prepared, parallel: int, as_json: bool = False) -> int:
    """Work on the sweep until its server says that it is over.

    What the sweep's folder holds is gone on with. The exit code is that of the trials: 1 when any
    of them failed.
    """
    creation.require(os.environ)
    settings, folder = prepared.settings, prepared.sweep.folder
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise not_writable(folder, error) from None
    with SweepLock(prepared.sweep.lock, f"the sweep {prepared.sweep.name} is at work already"):
        server, sweep = creation.opened(file, settings, folder)
        agents = [_Agent() for _ in range(parallel)]
        office = _Office(server, sweep, settings, folder, agents, rows=not as_json)
        try:
            return office.work()
        finally:
            if as_json:
                show(looked_at(prepared.sweep), as_json)


@dataclass
class _Agent:
    """Has one trial at a time; wandb's server knows it by its id."""

    id: str = ""
    told: Told | None = None
    process: Process | None = None
    beat_at: float = 0.0
    over: bool = False
    """It takes no more."""
    asked: bool = False
    """Its server wants no more of the trial."""


@dataclass
class _Office:
    server: Server
    sweep: str
    settings: Settings
    folder: Path
    """The sweep's own, beside those of its trials."""
    agents: list[_Agent]
    rows: bool = True
    """Print a line for each trial that ends."""
    left: list[Told] = field(default_factory=list)
    """What was begun and is to be ended before anything new."""
    failed: list[Told] = field(default_factory=list)
    refused: list[Told] = field(default_factory=list)
    in_a_row: int = 0
    stopping: bool = False
    heard: int = 0
    """Signals; what they ask for is done between two looks."""
    heeded: int = 0
    heard_at: float = field(default_factory=time.monotonic)
    told_silence: bool = False
    refusal: EchelonError | None = None

    def work(self) -> int:
        self.left = record.unfinished(self.folder)
        before = {n: signal.signal(n, self._hear) for n in (signal.SIGINT, signal.SIGTERM)}
        try:
            while any(agent.process or not agent.over for agent in self.agents):
                self._heed()
                for agent in self.agents:
                    self._turn(agent)
                if self.refusal or self.in_a_row >= _IN_A_ROW:
                    for agent in self.agents:
                        agent.over = True
                time.sleep(_LOOK_S)
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
        return self._outcome()

    # --- an agent's turn ---

    def _turn(self, agent: _Agent) -> None:
        if agent.process is not None and (code := agent.process.ended()) is not None:
            self._end(agent, code)
        if agent.process is None and self.stopping:
            agent.over = True
        elif agent.process is None and self.left and not agent.over:
            self._go_on(agent)
        elif time.monotonic() >= agent.beat_at and not (agent.over and agent.process is None):
            self._beat(agent)

    def _beat(self, agent: _Agent) -> None:
        agent.beat_at = time.monotonic() + _BEAT_S
        try:
            agent.id = agent.id or self.server.agent(socket.gethostname(), self.sweep)
            commands = self.server.beat(agent.id, [agent.told.id] if agent.told else [])
        except Silent as error:
            self._unheard(agent, str(error))
            return
        except EchelonError as error:
            self.refusal = self.refusal or error
            agent.over = True
            return
        self.heard_at, self.told_silence = time.monotonic(), False
        for command in commands:
            self._obey(agent, command)

    def _unheard(self, agent: _Agent, why: str) -> None:
        agent.beat_at = time.monotonic() + _AGAIN_S
        if not self.told_silence:
            self.told_silence = True
            _say(f"warning: wandb: no answer from its server ({why}); trials that run go on")
        if agent.process is None and time.monotonic() - self.heard_at > _GIVE_UP_S:
            agent.over = True
            self.refusal = self.refusal or EchelonError(
                Fault(
                    f"wandb's server has not answered for {_GIVE_UP_S / 60:.0f} minutes",
                    "type the same command again later: the sweep goes on where it is",
                ),
                exit=Exit.FAILED,
            )

    def _obey(self, agent: _Agent, command: dict[str, Any]) -> None:
        kind = command.get("type")
        if kind in ("run", "resume") and agent.process is None:
            self._take(agent, command)
        elif kind == "exit":
            agent.over = True
            self._stop(agent)
        elif kind == "stop" and agent.told and command.get("run_id") == agent.told.id:
            self._stop(agent)

    def _take(self, agent: _Agent, command: dict[str, Any]) -> None:
        """What a server hands out is checked before it is even written down."""
        id = str(command.get("run_id"))
        known = {told.id: told.state for told in record.read(self.folder)}
        at_work = [other.told.id for other in self.agents if other.told]
        if known.get(id) in DONE or id in at_work:
            return
        try:
            given = {name: entry["value"] for name, entry in dict(command["args"]).items()}
            told = Told(id, self.sweep, given)
            told.trial()
        except (EchelonError, KeyError, TypeError, ValueError) as error:
            what = error.faults[0].what if isinstance(error, EchelonError) else "no parameters"
            self.refused.append(Told(id[:100], self.sweep, {}, "failed", what))
            self._note(self.refused[-1])
            return
        self._begin(agent, told)

    # --- a trial ---

    def _begin(self, agent: _Agent, told: Told) -> None:
        record.keep(self.folder, replace(told, state="running"))
        agent.told, agent.process = told, self._process(told)
        agent.beat_at = 0.0
        given = "  ".join(f"{name}={value}" for name, value in told.trial().values.items())
        _say(f"trial {told.id} begins: {given}")

    def _go_on(self, agent: _Agent) -> None:
        """With what a broken-off sweep left, once the process that had it has saved."""
        for told in self.left:
            if not is_alive(self._run(told).status().get("process")):
                self.left.remove(told)
                self._begin(agent, told)
                return

    def _process(self, told: Told) -> Process:
        """A job of Slurm's outlives whoever looked at it, and is looked at again."""
        run, trial = self._run(told), told.trial()
        standing = stand_of(run) if run.status().get("launcher") == "slurm" else None
        queued = standing is not None and standing.job and standing.active
        command = command_of(self.settings, trial, self.folder.parent)
        return Process.start(trial, following(run) if queued else command, self.folder)

    def _stop(self, agent: _Agent) -> None:
        """The server wants no more of it: save, end, do not come back."""
        if agent.process and agent.told:
            agent.asked = True
            agent.process.cancel(self._run(agent.told))

    def _end(self, agent: _Agent, code: int) -> None:
        assert agent.told is not None
        run = self._run(agent.told)
        ended = replace(agent.told, state=self._state(agent, run, code))
        if ended.state == "failed":
            ended = replace(ended, cause=_cause(run, record.log_file(self.folder, ended.id)))
        agent.told, agent.process, agent.asked = None, None, False
        agent.beat_at = 0.0
        ended = replace(ended, value=self._value(run))
        record.keep(self.folder, ended)
        self._note(ended)

    def _state(self, agent: _Agent, run: Run, code: int) -> str:
        """torchrun and the like have codes of their own, and so has what ends while it starts."""
        if code == Exit.OK:
            return "finished"
        saved = code == Exit.PREEMPTED or run.status().get("state") == "preempted"
        if agent.asked or (saved and run.cancel_file.exists() and not self.stopping):
            return "stopped"
        return "preempted" if saved or self.stopping else "failed"

    def _note(self, told: Told) -> None:
        value = "" if told.value is None else f"{told.value:.6g}"
        given = " ".join(f"{name}={value}" for name, value in told.given.items())
        if self.rows:
            print("\t".join((told.id, told.state, value, given)), flush=True)
        if told.state == "failed":
            self.failed.append(told)
            self.in_a_row += 1
            _say(f"trial {told.id} failed: {told.cause}")
        elif told.state in DONE:
            self.in_a_row = 0

    def _value(self, run: Run) -> float | None:
        key = key_of(self.settings.metric["name"], bool(self.settings.program))
        values = History(run.metrics_file, key).read()
        return values[-1] if values else None

    def _run(self, told: Told) -> Run:
        return Run(self.folder.with_name(told.trial().run_name))

    # --- the end ---

    def _hear(self, number: int, frame: FrameType | None) -> None:
        self.heard += 1

    def _heed(self) -> None:
        if self.heeded == self.heard:
            return
        self.heeded, again, self.stopping = self.heard, self.stopping, True
        _say(
            "stopped at once; the last snapshots stand"
            if again
            else "stopping after this step and saving; Ctrl-C again stops at once"
        )
        for agent in self.agents:
            if agent.process and agent.told:
                agent.process.halt(self._run(agent.told), now=again)

    def _outcome(self) -> int:
        told = record.read(self.folder)
        states = Counter(one.state for one in (*told, *self.refused))
        counts = ", ".join(f"{number} {state}" for state, number in states.items())
        _say(f"sweep {self.sweep}: {counts or 'no trial'}")
        self._say_unsent(told)
        if self.refusal:
            raise self.refusal
        if self.in_a_row >= _IN_A_ROW:
            first = self.failed[-self.in_a_row]
            log = record.log_file(self.folder, first.id)
            raise EchelonError(
                Fault(
                    f"{self.in_a_row} trials in a row have failed, the first, {first.id}, because: "
                    f"{first.cause}",
                    "look at the sweep there" if first in self.refused else f"look into {log}",
                ),
                exit=Exit.FAILED,
            )
        if self.stopping:
            _say("the same command goes on with it")
            return Exit.PREEMPTED
        return Exit.FAILED if self.failed else Exit.OK

    def _say_unsent(self, told: Sequence[Told]) -> None:
        """Where a server was out of reach, the files are there to be sent."""
        for one in told:
            if command := wandb_run.last_words(self._run(one)).get("send it"):
                _say(f"trial {one.id} did not reach the server: {command}")


def _cause(run: Run, log: Path) -> str:
    """In one line: what the run itself says, else the end of what its command said."""
    failure = run.status().get("failure")
    if isinstance(failure, dict) and failure.get("summary"):
        return str(failure["summary"])
    lines = log.read_text(errors="replace", encoding="utf-8").split("\n") if log.exists() else []
    errors = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    spoken = [line.strip() for line in lines if line.strip()]
    return (errors[:1] or spoken[-1:] or ["it said nothing"])[0]


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
