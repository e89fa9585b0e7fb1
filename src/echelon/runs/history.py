"""The history of a run: every start and every stop, written down when it happens.

Each line of ``history.jsonl`` is one event. ``start`` says where and with how many processes,
``train`` when the first step began, ``stop`` why it ended. ``slow`` names a rank that the others
wait for. ``round`` is a loss or a return of ranks while the others go on. ``machine`` is what was
done with one that was at fault. A start that was killed leaves no ``stop``: it ended with its last
line of metrics. The next start writes that down, because it removes the lines after its snapshot;
until then readers look for themselves.
"""

from __future__ import annotations

import contextlib
import json
import socket
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from echelon.runs.metrics_file import is_number, iterate_metrics, read_recent_metrics
from echelon.runs.metrics_summary import load_summary
from echelon.runs.run_folder import Run

KILLED = "killed"
"""The cause of a start that recorded no end."""
_COUNTS = {"attempt": "TORCHELASTIC_RESTART_COUNT", "requeues": "SLURM_RESTART_COUNT"}
"""What a start records of how often its processes were started before, and who counts it."""
_MAX_CAUSE = 200
"""Characters of a cause."""


@dataclass(frozen=True)
class RoundRecord:
    """A round of a phase after its first one: ranks were lost or came back, and training went
    on."""

    began: float
    """When its first step was made; where it made none, when that was known."""
    number: int
    processes: int
    step: int
    """The last step before it."""
    standstill_s: float
    """Between the last step before it and its first one."""
    step_s: float | None
    """The usual time of a step before it, as one is part of the standstill; None where it made no
    step, or too few were seen."""
    lost: tuple[int, ...] = ()
    """Ranks, by their numbers in the phase's first round."""
    joined: tuple[int, ...] = ()
    """Ranks whose replacements joined."""
    reason: str = ""
    hosts: tuple[str, ...] = ()
    """Where it was lost, once for each loss; empty where that was not recorded."""
    left: tuple[int, ...] = ()
    """Ranks whose node left on purpose: no fault, and no step was lost."""


@dataclass(frozen=True)
class SlowRank:
    """A rank that the others waited for, for a while."""

    rank: int
    host: str
    factor: float
    """Its time when it was named, as a multiple of the median of the others."""
    step: int
    """The last step before it was named."""
    until_step: int | None = None
    """When it kept up again; None where it did not."""


@dataclass(frozen=True)
class BadMachine:
    """A machine that was found to be at fault, and what became of it."""

    time: float
    host: str
    reason: str
    step: int
    """The last step before it was found."""
    is_left_out: bool
    replaced_by: str = ""
    """The machine that took over its ranks; empty where none did."""
    kept_because: str = ""
    """Why it was not left out, if it was not."""


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
    attempt: int | None = None
    """How often agents had started the workers before; None if that was not recorded."""
    requeues: int | None = None
    """How often Slurm had queued the job again; None if that was not recorded."""
    rounds: tuple[RoundRecord, ...] = ()
    """Those after the first one, in which all ranks took part."""
    slow_ranks: tuple[SlowRank, ...] = ()
    bad_machines: tuple[BadMachine, ...] = ()
    redone_steps: int = 0
    """Steps that were made again in it, since its ranks went back to an earlier one."""
    gpus: int | None = None
    """How many GPUs it had on all nodes; None if that was not recorded."""
    cpus: int | None = None
    """How many cores its processes had, on all nodes; None if that was not recorded."""

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
    env: Mapping[str, str] | None = None,
    gpus: int | None = None,
    cpus: int | None = None,
) -> None:
    """Write down that the run starts, on this host. An earlier start without a stop is closed.

    ``is_within_program`` means that a program, whose start is written already, is this training. It
    counts instead of the program, because it knows its steps. ``env`` says how often these
    processes were started before. ``gpus`` and ``cpus`` are those of all nodes together.
    """
    phases = _parse_phases(run)
    if phases and phases[-1].ended is None and not is_within_program:
        last = _close_phase(run, phases[-1])
        end = {"step": last.last_step, "samples": last.last_samples, "cause": KILLED}
        _append_event(run, "stop", end, last.ended)
    where = {"host": socket.gethostname(), "launcher": launcher, "job": job}
    size = {"nodes": nodes, "processes": processes, "gpus": gpus, "cpus": cpus}
    counts = {} if env is None else {key: _read_count(env, name) for key, name in _COUNTS.items()}
    within = {"within_program": is_within_program}
    _append_event(run, "start", where | size | counts | within)


def _read_count(env: Mapping[str, str], name: str) -> int:
    text = env.get(name, "")
    return int(text) if text.isdecimal() else 0


def record_training(run: Run, step: int | None, samples: int | None) -> None:
    """Write down that training begins, after this step."""
    _append_event(run, "train", {"step": step, "samples": samples})


def record_stop(run: Run, step: int | None, samples: int | None, cause: str) -> None:
    """Write down that a start has ended. A second stop of one start is ignored by readers."""
    _append_event(run, "stop", {"step": step, "samples": samples, "cause": _shorten(cause)})


def record_round(run: Run, round_: RoundRecord) -> None:
    """Write down that ranks were lost or came back, and how long all stood still for it."""
    fields = asdict(round_)
    moment = fields.pop("began")
    _append_event(run, "round", fields | {"reason": _shorten(round_.reason)}, moment)


def record_slow_rank(run: Run, rank: int, host: str, factor: float | None, step: int) -> None:
    """Write down that a rank is slow, by which factor; None: it keeps up again."""
    _append_event(run, "slow", {"rank": rank, "host": host, "factor": factor, "step": step})


def record_bad_machine(run: Run, machine: BadMachine) -> None:
    """Write down that a machine is at fault, and what becomes of it."""
    fields = asdict(machine)
    moment = fields.pop("time")
    _append_event(run, "machine", fields | {"reason": _shorten(machine.reason)}, moment)


def record_return(run: Run, from_step: int, step: int) -> None:
    """Write down that the ranks have gone back to an earlier step, since one of them was lost."""
    _append_event(run, "return", {"from_step": from_step, "step": step})


def _shorten(cause: str) -> str:
    return " ".join(cause.split())[:_MAX_CAUSE]


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
        elif name == "round" and phases:  # perhaps after the stop, which somebody else writes
            if (round_ := _make_round(event, moment)) is not None:
                phases[-1] = replace(phases[-1], rounds=(*phases[-1].rounds, round_))
        elif name == "machine" and phases:
            if (machine := _make_bad_machine(event, moment)) is not None:
                found = (*phases[-1].bad_machines, machine)
                phases[-1] = replace(phases[-1], bad_machines=found)
        elif name == "slow" and phases:
            phases[-1] = replace(phases[-1], slow_ranks=_follow_slow_rank(phases[-1], event))
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
        attempt=_get_int(event, "attempt"),
        requeues=_get_int(event, "requeues"),
        gpus=_get_int(event, "gpus"),
        cpus=_get_int(event, "cpus"),
    )


def _make_round(event: dict[str, Any], moment: float) -> RoundRecord | None:
    """Return the round of a line; None if it lacks a number."""
    number, processes, step = (_get_int(event, key) for key in ("number", "processes", "step"))
    standstill_s, step_s = event.get("standstill_s"), event.get("step_s")
    if number is None or processes is None or step is None or not is_number(standstill_s):
        return None
    return RoundRecord(
        moment,
        number,
        processes,
        step,
        float(standstill_s),
        float(step_s) if is_number(step_s) else None,
        _get_ints(event, "lost"),
        _get_ints(event, "joined"),
        str(event.get("reason") or ""),
        _get_texts(event, "hosts"),
        _get_ints(event, "left"),
    )


def _make_bad_machine(event: dict[str, Any], moment: float) -> BadMachine | None:
    """Return the machine of a line; None if it lacks a name or a step."""
    host, step = event.get("host"), _get_int(event, "step")
    if not isinstance(host, str) or step is None:
        return None
    texts = [str(event.get(key) or "") for key in ("reason", "replaced_by", "kept_because")]
    return BadMachine(moment, host, texts[0], step, event.get("is_left_out") is True, *texts[1:])


def _follow_slow_rank(phase: RunPhase, event: dict[str, Any]) -> tuple[SlowRank, ...]:
    """Return the slow ranks of a phase after an event of one; one that lacks a number is left
    out."""
    rank, step, factor = _get_int(event, "rank"), _get_int(event, "step"), event.get("factor")
    if rank is None or step is None:
        return phase.slow_ranks
    if is_number(factor):
        found = SlowRank(rank, str(event.get("host") or ""), float(factor), step)
        return (*phase.slow_ranks, found)
    return tuple(
        replace(slow, until_step=step) if slow.rank == rank and slow.until_step is None else slow
        for slow in phase.slow_ranks
    )


def _continue_phase(phase: RunPhase, event: dict[str, Any], moment: float) -> RunPhase:
    step, samples = _get_int(event, "step"), _get_int(event, "samples")
    if event.get("event") == "train":
        return replace(phase, trained_since=moment, first_step=step, first_samples=samples)
    if event.get("event") == "stop":
        cause = str(event.get("cause") or "")
        return replace(phase, ended=moment, last_step=step, last_samples=samples, cause=cause)
    if event.get("event") == "return" and step is not None:
        redone = max(0, (_get_int(event, "from_step") or 0) - step)
        return replace(phase, redone_steps=phase.redone_steps + redone)
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


def _get_ints(event: dict[str, Any], key: str) -> tuple[int, ...]:
    values = event.get(key)
    return tuple(v for v in values if isinstance(v, int)) if isinstance(values, list) else ()


def _get_texts(event: dict[str, Any], key: str) -> tuple[str, ...]:
    values = event.get(key)
    return tuple(v for v in values if isinstance(v, str)) if isinstance(values, list) else ()


def _subtract(last: int | None, first: int | None) -> int | None:
    return None if last is None or first is None else max(0, last - first)
