"""Where the ranks of a run stand: their Python stacks, and the collectives that they wait for.

What faulthandler, py-spy and torch's flight recorder write is read here into plain values, which
cross processes as JSON.
"""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

STACK_SIGNAL = signal.SIGQUIT
"""A rank writes its stack when it gets this, whatever it is stuck in."""

_PACKAGE_PARENT = f"{Path(__file__).parents[2]}/"
_INSTALLED = re.compile(r".*/(?:site-packages|dist-packages|lib/python3\.\d+)/")
_FORK_SERVER_FILE = "echelon/launch/node/fork_server.py"
_ANSWERS_FILE = "echelon/train/stack_answers.py"
_COLLECTIVES_FILE = "torch/distributed/distributed_c10d.py"
_MAX_COLLECTIVES = 8
_MAX_WORD_CHARACTERS = 200


class StackFrame(NamedTuple):
    """One call in a stack."""

    file: str
    line: int
    function: str


@dataclass(frozen=True)
class ThreadStack:
    """The stack of one thread, the most recent call first."""

    name: str
    is_main: bool
    frames: tuple[StackFrame, ...]


class PendingCollective(NamedTuple):
    """A collective that a rank has begun and that has not come to its end."""

    name: str
    number: int
    """Counted in its group from 1; 0 where only the stack shows it."""
    backend: str
    group: str
    tensors: str
    """Sizes and type of its input."""

    def __str__(self) -> str:
        details = ", ".join(filter(None, [self.backend, self.tensors]))
        number = f" #{self.number}" if self.number else ""
        return self.name + number + (f" ({details})" if details else "")


class StackContact(NamedTuple):
    """How a rank is asked: the first line of its stack file, as JSON."""

    main_thread: str
    """Its number, as faulthandler writes it."""
    pipe_number: int
    """The descriptor, in the rank, of the pipe that wakes the thread that answers."""
    pipe_name: str
    """What the kernel calls that pipe, so that no other file is taken for it."""


@dataclass(frozen=True)
class RankAnswer:
    """What a rank says of itself."""

    threads: tuple[ThreadStack, ...]
    collectives: tuple[PendingCollective, ...] | None

    def to_json(self) -> dict[str, Any]:
        """Return the answer as JSON data."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> RankAnswer:
        """Return the answer from JSON data. Raises KeyError, TypeError or ValueError."""
        collectives = data["collectives"]
        return cls(
            tuple(
                ThreadStack(
                    str(thread["name"]),
                    bool(thread["is_main"]),
                    tuple(StackFrame(str(f), int(n), str(w)) for f, n, w in thread["frames"]),
                )
                for thread in data["threads"]
            ),
            None
            if collectives is None
            else tuple(
                PendingCollective(str(a), int(n), str(b), str(g), str(t))
                for a, n, b, g, t in collectives
            ),
        )


@dataclass(frozen=True)
class RankStack:
    """Where one rank stands."""

    rank: int
    host: str
    pid: int
    source: str = ""
    """What read the stack: py-spy, the rank itself or faulthandler; empty where nothing could."""
    threads: tuple[ThreadStack, ...] = ()
    collectives: tuple[PendingCollective, ...] | None = None
    """The oldest first; None: torch's flight recorder could not be asked."""
    note: str = ""
    """What else is to be said: that the process is stopped, why there is no stack."""

    @property
    def main_frames(self) -> tuple[StackFrame, ...]:
        """The calls of the main thread, the most recent first."""
        return next((thread.frames for thread in self.threads if thread.is_main), ())

    def find_collective(self) -> PendingCollective | None:
        """Return the collective that the rank waits for, or None. Without a flight recorder it is
        the one whose function is in the stack."""
        if self.collectives is not None:
            return self.collectives[0] if self.collectives else None
        names = [f.function for f in self.main_frames if f.file == _COLLECTIVES_FILE]
        public = [name for name in names if not name.startswith("_") and name != "wrapper"]
        return PendingCollective(public[0], 0, "", "", "") if public else None

    def limit_size(self, max_bytes: int) -> RankStack:
        """Return it without so many threads, and then calls, that it has at most so many bytes as
        JSON. The main thread goes last."""
        kept = sorted(self.threads, key=lambda thread: not thread.is_main)
        limited = replace(self, threads=tuple(kept))
        while len(json.dumps(asdict(limited))) > max_bytes and kept:
            if len(kept) > 1:
                kept.pop()
            elif len(kept[0].frames) > 1:
                frames = kept[0].frames
                kept[0] = replace(kept[0], frames=frames[: len(frames) // 2])
            else:
                kept.pop()
            note = "; ".join(filter(None, [self.note, "cut, as it is long"]))
            limited = replace(self, threads=tuple(kept), note=note)
        return limited

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> RankStack:
        """Return it from what `dataclasses.asdict` made of one. Raises KeyError, TypeError or
        ValueError for anything else."""
        answer = RankAnswer.from_json(data)
        return cls(
            rank=int(data["rank"]),
            host=str(data["host"]),
            pid=int(data["pid"]),
            source=str(data["source"]),
            threads=answer.threads,
            collectives=answer.collectives,
            note=str(data["note"]),
        )


@dataclass(frozen=True)
class StackReport:
    """Where all ranks of a run stand at one moment."""

    run: str
    time: float
    """In seconds since 1970."""
    ranks: tuple[RankStack, ...]
    missing: tuple[str, ...] = field(default=())
    """Nodes that gave no answer, as sentences."""

    def to_json(self) -> dict[str, Any]:
        """Return the report as JSON data."""
        return {"version": 1, **asdict(self)}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> StackReport:
        """Return the report from JSON data. Raises KeyError, TypeError or ValueError."""
        return cls(
            str(data["run"]),
            float(data["time"]),
            tuple(RankStack.from_json(rank) for rank in data["ranks"]),
            tuple(map(str, data["missing"])),
        )


# --- what faulthandler and py-spy write ---


_THREAD = re.compile(r"(?:Current t|T)hread (0x[0-9a-f]+)(?: \[(.*)\])? \(most recent call first\)")
_FRAME = re.compile(r'  File "(.*)", line (\d+|\?\?\?) in (.*)')


def parse_faulthandler(text: str, main_thread: str) -> tuple[ThreadStack, ...]:
    """Return the threads of a dump of faulthandler; `main_thread` is the number of the main one as
    faulthandler writes it."""
    threads: list[tuple[str, str, list[StackFrame]]] = []
    for line in text.splitlines():
        if header := _THREAD.match(line):
            threads.append((header[1], header[2] or "", []))
        elif threads and (frame := _FRAME.match(line)):
            number = 0 if frame[2] == "???" else int(frame[2])
            threads[-1][2].append(StackFrame(frame[1], number, frame[3]))
    return tidy_threads(
        ThreadStack(name, number == main_thread, tuple(frames)) for number, name, frames in threads
    )


def parse_py_spy(text: str) -> tuple[ThreadStack, ...]:
    """Return the threads that `py-spy dump --json` has printed. Raises ValueError, KeyError or
    TypeError where it printed something else."""
    return tidy_threads(
        ThreadStack(
            str(thread["thread_name"] or ""),
            thread["os_thread_id"] == thread["pid"],
            tuple(
                StackFrame(str(f["filename"]), int(f["line"]), str(f["name"]))
                for f in thread["frames"]
            ),
        )
        for thread in json.loads(text)
    )


def tidy_threads(threads: Iterable[ThreadStack]) -> tuple[ThreadStack, ...]:
    """Return the threads of a process with the calls that a person wants to see, without the thread
    that answers requests."""
    tidy = (replace(thread, frames=_tidy_frames(thread.frames)) for thread in threads)
    return tuple(t for t in tidy if all(frame.file != _ANSWERS_FILE for frame in t.frames))


def _tidy_frames(frames: Iterable[StackFrame]) -> tuple[StackFrame, ...]:
    """Return the calls of a thread with short names of installed files, so that those of nodes with
    different environments are equal. What a worker inherited from its fork server, and how Python
    imports, is left out."""
    tidy = []
    for frame in frames:
        file = frame.file.removeprefix(_PACKAGE_PARENT)
        file = _INSTALLED.sub("", file)
        if file == _FORK_SERVER_FILE:
            break
        if file.startswith("<frozen importlib"):
            continue
        tidy.append(StackFrame(file, frame.line, frame.function))
    return tuple(tidy)


# --- what the flight recorder has ---


def parse_flight_recorder(text: str | bytes) -> tuple[PendingCollective, ...]:
    """Return the collectives of a trace of torch's flight recorder that are not completed, the
    oldest first. Raises ValueError, KeyError or TypeError for anything else."""
    entries = json.loads(text).get("entries", [])
    pending = [e for e in entries if not e["retired"] and e.get("state") != "completed"]
    pending.sort(key=lambda e: e.get("time_created_ns", 0))
    return tuple(_read_entry(entry) for entry in pending[:_MAX_COLLECTIVES])


def _read_entry(entry: Mapping[str, Any]) -> PendingCollective:
    backend, _, name = str(entry["profiling_name"]).rpartition(":")
    number = entry["p2p_seq_id" if entry.get("is_p2p") else "collective_seq_id"]
    sizes, kinds = entry.get("input_sizes", []), entry.get("input_dtypes", [])
    shown = [f"{_format_size(size)} {kind}" for size, kind in zip(sizes[:2], kinds, strict=False)]
    tensors = ", ".join(shown) + (f" and {len(sizes) - 2} more" if len(sizes) > 2 else "")
    group = entry.get("process_group", ["", ""])
    words = (name, backend, str(group[-1]), tensors)
    name, backend, group_name, tensors = (word[:_MAX_WORD_CHARACTERS] for word in words)
    return PendingCollective(name, int(number), backend, group_name, tensors)


def _format_size(size: Iterable[int]) -> str:
    return "×".join(map(str, size)) or "1"
