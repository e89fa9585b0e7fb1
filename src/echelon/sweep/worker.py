"""A worker of a sweep: it takes a trial, runs its whole world, and takes the next."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import FrameType
from typing import Any

from echelon.config.schema import Config
from echelon.errors import EchelonError, Exit
from echelon.runs import Run
from echelon.sweep import given
from echelon.sweep.book import Book, Lost, Taken
from echelon.sweep.file import SweepFile
from echelon.sweep.folder import Settings, Sweep
from echelon.sweep.lease import worker_name
from echelon.sweep.metrics import History, key_of, spoken
from echelon.sweep.program import METRICS, expanded
from echelon.sweep.world import Forking, Starter, Stepping, World

_POLL_S = 0.1
_BEAT_S = 2.0
_IDLE_S = 0.2
_SAVING_S = 60.0
"""So long a world that was asked to save and end may take."""
STOPPED, PRUNED, CANCELLED = "asked to end", "pruned", "cancelled"

Compose = Callable[..., Config]


def work(folder: str, slot: str, compose: Compose) -> int:
    """Until there is no trial left, or somebody wants it to end."""
    sweep = Sweep(Path(folder))
    in_job = sweep.settings().launcher == "slurm"
    starter: Starter = Stepping() if in_job else Forking()  # which forks: before anything else
    return Worker(sweep, slot, compose, starter, in_job).run()


class Worker:
    def __init__(
        self, sweep: Sweep, slot: str, compose: Compose, starter: Starter, in_job: bool
    ) -> None:
        self._sweep, self._compose, self._starter = sweep, compose, starter
        self._settings, self._file, self._in_job = sweep.settings(), sweep.file(), in_job
        self._book = Book(sweep, worker_name(slot, os.environ))
        self._metric = sweep.metric().name
        self._key = key_of(self._metric, bool(self._settings.program))
        self._asked = False
        for number in (signal.SIGTERM, signal.SIGUSR2):
            signal.signal(number, self._hear)

    def _hear(self, number: int, frame: FrameType | None) -> None:
        self._asked = True

    def run(self) -> int:
        while not self._asked:
            taken = self._book.take()
            if isinstance(taken, Taken):
                self._trial(taken)
            elif taken:
                time.sleep(_IDLE_S)
            else:
                return Exit.OK
        return Exit.PREEMPTED

    def _trial(self, taken: Taken) -> None:
        say(f"trial {taken.number}: {given.listed(taken.values)}")
        run = self._sweep.run(taken.number)
        try:
            config = trial_config(self._settings, self._file, run, taken.values, self._compose)
            if run.status().get("state") == "finished":  # its worker died before it told
                self._result(taken, run, Exit.OK, "")
                return
            run.cancel_file.unlink(missing_ok=True)
            world = self._starter.start(config, run, self._variables(run))
            try:
                code, why = self._follow(taken, run, world)
                self._result(taken, run, code, why)
            except Lost:
                world.kill()
                say(f"trial {taken.number} is another worker's: this one was silent for too long")
        except EchelonError as error:
            self._book.end(taken, "failed", error.faults[0].what)

    def _variables(self, run: Run) -> dict[str, str]:
        return {METRICS: str(run.metrics_file)} if self._settings.program else {}

    def _follow(self, taken: Taken, run: Run, world: World) -> tuple[int, str]:
        """To the end of its world: the exit code, and why it was ended, if it was by us."""
        history = History(run.metrics_file, self._key)
        known, why, beaten, asked_at = 0, "", time.monotonic(), 0.0
        while (code := world.poll(_POLL_S)) is None:
            now = time.monotonic()
            if now - beaten > _BEAT_S:
                taken, beaten = self._book.beat(taken), now
            values = history.read()
            if len(values) > known and not why:
                known = len(values)
                why = PRUNED if self._book.report(taken, values) else ""
            if self._asked and not why:
                why = STOPPED
            if self._in_job and not why and run.cancel_file.exists():
                why = CANCELLED  # elsewhere who cancels a run tells its process
            if why and not asked_at:
                world.stop()
                asked_at = now
            elif asked_at and now - asked_at > _SAVING_S:
                world.kill()
        return code, why

    def _result(self, taken: Taken, run: Run, code: int, why: str) -> None:
        history = History(run.metrics_file, self._key)
        if history.read():
            self._book.report(taken, history.values)
        if why == STOPPED or _cut_off(run, code, why):
            self._book.give_back(taken, on_purpose=why == STOPPED)
            self._asked |= self._in_job  # the job goes on in another one, with this trial first
        elif why == PRUNED and not self._went_through(code):
            self._book.end(taken, "pruned")
        elif code != Exit.OK:
            self._book.end(taken, "failed", _cause(run, code))
        elif not history.values:
            self._book.end(taken, "failed", self._no_metric(taken.number, history), fatal=True)
        else:
            self._book.end(taken, "finished")
        say(f"trial {taken.number} ended with {code}{f', {why}' if why else ''}")

    def _went_through(self, code: int) -> bool:
        """It was at its last step when it was asked to end. A program's 0 says less."""
        return code == Exit.OK and not self._settings.program

    def _no_metric(self, number: int, history: History) -> str:
        name = self._metric
        program = bool(self._settings.program)
        known = ", ".join(sorted(name if program else spoken(name) for name in history.seen))
        return (
            f"trial {number} never reported the metric {name!r}; it reported {known or 'nothing'}"
        )


def trial_config(
    settings: Settings, file: SweepFile, run: Run, values: Mapping[str, Any], compose: Compose
) -> Config:
    """Of one trial: what was typed, what the file holds, what was searched."""
    chosen = {**file.held, **values}
    ours = [f"run.name={run.name}", f"run.dir={given.written(str(run.folder.parent))}"]
    if settings.program:
        return compose([*settings.words, *ours], program=expanded(settings.program, chosen))
    quiet = any(word.startswith("track.progress=") for word in settings.words)
    ours += [] if quiet else ["track.progress=none"]
    return compose([*settings.words, *given.words(chosen), *ours])


def _cut_off(run: Run, code: int, why: str) -> bool:
    """Ended from outside, and not because somebody wants this one trial to end."""
    if code in (Exit.NODE_LOST, -signal.SIGKILL):
        return True
    return code == Exit.PREEMPTED and not why and not run.cancel_file.exists()


def _cause(run: Run, code: int) -> str:
    if run.cancel_file.exists():
        return "cancelled"
    failure = run.status().get("failure")
    if code != Exit.OK and isinstance(failure, dict) and failure.get("summary"):
        return " ".join(str(failure["summary"]).split())
    for log in (run.logs / "trial.log", run.job_log):
        lines = [line.strip() for line in _text(log).splitlines() if line.strip()]
        errors = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
        if errors or lines:
            return (errors or lines)[-1]
    return f"exit code {code}"


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace", encoding="utf-8")[-8192:]
    except OSError:
        return ""


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
