"""`echelon logs`: the logs of a run by time, of its ranks, its agents and its batch script."""

from __future__ import annotations

import math
import os
import re
import sys
from collections.abc import Iterable, Sequence

import xxhash

from echelon.errors import EchelonError, ExitCode, Fault
from echelon.jobs.follow import INITIAL_LINES, LogPrinter, PlainPrinter, follow_run
from echelon.jobs.log_reader import LogFile, LogLine, merge_logs, read_ranks_of_node
from echelon.runs.run_folder import Run


def show_logs(
    run: Run, ranks: Sequence[int], nodes: Sequence[int], last: int | None, keep_following: bool
) -> int:
    """Show all lines or the last so many, and with ``keep_following`` what is added until the
    end."""

    def list_wanted() -> list[str]:
        return select_log_names(run, ranks, nodes)

    if not keep_following:
        _require_logs(run, ranks, nodes)
    printer: LogPrinter = (
        PlainPrinter() if len(set(ranks)) == 1 and not nodes else PrefixedPrinter(run)
    )
    try:
        if keep_following:
            follow_run(run, list_wanted, printer, INITIAL_LINES if last is None else last)
        else:
            for line in merge_logs(run, [LogFile(run, name) for name in list_wanted()], last):
                printer.print_log_line(line)
            printer.flush()
    except KeyboardInterrupt:
        printer.flush()
    return ExitCode.OK


def show_logs_of_runs(
    runs: Sequence[Run], ranks: Sequence[int], nodes: Sequence[int], last: int | None
) -> int:
    """Show the logs of several runs one after the other, each under its name; runs without logs
    are left out."""
    for run in runs:
        if list_log_names(run):
            print(f"==> {run.name} <==", flush=True)
            show_logs(run, ranks, nodes, last, False)
    return ExitCode.OK


# --- which ---


def select_log_names(run: Run, ranks: Sequence[int], nodes: Sequence[int]) -> list[str]:
    """Return the logs that exist and are wanted, in order: the batch script's, the agents', the
    ranks'.

    The agent of node 0 repeats the output of rank 0. Where it has a log, rank 0's own is shown only
    if it is asked for.
    """
    existing = list_log_names(run)
    duplicates = {"rank-0"} if "node-0" in existing else set()
    if not ranks and not nodes:
        return [name for name in existing if name not in duplicates]
    of_nodes = {f"rank-{r}" for node in nodes for r in _list_ranks_of_node(run, node)}
    wanted = (of_nodes - duplicates) | {f"node-{n}" for n in nodes} | {f"rank-{r}" for r in ranks}
    return [name for name in existing if name in wanted]


def list_log_names(run: Run) -> list[str]:
    """Return the names of all logs of a run, in order: the batch script's, the agents', the
    ranks'."""
    names = (path.stem for path in run.logs_folder.glob("*.log"))
    return sorted(filter(_NAME.fullmatch, names), key=_get_sort_key)


def _get_sort_key(name: str) -> tuple[int, int]:
    kind, _, number = name.partition("-")
    return _KINDS.index(kind), int(number or 0)


_KINDS = ("job", "node", "rank")
_NAME = re.compile(r"job|(node|rank)-\d+")


def _list_ranks_of_node(run: Run, node: int) -> Iterable[int]:
    """Return the ranks of a node as its agent knows them; where Slurm started them, as many on
    each."""
    if run.get_stamps_file(node).exists():
        return read_ranks_of_node(run, node)
    status = run.read_status_file()
    world, nodes = status.get("world"), status.get("nodes")
    each = world // nodes if isinstance(world, int) and isinstance(nodes, int) and nodes else 0
    return range(node * each, (node + 1) * each)


def _require_logs(run: Run, ranks: Sequence[int], nodes: Sequence[int]) -> None:
    """Raise EchelonError if a wanted rank or node has no log."""
    missing = [f"rank {r}" for r in ranks if not select_log_names(run, [r], [])]
    missing += [f"node {n}" for n in nodes if not select_log_names(run, [], [n])]
    existing = list_log_names(run)
    if missing or not existing:
        listed = ", ".join(existing[:12]) + ", …" * (len(existing) > 12)
        known = f"there are {listed}" if existing else "it has not begun to speak"
        raise EchelonError(
            Fault(
                f"run {run.name} has no log of {' or '.join(missing) or 'any rank'}",
                f"{known}; with -f, what comes is shown",
            ),
            exit=ExitCode.NOT_FOUND,
        )


# --- the printer ---


_GREY = 90
_COLOURS = (36, 33, 35, 32, 34, 96, 93, 95, 92, 94)
_REPEAT_WITHIN_S = 5.0
_MIN_REPEATED_LINES = 4


class PrefixedPrinter:
    """Prints each line with the rank that wrote it in front.

    Ranks often write the same text at once, above all when one of them fails. Lines that were shown
    a moment ago are counted instead of repeated.
    """

    whole_lines = True

    def __init__(self, run: Run) -> None:
        world = run.read_status_file().get("world")
        self._width = len(f"rank {world - 1}" if isinstance(world, int) else "rank 0")
        self._has_colour = sys.stdout.isatty() and "NO_COLOR" not in os.environ
        self._shown: dict[bytes, float] = {}
        """When a text was shown last, by its checksum: a line may be long."""
        self._repeated: list[LogLine] = []
        """The first of those that are kept back."""
        self._repeated_count = 0

    def print_log_line(self, line: LogLine) -> None:
        """Print the line, or keep it back if the same text was shown less than 5 s ago.

        Lines that are kept back are printed or counted when another rank writes, or at `flush`.
        """
        if self._repeated and self._repeated[-1].log != line.log:
            self.flush()
        if line.time - self._shown.get(_hash_text(line.text), -math.inf) < _REPEAT_WITHIN_S:
            self._repeated_count += 1
            if self._repeated_count <= _MIN_REPEATED_LINES:
                self._repeated.append(line)
            return
        self._flush_repeated_lines()
        self._write(line)

    def flush(self) -> None:
        self._flush_repeated_lines()
        sys.stdout.flush()

    def _flush_repeated_lines(self) -> None:
        same, count = self._repeated, self._repeated_count
        self._repeated, self._repeated_count = [], 0
        if count >= _MIN_REPEATED_LINES:
            text = f"… {count} lines as above"
            self._write(same[0]._replace(text=text.encode()), "2;")
        else:
            for line in same:
                self._write(line)

    def _write(self, line: LogLine, dim: str = "") -> None:
        if len(self._shown) > 10_000:
            self._shown.clear()
        self._shown[_hash_text(line.text)] = line.time
        speaker = "rank-0" if line.log == "node-0" else line.log
        who = f"{speaker.replace('-', ' '):>{self._width}} │ "
        text = line.text.decode(errors="replace").rstrip("\r\n").rpartition("\r")[2]
        if self._has_colour:
            kind, number = _get_sort_key(speaker)
            colour = _COLOURS[number % len(_COLOURS)] if _KINDS[kind] == "rank" else _GREY
            who = f"\x1b[{dim}{colour}m{who}\x1b[0m"
        print(who + text)


def _hash_text(text: bytes) -> bytes:
    return xxhash.xxh3_128_digest(text)
