"""Stacks of ranks as text: equal ones once, with the ranks that have them."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from echelon.errors import escape_controls
from echelon.runs.stack_report import RankStack, StackFrame, StackReport, ThreadStack
from echelon.utils.text import format_count


class StackGroup(NamedTuple):
    """Ranks that stand at the same place."""

    ranks: list[int]
    example: RankStack


def merge_stacks(ranks: Iterable[RankStack]) -> list[StackGroup]:
    """Return the ranks by where they stand, the most first.

    Two ranks stand at the same place if their main threads do, and if they wait for the same
    collective. The other threads of a process do not count.
    """
    groups: dict[object, StackGroup] = {}
    for rank in sorted(ranks, key=lambda r: r.rank):
        lines = [(frame.file, frame.line) for frame in rank.main_frames]
        # A note has numbers of processes in it, so ranks with one stay apart.
        key = (tuple(lines), rank.find_collective(), rank.note)
        groups.setdefault(key, StackGroup([], rank)).ranks.append(rank.rank)
    return sorted(groups.values(), key=lambda group: (-len(group.ranks), group.ranks[0]))


def format_rank_ranges(ranks: Sequence[int]) -> str:
    """`rank 3`, or `ranks 0, 2–7`; with runs of numbers shortened."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    words = [f"{run[0]}–{run[-1]}" if len(run) > 2 else ", ".join(map(str, run)) for run in runs]
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(words)}"


def render_report(report: StackReport, all_threads: bool = False) -> str:
    """Return the report as text that ends in a line break; with `all_threads` every thread of every
    rank follows."""
    hosts = list(dict.fromkeys(rank.host for rank in report.ranks))
    places = f"on {', '.join(hosts[:4])}" + " …" * (len(hosts) > 4)
    lines = [
        f"run {report.run}: {format_count(len(report.ranks), 'rank')} {places}, "
        f"{time.strftime('%Y-%m-%d %H:%M:%S', time.localtime(report.time))}, "
        "the most recent call first"
    ]
    for group in merge_stacks(report.ranks):
        lines += ["", f"{format_rank_ranges(group.ranks)}: {_describe_rank(group.example)}"]
        lines += map(_render_frame, group.example.main_frames)
    conclusions = [*find_absent_ranks(report), *report.missing]
    lines += ["", *conclusions] if conclusions else []
    if all_threads:
        for rank in sorted(report.ranks, key=lambda r: r.rank):
            lines += ["", *_render_threads(rank)]
    return escape_controls("\n".join(lines), kept="\n") + "\n"


def render_stack(rank: RankStack) -> str:
    """Return the main thread of one rank as text, the most recent call first."""
    return escape_controls("\n".join(map(_render_frame, rank.main_frames)), kept="\n")


def find_absent_ranks(report: StackReport) -> list[str]:
    """Return a sentence for each collective of all ranks in which some wait and others are not."""
    waiting: dict[object, list[RankStack]] = {}
    for rank in report.ranks:
        found = rank.find_collective()
        if found is not None and found.group == "default_pg":
            waiting.setdefault((found.name, found.number), []).append(rank)
    absent = [rank.rank for rank in report.ranks if rank.collectives == ()]  # None: not known
    if len(waiting) != 1 or not absent:
        return []
    [ranks] = waiting.values()
    those = format_rank_ranges([rank.rank for rank in ranks])
    return [
        f"{format_rank_ranges(absent)} {'is' if len(absent) == 1 else 'are'} not in "
        f"{ranks[0].find_collective()}, in which {those} wait{'s' * (len(ranks) == 1)}"
    ]


def _describe_rank(rank: RankStack) -> str:
    """Return what a rank does, in words."""
    collective = rank.find_collective()
    if collective is not None:
        words = [f"in {collective}"]
        more = len(rank.collectives or ()) - 1
        words += [f"and {more} after it"] if more > 0 else []
    else:
        words = ["in no collective"] if rank.collectives is not None else []
    words += [rank.note] if rank.note else []
    return "; ".join(words) or "no collective in the stack"


def _render_frame(frame: StackFrame) -> str:
    return f"  {frame.file}:{frame.line} in {frame.function}"


def _render_threads(rank: RankStack) -> list[str]:
    lines = [
        f"all threads of rank {rank.rank}, process {rank.pid} on {rank.host}"
        + (f", by {rank.source}" if rank.source else "")
    ]
    for thread in rank.threads:
        lines += [f" {_name_thread(thread)}:", *map(_render_frame, thread.frames)]
    return lines


def _name_thread(thread: ThreadStack) -> str:
    return "main thread" if thread.is_main else f"thread {thread.name}".rstrip()
