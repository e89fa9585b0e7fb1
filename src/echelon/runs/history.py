"""The history of a run: every start and every stop, written down when it happens.

Each line of ``history.jsonl`` is one event. ``start`` says where and with how many processes,
``train`` when the first step began, ``stop`` why it ended. A start that was killed leaves no
``stop``: it ended with its last line of metrics. The next start writes that down, because it
removes the lines after its snapshot; until then readers look for themselves.
"""

from __future__ import annotations

import contextlib
import json
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from echelon.runs.metrics_file import is_number, iterate_metrics, read_recent_metrics
from echelon.runs.metrics_summary import load_summary
from echelon.runs.run_folder import Run

KILLED = "killed"
"""The cause of a start that recorded no end."""
_MAX_CAUSE = 200
"""Characters of a cause."""


@dataclass(frozen=True)
class RunPhase:
    """One start of a run and what came of it."""

    started: float
    """In seconds since 1970, like all times here."""
    host: str
    launcher: str
    nodes: int | None
    processes: int | None
    job: str | None
    """Slurm's id."""
    trained_since: float | None = None
    """When its first step began; None if it never came so far."""
    first_step: int | None = None
    """The step that it continued after; None for a program, which counts none."""
    first_samples: int | None = None
    ended: float | None = None
    """None while it runs."""
    last_step: int | None = None
    last_samples: int | None = None
    cause: str = ""
    """Why it ended: `finished`, `stopped by SIGTERM`, `failed: …` or `killed`."""

    @property
    def trained_s(self) -> float:
        """The seconds of training; of a phase that runs, until now."""
        if self.trained_since is None:
            return 0.0
        until = time.time() if self.ended is None else self.ended
        return max(0.0, until - self.trained_since)

    @property
    def steps(self) -> int | None:
        """The number of steps that it made, if that is known."""
        return _subtract(self.last_step, self.first_step)

    @property
    def samples(self) -> int | None:
        """The number of samples that it trained on, if that is known."""
        return _subtract(self.last_samples, self.first_samples)


@dataclass(frozen=True)
class RunHistory:
    """All starts of a run, the oldest first; empty if it recorded none."""

    phases: tuple[RunPhase, ...]

    @property
    def training_phases(self) -> list[RunPhase]:
        """The starts that came as far as training."""
        return [phase for phase in self.phases if phase.trained_since is not None]

    @property
    def trained_s(self) -> float | None:
        """The seconds of training without pauses, queues and preparation; None if it has not
        begun."""
        phases = self.training_phases
        return sum(phase.trained_s for phase in phases) if phases else None

    def count_trained_s(self, moment: float) -> float:
        """Return the seconds of training up to a time."""
        total_s = 0.0
        for phase in self.training_phases:
            assert phase.trained_since is not None
            if moment <= phase.trained_since:
                break
            total_s += min(phase.trained_s, moment - phase.trained_since)
        return total_s


# --- written by the run ---


def record_start(
    run: Run,
    launcher: str,
    nodes: int,
    processes: int,
    job: str | None,
    is_within_program: bool = False,
) -> None:
    """Write down that the run starts, on this host. An earlier start without a stop is closed.

    ``is_within_program`` means that a program, whose start is written already, is this training. It
    counts instead of the program, because it knows its steps.
    """
    phases = _parse_phases(run)
    if phases and phases[-1].ended is None and not is_within_program:
        last = _close_phase(run, phases[-1])
        end = {"step": last.last_step, "samples": last.last_samples, "cause": KILLED}
        _append_event(run, "stop", end, last.ended)
    where = {"host": socket.gethostname(), "launcher": launcher, "job": job}
    size = {"nodes": nodes, "processes": processes}
    _append_event(run, "start", where | size | {"within_program": is_within_program})


def record_training(run: Run, step: int | None, samples: int | None) -> None:
    """Write down that training begins, after this step."""
    _append_event(run, "train", {"step": step, "samples": samples})


def record_stop(run: Run, step: int | None, samples: int | None, cause: str) -> None:
    """Write down that a start has ended. A second stop of one start is ignored by readers."""
    short_cause = " ".join(cause.split())[:_MAX_CAUSE]
    _append_event(run, "stop", {"step": step, "samples": samples, "cause": short_cause})


def _append_event(
    run: Run, event: str, fields: dict[str, Any], moment: float | None = None
) -> None:
    """Add a line in one write. A full disk must not end a training over its history."""
    line = {"event": event, "time": round(moment or time.time(), 3)} | fields
    # Unbuffered: one write is one line, even if the agent and rank 0 write at once.
    with contextlib.suppress(OSError), run.history_file.open("ab", buffering=0) as file:
        file.write((json.dumps(line) + "\n").encode())


# --- read by others ---


def read_history(run: Run, is_running: bool) -> RunHistory:
    """Return the history of a run. If it does not run, a start without a stop was killed."""
    phases = _parse_phases(run)
    if phases and phases[-1].ended is None and not is_running:
        phases[-1] = _close_phase(run, phases[-1])
    return RunHistory(tuple(phases))


def _parse_phases(run: Run) -> list[RunPhase]:
    """Return the phases; the last one may have no end. Lines that are not events are skipped."""
    phases: list[RunPhase] = []
    for event in _iterate_events(run):
        name, moment = event.get("event"), float(event["time"])
        if name == "start":
            phase = _make_phase(event, moment)
            if phases and phases[-1].ended is None:
                last = phases.pop()
                if not event.get("within_program"):
                    # A batch script was killed. When is not known, so it counts for nothing.
                    phases.append(replace(last, ended=last.started, cause=KILLED))
            phases.append(phase)
        elif phases and phases[-1].ended is None:
            phases[-1] = _continue_phase(phases[-1], event, moment)
    return phases


def _iterate_events(run: Run) -> Iterator[dict[str, Any]]:
    with contextlib.suppress(OSError):
        yield from (
            line for line in iterate_metrics(run.history_file) if is_number(line.get("time"))
        )


def _make_phase(event: dict[str, Any], moment: float) -> RunPhase:
    job = event.get("job")
    return RunPhase(
        moment,
        str(event.get("host") or ""),
        str(event.get("launcher") or ""),
        _get_int(event, "nodes"),
        _get_int(event, "processes"),
        None if job is None else str(job),
    )


def _continue_phase(phase: RunPhase, event: dict[str, Any], moment: float) -> RunPhase:
    step, samples = _get_int(event, "step"), _get_int(event, "samples")
    if event.get("event") == "train":
        return replace(phase, trained_since=moment, first_step=step, first_samples=samples)
    if event.get("event") == "stop":
        cause = str(event.get("cause") or "")
        return replace(phase, ended=moment, last_step=step, last_samples=samples, cause=cause)
    return phase


def _close_phase(run: Run, phase: RunPhase) -> RunPhase:
    """Return a phase that recorded no stop with the end that its last numbers show."""
    begun = phase.trained_since or phase.started
    lines = [line for line in read_recent_metrics(run.metrics_file) if line["time"] >= begun]
    last = lines[-1] if lines else {}
    signs = [last.get("time"), load_summary(run).updated, _find_last_log_time(run, phase)]
    ended = max((float(sign) for sign in signs if is_number(sign)), default=begun)
    return replace(
        phase,
        ended=max(begun, ended),
        last_step=_get_int(last, "step") or phase.first_step,
        last_samples=_get_int(last, "samples") or phase.first_samples,
        cause=KILLED,
    )


def _find_last_log_time(run: Run, phase: RunPhase) -> float | None:
    """Return when a program last wrote a line. Its logs are all that is known of one that counts
    no steps."""
    if phase.trained_since is None or phase.first_step is not None:
        return None
    times = []
    for path in run.logs_folder.glob("*.log"):
        with contextlib.suppress(OSError):
            times.append(path.stat().st_mtime)
    return max(times, default=None)


def _get_int(event: dict[str, Any], key: str) -> int | None:
    value = event.get(key)
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _subtract(last: int | None, first: int | None) -> int | None:
    return None if last is None or first is None else max(0, last - first)
