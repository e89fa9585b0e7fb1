"""What a rank tells its agent when it is asked where it stands.

It is asked in two ways. A byte in a pipe wakes a thread, which writes the stacks of all threads and
the collectives that torch's flight recorder knows to be pending. It needs the interpreter's lock,
so it does not answer while native code holds that. Then a signal makes faulthandler write the
stacks, which needs nothing. It is the second way because it may crash a process whose threads run
on meanwhile: it follows their frames without the lock.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import sys
import threading
from pathlib import Path
from types import FrameType

from echelon.runs.run_folder import Run
from echelon.runs.stack_report import (
    STACK_SIGNAL,
    PendingCollective,
    RankAnswer,
    StackContact,
    StackFrame,
    ThreadStack,
    parse_flight_recorder,
    tidy_threads,
)
from echelon.utils.files import write_text_atomically

_TRACE_FUNCTIONS = ("_dump_nccl_trace_json", "_dump_fr_trace_json")
"""Of torch._C._distributed_c10d: the recorder of NCCL, in builds with CUDA, and that of gloo."""


def answer_stack_requests(run: Run, rank: int) -> None:
    """Answer from now on, and write how to ask into the first line of the rank's stack file."""
    reading, writing = os.pipe()
    answer_file = run.get_stack_answer_of_rank(rank)
    threading.Thread(
        target=_answer_requests, args=(reading, answer_file), daemon=True, name="echelon stacks"
    ).start()
    main_thread = f"0x{threading.main_thread().ident or 0:016x}"
    contact = StackContact(main_thread, writing, os.readlink(f"/proc/self/fd/{writing}"))
    # Open for as long as the process lives: faulthandler keeps only its number.
    file = run.get_stack_file(rank).open("w", encoding="utf-8")
    _OPEN_FILES.append(file)
    file.write(json.dumps(contact) + "\n")
    file.flush()
    faulthandler.register(STACK_SIGNAL, file, all_threads=True)


_OPEN_FILES: list[object] = []


def _answer_requests(pipe: int, file: Path) -> None:
    """Write where this process stands whenever something comes through the pipe."""
    while os.read(pipe, 4096):
        answer = RankAnswer(_read_threads(), read_pending_collectives())
        with contextlib.suppress(OSError):  # the disk may be full
            write_text_atomically(file, json.dumps(answer.to_json()))


def _read_threads() -> tuple[ThreadStack, ...]:
    """Return the stacks of all threads of this process, but not of the one that calls."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    main = threading.main_thread().ident
    return tidy_threads(
        ThreadStack(names.get(ident, ""), ident == main, tuple(_walk_frames(frame)))
        for ident, frame in sys._current_frames().items()
    )


def _walk_frames(frame: FrameType | None) -> list[StackFrame]:
    frames = []
    while frame is not None:
        code = frame.f_code
        name = getattr(code, "co_qualname", code.co_name)  # Python 3.11 has it
        frames.append(StackFrame(code.co_filename, frame.f_lineno or 0, name))
        frame = frame.f_back
    return frames


def read_pending_collectives() -> tuple[PendingCollective, ...] | None:
    """Return the collectives of this process that have not come to their end, the oldest first.

    None: this version of torch has no flight recorder that can be read as JSON.
    """
    import torch._C._distributed_c10d as c10d

    functions = [getattr(c10d, name) for name in _TRACE_FUNCTIONS if hasattr(c10d, name)]
    found: tuple[PendingCollective, ...] = ()
    for dump_trace in functions:
        try:
            found += parse_flight_recorder(dump_trace())
        except (ValueError, KeyError, TypeError, RuntimeError):  # of another version
            return None
    return found if functions else None
