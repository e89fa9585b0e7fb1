"""`echelon logs`: what all of a run said and say, in order of time, whoever wrote it."""

from __future__ import annotations

import math
import os
import re
import sys
from collections.abc import Iterable, Sequence

from echelon.errors import EchelonError, Exit, Fault
from echelon.jobs.follow import BEGIN_WITH, Plain, Printer, follow
from echelon.jobs.reading import Line, Log, merged, ranks_of
from echelon.runs import Run


def logs(run: Run, ranks: Sequence[int], nodes: Sequence[int], last: int | None, on: bool) -> int:
    """All lines or the last so many, and then, if wanted, what is added until the run is over."""

    def wanted() -> list[str]:
        return _names(run, ranks, nodes)

    if not on:
        _require(run, ranks, nodes)
    printer: Printer = Plain() if len(set(ranks)) == 1 and not nodes else Prefixed(run)
    try:
        if on:
            follow(run, wanted, printer, BEGIN_WITH if last is None else last)
        else:
            for line in merged(run, [Log(run, name) for name in wanted()], last):
                printer.show(line)
            printer.pause()
    except KeyboardInterrupt:
        printer.pause()
    return Exit.OK


def logs_of_all(
    runs: Sequence[Run], ranks: Sequence[int], nodes: Sequence[int], last: int | None
) -> int:
    """One after the other, each under its name; what has not begun to speak is left out."""
    for run in runs:
        if _there(run):
            print(f"==> {run.name} <==", flush=True)
            logs(run, ranks, nodes, last, False)
    return Exit.OK


# --- which ---


def _names(run: Run, ranks: Sequence[int], nodes: Sequence[int]) -> list[str]:
    """The logs that are there and wanted, in order: the batch script's, the agents', the ranks'.

    What rank 0 says its agent says too, so where the agent has a log, rank 0's is shown only when
    it is asked for.
    """
    there = _there(run)
    twice = {"rank-0"} if "node-0" in there else set()
    if not ranks and not nodes:
        return [name for name in there if name not in twice]
    of_nodes = {f"rank-{r}" for node in nodes for r in _ranks_of(run, node)}
    wanted = (of_nodes - twice) | {f"node-{n}" for n in nodes} | {f"rank-{r}" for r in ranks}
    return [name for name in there if name in wanted]


def _there(run: Run) -> list[str]:
    names = (path.stem for path in run.logs.glob("*.log"))
    return sorted(filter(_NAME.fullmatch, names), key=_order)


def _order(name: str) -> tuple[int, int]:
    kind, _, number = name.partition("-")
    return _KINDS.index(kind), int(number or 0)


_KINDS = ("job", "node", "rank")
_NAME = re.compile(r"job|(node|rank)-\d+")


def _ranks_of(run: Run, node: int) -> Iterable[int]:
    """As its agent knows them; where Slurm itself started them, as many on each."""
    if run.stamps_file(node).exists():
        return ranks_of(run, node)
    status = run.status()
    world, nodes = status.get("world"), status.get("nodes")
    each = world // nodes if isinstance(world, int) and isinstance(nodes, int) and nodes else 0
    return range(node * each, (node + 1) * each)


def _require(run: Run, ranks: Sequence[int], nodes: Sequence[int]) -> None:
    missing = [f"rank {r}" for r in ranks if not _names(run, [r], [])]
    missing += [f"node {n}" for n in nodes if not _names(run, [], [n])]
    there = _there(run)
    if missing or not there:
        listed = ", ".join(there[:12]) + ", …" * (len(there) > 12)
        known = f"there are {listed}" if there else "it has not begun to speak"
        raise EchelonError(
            Fault(
                f"run {run.name} has no log of {' or '.join(missing) or 'any rank'}",
                f"{known}; with -f, what comes is shown",
            ),
            exit=Exit.NOT_FOUND,
        )


# --- how it looks ---


_GREY = 90
_COLOURS = (36, 33, 35, 32, 34, 96, 93, 95, 92, 94)
_SAME_S = 5.0
_SAME_LINES = 4


class Prefixed:
    """Each line after who said it. Ranks often say the same at once, above all when one of them
    fails: several lines that were shown a moment ago are counted instead."""

    whole_lines = True

    def __init__(self, run: Run) -> None:
        world = run.status().get("world")
        self._width = len(f"rank {world - 1}" if isinstance(world, int) else "rank 0")
        self._coloured = sys.stdout.isatty() and "NO_COLOR" not in os.environ
        self._shown: dict[bytes, float] = {}
        self._same: list[Line] = []

    def show(self, line: Line) -> None:
        if self._same and self._same[-1].log != line.log:
            self.pause()
        if line.time - self._shown.get(line.text, -math.inf) < _SAME_S:
            self._same.append(line)
            return
        self._say_same()
        self._write(line)

    def pause(self) -> None:
        self._say_same()
        sys.stdout.flush()

    def _say_same(self) -> None:
        same, self._same = self._same, []
        if len(same) >= _SAME_LINES:
            said = f"… {len(same)} lines as above"
            self._write(same[0]._replace(text=said.encode()), "2;")
        else:
            for line in same:
                self._write(line)

    def _write(self, line: Line, dim: str = "") -> None:
        if len(self._shown) > 10_000:
            self._shown.clear()
        self._shown[line.text] = line.time
        speaker = "rank-0" if line.log == "node-0" else line.log
        who = f"{speaker.replace('-', ' '):>{self._width}} │ "
        text = line.text.decode(errors="replace").rstrip("\r\n").rpartition("\r")[2]
        if self._coloured:
            kind, number = _order(speaker)
            colour = _COLOURS[number % len(_COLOURS)] if _KINDS[kind] == "rank" else _GREY
            who = f"\x1b[{dim}{colour}m{who}\x1b[0m"
        print(who + text)
