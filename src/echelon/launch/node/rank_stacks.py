"""The stacks of the ranks of one node.

py-spy reads them out of the processes, if it is installed and may do so; else each rank writes its
own (train/stack_answers.py). A program of somebody else has only py-spy.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

from echelon.runs.run_folder import Run
from echelon.runs.stack_report import (
    STACK_SIGNAL,
    RankAnswer,
    RankStack,
    StackContact,
    ThreadStack,
    parse_faulthandler,
    parse_py_spy,
)
from echelon.utils.processes import (
    describe_process_state,
    is_signal_caught,
    list_blocking_threads,
)

_RANK_LIMIT_S = 3.0
"""How long py-spy or faulthandler may take, on a machine that has much else to do."""
_ANSWER_LIMIT_S = 4.0
"""How long it may take to answer: never, if native code holds the lock of the interpreter."""
_POLL_S = 0.01
_MAX_PARALLEL = 16


def collect_stacks(
    run: Run, workers: Mapping[int, int], is_program: bool, py_spy: str | None
) -> list[RankStack]:
    """Return where the ranks of this node stand; `workers` has the process of each, `py_spy` is the
    path of that. It takes a few seconds at most, and never raises for a rank."""
    with ThreadPoolExecutor(_MAX_PARALLEL) as pool:
        tasks = [
            pool.submit(_collect_rank, run, rank, pid, is_program, py_spy)
            for rank, pid in sorted(workers.items())
        ]
        return [task.result() for task in tasks]


def find_py_spy() -> str | None:
    """Return the path of py-spy: on the PATH, or beside this interpreter."""
    beside = Path(sys.executable).with_name("py-spy")
    return shutil.which("py-spy") or (str(beside) if beside.exists() else None)


def read_stack_with_py_spy(py_spy: str, pid: int) -> tuple[tuple[ThreadStack, ...], str]:
    """Return the threads of a process, and why there are none.

    A process that runs is halted for some milliseconds, so that its stack is one of one moment. One
    that is stopped cannot be, and need not.
    """
    stopped = ["--nonblocking"] if describe_process_state(pid).startswith("stopped") else []
    command = [py_spy, "dump", "--json", *stopped, "--pid", str(pid)]
    try:
        done = subprocess.run(command, capture_output=True, timeout=_RANK_LIMIT_S)
        return parse_py_spy(done.stdout.decode(errors="replace")), ""
    except (ValueError, KeyError, TypeError):
        words = done.stderr.decode(errors="replace").strip().splitlines()
        reason = words[0].removeprefix("Error: ") if words else f"exit code {done.returncode}"
        return (), f"py-spy cannot read it: {reason}"
    except (OSError, subprocess.TimeoutExpired) as error:
        return (), f"py-spy cannot read it: {error}"


def _collect_rank(run: Run, rank: int, pid: int, is_program: bool, py_spy: str | None) -> RankStack:
    """Return where one rank stands."""
    found = RankStack(rank, socket.gethostname(), pid)
    contact = None if is_program else _read_contact(run, rank, pid)
    threads, problem = _read_with_py_spy(py_spy, pid, is_program) if py_spy else ((), "")
    if threads:
        found = replace(found, source="py-spy", threads=threads)
    # A process that is stopped cannot answer, and would do so when it goes on.
    if contact is not None and not describe_process_state(pid):
        answer = _ask_rank(run, rank, pid, contact)
        if answer is not None:
            found = replace(found, collectives=answer.collectives)
        # py-spy may miss the frames of a thread that is just about to call something.
        if answer is not None and not found.main_frames:
            found = replace(found, source="itself", threads=answer.threads)
        elif not threads and (threads := _read_with_faulthandler(run, rank, pid, contact)):
            found = replace(found, source="faulthandler", threads=threads)
    has_begun = is_program or contact is not None
    return replace(found, note=_make_note(found, is_program, has_begun, py_spy, problem))


def _make_note(
    found: RankStack, is_program: bool, has_begun: bool, py_spy: str | None, problem: str
) -> str:
    """Return what is to be said beside the stack: an unusual state, or why there is none."""
    state = describe_process_state(found.pid)
    if state in ("gone", "dead"):
        return f"process {found.pid} ended meanwhile"
    is_stopped = state.startswith("stopped")  # any process waits for a disk now and then
    is_told = state and (is_stopped or not found.threads)
    notes = [f"process {found.pid} on {found.host} is {state}"] if is_told else []
    if state.startswith("stopped (S"):
        notes.append(f"`kill -CONT {found.pid}` there lets it go on")
    if not found.threads:
        if is_program and not py_spy:
            notes.append("the stack of a program needs py-spy on its node: pip install py-spy")
        elif not has_begun:
            notes.append("it has only begun, and cannot write its stack yet")
        elif not state:
            limit_s = _ANSWER_LIMIT_S + _RANK_LIMIT_S
            notes.append(f"it gave no stack within {limit_s:g} s")
        notes += [problem] if problem else []
    elif not found.main_frames:  # faulthandler writes the newest hundred threads
        notes.append("its main thread is not among those that were read")
    return ", ".join(notes)


def _read_with_py_spy(
    py_spy: str, pid: int, is_program: bool
) -> tuple[tuple[ThreadStack, ...], str]:
    """Return the threads of a rank; of a program that is no Python itself, such as a shell, those
    of the first process below it that is."""
    threads, problem = read_stack_with_py_spy(py_spy, pid)
    if not threads and is_program:
        import psutil  # not at the top: `echelon stacks` on a login node needs none

        with contextlib.suppress(psutil.Error):
            for child in psutil.Process(pid).children(recursive=True)[:_MAX_PARALLEL]:
                if found := read_stack_with_py_spy(py_spy, child.pid)[0]:
                    return found, ""
    return threads, problem


# --- ranks that are asked ---


def _read_contact(run: Run, rank: int, pid: int) -> StackContact | None:
    """Return how a rank is asked; None while it has only begun, or is another process."""
    with contextlib.suppress(OSError, ValueError, TypeError):
        with run.get_stack_file(rank).open(encoding="utf-8", errors="replace") as file:
            contact = StackContact(*json.loads(file.readline()))
        if os.readlink(f"/proc/{pid}/fd/{contact.pipe_number}") == contact.pipe_name:
            return contact
    return None


def _ask_rank(run: Run, rank: int, pid: int, contact: StackContact) -> RankAnswer | None:
    """Ask a rank through its pipe; None if it does not answer."""
    file = run.get_stack_answer_of_rank(rank)
    with contextlib.suppress(OSError, ValueError, TypeError, KeyError):
        file.unlink(missing_ok=True)
        pipe = os.open(f"/proc/{pid}/fd/{contact.pipe_number}", os.O_WRONLY | os.O_NONBLOCK)
        try:
            os.write(pipe, b".")
        finally:
            os.close(pipe)
        deadline = time.monotonic() + _ANSWER_LIMIT_S
        while not file.exists() and time.monotonic() < deadline:
            time.sleep(_POLL_S)
        answer = RankAnswer.from_json(json.loads(file.read_text(encoding="utf-8")))
        file.unlink()
        return answer
    return None


def _read_with_faulthandler(
    run: Run, rank: int, pid: int, contact: StackContact
) -> tuple[ThreadStack, ...]:
    """Have a rank write its stack by a signal; () if none came."""
    file = run.get_stack_file(rank)
    if not is_signal_caught(pid, STACK_SIGNAL):
        return ()
    try:
        start = file.stat().st_size
        blocking = list_blocking_threads(pid, STACK_SIGNAL)
        os.kill(pid, STACK_SIGNAL)
        deadline = time.monotonic() + _RANK_LIMIT_S
        while time.monotonic() < deadline:
            time.sleep(_POLL_S)
            # It is written line by line. It has begun when the file has grown, and is complete when
            # no thread is left in the handler, in which the signal is blocked.
            if file.stat().st_size > start and not (
                list_blocking_threads(pid, STACK_SIGNAL) - blocking
            ):
                break
        with file.open("rb") as opened:
            opened.seek(start)
            text = opened.read().decode(errors="replace")
    except OSError:  # the process or the disk is gone
        return ()
    return parse_faulthandler(text, contact.main_thread)
