"""How runs stand: by Slurm's queue, then its accounts, then what their folders say."""

from __future__ import annotations

import contextlib
import json
import os
import re
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from echelon.errors import Exit
from echelon.launch.process import is_alive
from echelon.launch.slurm.queue import WAITING, Answer, Word, accounted, queued
from echelon.runs import Run

ACTIVE = ("starting", "queued", "requeued", "running")
_JOB = re.compile(r"\d+(_\d+)?")
_TAIL = 8 * 1024
"""So much of the end of metrics.jsonl holds enough lines to tell the pace."""
_YEAR_9999 = 253370764800
"""In seconds since 1970: what lies beyond is a time that no calendar has."""


@dataclass(frozen=True)
class Standing:
    """A run as seen from outside."""

    run: str
    folder: str
    launcher: str | None
    job: str | None
    """Slurm's number."""
    host: str | None
    """Where the process is that holds the run together; None under Slurm."""
    state: str
    note: str
    """One line: why it failed, what it waits for."""
    nodes: int | None
    world: int | None
    started: float
    """When it was typed."""
    exit: int | None = None
    """The training's own, once it is over."""
    step: int | None = None
    total_steps: int | None = None
    eta_s: float | None = None

    @property
    def active(self) -> bool:
        return self.state in ACTIVE

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def all_runs(root: Path) -> list[Run]:
    """In no order; `latest` is only another name."""
    with contextlib.suppress(OSError), os.scandir(root) as entries:
        folders = [Path(e.path) for e in entries if e.is_dir(follow_symlinks=False)]
        return [Run(folder) for folder in folders if (folder / "config.json").exists()]
    return []


def stand(runs: Iterable[Run]) -> tuple[list[Standing], str]:
    """All runs, newest first, with at most one question to the queue and one to the accounts; and
    why Slurm did not answer, if it did not."""
    facts = [_Facts.of(run) for run in runs]
    open_jobs = [f.job for f in facts if f.job and f.code is None]
    answer = queued(open_jobs)
    gone = [] if answer.silence else [job for job in open_jobs if job not in answer.words]
    words = answer.words | accounted(gone)
    standings = [_standing(f, Answer(words, answer.silence)) for f in facts]
    return sorted(standings, key=lambda s: s.started, reverse=True), answer.silence


def stand_of(run: Run) -> Standing:
    [standing], _ = stand([run])
    return standing


# --- one run ---


@dataclass(frozen=True)
class _Facts:
    """What a folder says. A file that is missing, half-written or nonsense says nothing."""

    run: Run
    status: dict[str, Any]
    code: int | None
    """Written by the batch script as its last act."""
    cancelled: bool

    @classmethod
    def of(cls, run: Run) -> _Facts:
        code = None
        with contextlib.suppress(OSError, ValueError):
            code = int(run.exit_file.read_text(encoding="utf-8"))
        return cls(run, run.status(), code, run.cancel_file.exists())

    @property
    def said(self) -> str | None:
        return self._text("state")

    @property
    def launcher(self) -> str | None:
        return self._text("launcher")

    @property
    def job(self) -> str | None:
        job = str(self.status.get("job") or self.run.job())
        return job if self.launcher == "slurm" and _JOB.fullmatch(job) else None

    @property
    def process(self) -> dict[str, Any]:
        return self._mapping("process")

    @property
    def failure(self) -> dict[str, Any]:
        return self._mapping("failure")

    @property
    def started(self) -> float:
        started = self.status.get("started")
        if isinstance(started, (int, float)) and abs(started) < _YEAR_9999:
            return float(started)
        with contextlib.suppress(OSError):
            return self.run.config_file.stat().st_mtime
        return 0.0

    def number(self, key: str) -> int | None:
        value = self.status.get(key)
        return value if isinstance(value, int) else None

    def _text(self, key: str) -> str | None:
        value = self.status.get(key)
        return value if isinstance(value, str) else None

    def _mapping(self, key: str) -> dict[str, Any]:
        value = self.status.get(key)
        return value if isinstance(value, dict) else {}


def _standing(facts: _Facts, answer: Answer) -> Standing:
    state, note = _by_job(facts, answer) if facts.job else _by_process(facts)
    host = facts.process.get("host")
    return Standing(
        run=facts.run.name,
        folder=str(facts.run.folder),
        launcher=facts.launcher,
        job=facts.job,
        host=host if isinstance(host, str) and not facts.job else None,
        state=state,
        note=note,
        nodes=facts.number("nodes"),
        world=facts.number("world"),
        started=facts.started,
        exit=None if state in ACTIVE else _exit_code(facts, state),
    )


def _by_job(facts: _Facts, answer: Answer) -> tuple[str, str]:
    if facts.code is not None and (ended := _by_folder(facts)):
        return ended
    word = answer.words.get(str(facts.job))
    if word is None and answer.silence:
        return facts.said or "unknown", ""  # that Slurm is silent is told once, for all
    if word is not None and word.active:
        return _in_queue(facts, word)
    if facts.said == "finished":
        return "finished", ""
    if facts.cancelled or (word is not None and word.state == "CANCELLED"):
        return "cancelled", ""
    told, ending = _by_folder(facts), _ENDINGS.get(word.state) if word is not None else None
    gone = f"job {facts.job} left the queue before its script came to its end"
    if word is not None and word.state == "FAILED":
        return told or _ENDINGS["FAILED"]  # a script that TERM ended says less than its ranks did
    return ending or told or ("lost", gone)


def _in_queue(facts: _Facts, word: Word) -> tuple[str, str]:
    if word.state in WAITING:
        return "requeued" if facts.status.get("starts") else "queued", word.reason
    return "running", "asked to end" if facts.cancelled else ""


_ENDINGS = {
    "TIMEOUT": ("failed", "out of time before it could save; see launch.signal_lead_s"),
    "OUT_OF_MEMORY": ("failed", "out of memory; see launch.sbatch=['--mem=…']"),
    "NODE_FAIL": ("lost", "a node went down"),
    "BOOT_FAIL": ("lost", "a node did not boot"),
    "PREEMPTED": ("preempted", ""),
    "DEADLINE": ("failed", "past its deadline"),
    "FAILED": ("failed", "its batch script was killed"),
}
"""Of jobs that ended without a word of their own."""


def _by_process(facts: _Facts) -> tuple[str, str]:
    if ended := _by_folder(facts):
        return ended
    if facts.said is None:
        return "unknown", "its status.json is missing or damaged"
    if facts.launcher == "slurm":
        return facts.said, "it has no job number yet"
    alive = is_alive(facts.process)
    if alive is False:
        if facts.cancelled:
            return "cancelled", ""
        return "lost", f"process {facts.process.get('pid')} is gone without a word"
    if not facts.process:
        return "unknown", f"{facts.said}, by an older version, which did not say where"
    return facts.said, "asked to end" if facts.cancelled else ""


def _by_folder(facts: _Facts) -> tuple[str, str] | None:
    """How a run ended; None while it has not."""
    said, code = facts.said, facts.code
    if code == Exit.OK or (code is None and said == "finished"):
        return "finished", ""
    if code is None and said not in ("preempted", "failed", "not submitted"):
        return None
    if facts.cancelled:
        return "cancelled", ""
    if code == Exit.PREEMPTED or (code is None and said == "preempted"):
        return "preempted", ""
    if said == "not submitted":
        return "failed", "Slurm did not take the job"
    return "failed", _reason(facts)


def _reason(facts: _Facts) -> str:
    if failure := facts.failure:
        return f"rank {failure.get('rank')}: {' '.join(str(failure.get('summary', '')).split())}"
    code = "" if facts.code is None else f"exit code {facts.code}; "
    return f"{code}see `echelon logs {facts.run.name}`"


def _exit_code(facts: _Facts, state: str) -> int:
    if facts.code is not None:
        return facts.code
    if state in ("finished", "preempted", "cancelled"):
        return Exit.OK if state == "finished" else Exit.PREEMPTED
    code = facts.failure.get("exit")
    return code if isinstance(code, int) and code else Exit.FAILED


# --- how far ---


def with_progress(standing: Standing) -> Standing:
    """A few reads more, so only for runs that are shown."""
    run = Run(Path(standing.folder))
    facts, lines = _Facts.of(run), last_metrics(run)
    steps = [line["step"] for line in lines[-1:]] + [facts.number("step") or 0]
    total = facts.number("total_steps")
    eta = _eta_s(lines, total, facts.status.get("since")) if standing.state == "running" else None
    return replace(standing, step=max(steps) or None, total_steps=total, eta_s=eta)


def last_metrics(run: Run) -> list[dict[str, Any]]:
    """The last lines of training metrics, without reading the others."""
    found = []
    for text in tail(run.metrics_file).splitlines():
        with contextlib.suppress(ValueError):  # the first may be cut, the last half-written
            line = json.loads(text)
            if isinstance(line, dict) and _is_number(line.get("step"), line.get("time")):
                found.append(line)
    return found


def _eta_s(lines: Sequence[dict[str, Any]], total: int | None, since: object) -> float | None:
    """By the pace since this start, evaluations and saves included."""
    begun = since if isinstance(since, (int, float)) else 0.0
    recent = [line for line in lines if line["time"] >= begun]
    if total is None or len(recent) < 2:
        return None
    first, last = recent[0], recent[-1]
    if last["step"] <= first["step"]:
        return None
    pace_s = (last["time"] - first["time"]) / (last["step"] - first["step"])
    ready: float = last["time"] + pace_s * (total - last["step"])
    return max(0.0, ready - time.time())


def _is_number(*values: object) -> bool:
    return all(isinstance(value, (int, float)) for value in values)


def tail(path: Path) -> bytes:
    """The end of a file; its first line may be cut."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - _TAIL))
            return file.read()
    except OSError:
        return b""
