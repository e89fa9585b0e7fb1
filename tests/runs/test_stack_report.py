"""Stacks as faulthandler, py-spy and the flight recorder write them, and as a person reads them."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

import pytest

from echelon.runs.stack_report import (
    PendingCollective,
    RankStack,
    StackFrame,
    StackReport,
    ThreadStack,
    parse_faulthandler,
    parse_flight_recorder,
    parse_py_spy,
)
from echelon.runs.stack_text import (
    find_absent_ranks,
    format_rank_ranges,
    merge_stacks,
    render_report,
)

FAULTHANDLER = """\
Thread 0x00007f0000000002 [loader] (most recent call first):
  File "/env/lib/python3.11/threading.py", line 320 in wait
  File "/home/u/data "new".py", line 7 in read

Thread 0x00007f0000000003 (most recent call first):
  File "/x/lib/python3.11/site-packages/echelon/train/stack_answers.py", line 57 in _write
Thread 0x00007f0000000004 (most recent call first):
  <no Python frame>

Current thread 0x00007f0000000001 (most recent call first):
  Garbage-collecting
  File "/env/lib/python3.11/site-packages/torch/_tensor.py", line 623 in backward
  File "/home/u/train.py", line ??? in <lambda>
  File "/env/lib/python3.11/site-packages/echelon/launch/node/fork_server.py", line 9 in _become
  File "/env/bin/echelon", line 8 in <module>
"""

MAIN = (StackFrame("torch/_tensor.py", 623, "backward"), StackFrame("/home/u/train.py", 0, "fit"))
REDUCE = PendingCollective("all_reduce", 36, "gloo", "default_pg", "16 Float")


def make_rank(rank: int, line: int = 5, **more: Any) -> RankStack:
    frames = (StackFrame("/home/u/train.py", line, "fit"),)
    threads = (ThreadStack("", True, frames),) if line else ()
    return RankStack(rank, "n1", 100 + rank, "faulthandler", threads, **more)


def test_what_faulthandler_writes() -> None:
    loader, empty, main = parse_faulthandler(FAULTHANDLER, "0x00007f0000000001")
    assert (loader.name, loader.is_main) == ("loader", False)
    assert loader.frames[1] == StackFrame('/home/u/data "new".py', 7, "read")
    assert empty.frames == ()
    assert main.is_main
    # Installed files are short, and what the worker inherited from its launcher is left out.
    assert main.frames == (MAIN[0], StackFrame("/home/u/train.py", 0, "<lambda>"))


def test_what_py_spy_prints() -> None:
    frame = {"name": "fit", "filename": "/home/u/train.py", "line": 5, "locals": None}
    threads = [
        {"pid": 9, "os_thread_id": 11, "thread_name": None, "frames": []},
        {"pid": 9, "os_thread_id": 9, "thread_name": "MainThread", "frames": [frame]},
    ]
    other, main = parse_py_spy(json.dumps(threads))
    assert (other.is_main, main.is_main) == (False, True)
    assert main.frames == (StackFrame("/home/u/train.py", 5, "fit"),)
    for nonsense in ("", "{}x", "[{}]", "[3]"):
        with pytest.raises((ValueError, KeyError, TypeError)):
            parse_py_spy(nonsense)


def test_pending_collectives_of_the_flight_recorder() -> None:
    def entry(number: int, name: str, **more: Any) -> dict[str, Any]:
        return {
            "profiling_name": f"nccl:{name}",
            "collective_seq_id": number,
            "p2p_seq_id": 3,
            "is_p2p": False,
            "process_group": ["0", "default_pg"],
            "input_sizes": [[4, 2], [], [1]],
            "input_dtypes": ["Float", "Long", "Long"],
            "retired": False,
            "state": "scheduled",
            "time_created_ns": number,
        } | more

    entries = [
        entry(1, "all_reduce", retired=True),
        entry(4, "send", is_p2p=True),
        entry(2, "all_reduce", state="completed"),
        entry(3, "broadcast", state="started"),
    ]
    broadcast, send = parse_flight_recorder(json.dumps({"entries": entries}))
    assert str(broadcast) == "broadcast #3 (nccl, 4×2 Float, 1 Long and 1 more)"
    assert (send.name, send.number) == ("send", 3)
    many = json.dumps({"entries": [entry(n, "x" * 999) for n in range(2000)]})
    assert len(json.dumps(parse_flight_recorder(many))) < 4000
    assert parse_flight_recorder("{}") == ()


def test_a_report_is_the_same_after_its_way_as_json() -> None:
    ranks = (make_rank(0, collectives=(REDUCE,)), make_rank(1, collectives=None, note="gone"))
    report = StackReport("a", 1.5, ranks, ("node 2 sent no stacks",))
    assert StackReport.from_json(json.loads(json.dumps(report.to_json()))) == report


def test_equal_stacks_are_one_with_all_their_ranks() -> None:
    ranks = [make_rank(r, collectives=(REDUCE,)) for r in (9, 0, 2, 3, 4, 5)]
    ranks += [make_rank(1, line=7, collectives=()), make_rank(6, collectives=())]
    ranks.append(make_rank(7, collectives=(REDUCE,), note="process 107 is stopped (SIGSTOP)"))
    assert [group.ranks for group in merge_stacks(ranks)] == [[0, 2, 3, 4, 5, 9], [1], [6], [7]]
    text = render_report(StackReport("a", 0.0, tuple(ranks)))
    assert "\nranks 0, 2–5, 9: in all_reduce #36 (gloo, 16 Float)\n  /home/u/train.py:5 in" in text
    assert "\nrank 1: in no collective\n  /home/u/train.py:7 in fit\n" in text
    assert "\nrank 7: in all_reduce #36 (gloo, 16 Float); process 107 is stopped" in text


@pytest.mark.parametrize(
    ("ranks", "text"),
    [([3], "rank 3"), ([2, 1], "ranks 1, 2"), ([0, 2, 3, 4, 7, 8], "ranks 0, 2–4, 7, 8")],
)
def test_ranges_of_ranks(ranks: list[int], text: str) -> None:
    assert format_rank_ranges(ranks) == text


def test_who_is_not_in_the_collective_of_the_others() -> None:
    waiting = [make_rank(r, collectives=(REDUCE,)) for r in (0, 2)]
    absent = make_rank(1, line=7, collectives=())
    [sentence] = find_absent_ranks(StackReport("a", 0.0, (*waiting, absent)))
    assert sentence == (
        "rank 1 is not in all_reduce #36 (gloo, 16 Float), in which ranks 0, 2 wait"
    )
    # Of a group of some ranks it is not known who belongs to it.
    part = REDUCE._replace(group="pair")
    of_part = [make_rank(0, collectives=(part,)), make_rank(1, collectives=())]
    assert find_absent_ranks(StackReport("a", 0.0, tuple(of_part))) == []
    assert find_absent_ranks(StackReport("a", 0.0, tuple(waiting))) == []
    # One that could not be asked may have begun the collective, in C++ or before it was stopped.
    unknown = make_rank(1, line=7, note="process 101 on n1 is stopped (SIGSTOP)")
    assert find_absent_ranks(StackReport("a", 0.0, (*waiting, unknown))) == []


def test_without_a_flight_recorder_the_stack_names_the_collective() -> None:
    file = "torch/distributed/distributed_c10d.py"
    frames = (
        StackFrame(file, 10, "_wait"),
        StackFrame(file, 9, "all_gather"),
        StackFrame("torch/distributed/c10d_logger.py", 8, "wrapper"),
    )
    rank = RankStack(0, "n1", 1, "py-spy", (ThreadStack("MainThread", True, frames),))
    assert str(rank.find_collective()) == "all_gather"
    assert make_rank(0).find_collective() is None


def test_a_long_stack_is_cut_and_says_so() -> None:
    def make_thread(is_main: bool, depth: int) -> ThreadStack:
        frames = (StackFrame("/home/u/deep.py", n, "recurse") for n in range(depth))
        return ThreadStack("t", is_main, tuple(frames))

    threads = (*(make_thread(False, 50) for _ in range(20)), make_thread(True, 1000))
    rank = RankStack(0, "n1", 1, "py-spy", threads).limit_size(24_000)
    assert len(json.dumps(asdict(rank))) <= 24_000
    assert rank.main_frames[0] == StackFrame("/home/u/deep.py", 0, "recurse")
    assert rank.note == "cut, as it is long"
    short = make_rank(0)
    assert short.limit_size(24_000) == short


def test_names_of_files_cannot_command_the_terminal() -> None:
    frames = (StackFrame("/home/u/\x1b[2J.py", 1, "f"),)
    rank = RankStack(0, "n1", 1, "py-spy", (ThreadStack("", True, frames),))
    assert "\x1b" not in render_report(StackReport("a", 0.0, (rank,)), all_threads=True)
