"""A function as the program of a job: what `echelon.submit("work.py:train", …)` runs.

The run folder has the function and its arguments as JSON, and gets what it returns or raises as
JSON. Nothing is pickled, so the two sides need not run the same code or the same Python.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import re
import sys
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from echelon.errors import EchelonError, ExitCode, Fault
from echelon.runs.failure import format_user_traceback
from echelon.runs.run_folder import Run
from echelon.runs.submitted_run import get_submitted_run
from echelon.runs.trusted_code import require_trusted_file
from echelon.utils.files import read_json_object, write_json_atomically

_FUNCTION = re.compile(r"(?P<where>[\w./-]+):(?P<name>[A-Za-z_]\w*)")


def make_call_command() -> list[str]:
    """Return the words that call the function of a run, in the interpreter of this process."""
    # The working folder may hold files that are named like modules of ours; -P does not look there.
    safe_path = ["-P"] if sys.version_info >= (3, 11) else []
    return [sys.executable, *safe_path, "-m", __name__]


def is_function_path(text: str) -> bool:
    """Return whether a text is MODULE:FUNCTION or FILE.py:FUNCTION, and not a command."""
    return _FUNCTION.fullmatch(text) is not None


def write_call(run: Run, call: Mapping[str, Any]) -> None:
    """Write which function the run calls, and with which arguments: `{function, args, kwargs}`."""
    write_json_atomically(run.call_file, dict(call), names_code=True)


def find_json_problem(value: Any, name: str) -> str:
    """Return which part of a value JSON cannot hold as it is; empty if it can hold all of it.

    `name` is what the value is called, such as "the result". A tuple is accepted, and becomes a
    list.
    """
    if value is None or isinstance(value, (bool, int, float, str)):
        return ""
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str):  # json.dumps would turn 1 into "1" without a word
                return f"a key of {name} is {key!r}, of type {type(key).__name__}"
        items = [(f"{name}[{key!r}]", item) for key, item in value.items()]
    elif isinstance(value, (list, tuple)):
        items = [(f"{name}[{index}]", item) for index, item in enumerate(value)]
    else:
        return f"{name} is of type {type(value).__name__}"
    problems = (find_json_problem(item, item_name) for item_name, item in items)
    return next(filter(None, problems), "")


def call_function_of_run(run: Run) -> int:
    """Call the function of a run, write what it returns or raises, and return the exit code.

    Every process of the run calls it. The result is that of rank 0.
    """
    call = read_json_object(run.call_file) or {}
    is_rank_0 = os.environ.get("RANK", "0") == "0"
    try:
        require_trusted_file(run.call_file)
        function = _load_function(call["function"])
        value = function(*call["args"], **call["kwargs"])
        if is_rank_0:
            _require_json(value, call["function"])
            write_json_atomically(run.result_file, {"result": value})
    except Exception as error:
        if isinstance(error, EchelonError):
            text, summary = f"error: {error}\n", error.faults[0].what
        else:
            text = format_user_traceback(error)
            summary = traceback.format_exception_only(error)[-1].strip()
        print(text, end="", file=sys.stderr, flush=True)
        if is_rank_0:
            write_json_atomically(run.result_file, {"error": summary})
        return ExitCode.FAILED
    return ExitCode.OK


def _require_json(value: Any, function: str) -> None:
    """Raise EchelonError if the result cannot be written as JSON."""
    if problem := find_json_problem(value, "the result"):
        raise EchelonError(
            Fault(
                f"{function} returned what JSON cannot hold: {problem}",
                "return numbers, texts, lists and dicts; write the rest to a file and return its "
                "path",
            )
        )


def _load_function(path: str) -> Callable[..., Any]:
    """Import a function by MODULE:FUNCTION or FILE.py:FUNCTION, seen from this folder."""
    where, _, name = path.rpartition(":")
    file = Path(where).absolute()
    sys.path.insert(0, str(file.parent if where.endswith(".py") else Path.cwd()))
    module = importlib.import_module(file.stem if where.endswith(".py") else where)
    function = getattr(module, name, None)
    if not callable(function):
        raise EchelonError(
            Fault(
                f"{getattr(module, '__file__', where)} has no function {name}",
                "fix the name after the colon, or a file that is named like another module",
            )
        )
    loaded: Callable[..., Any] = function
    return loaded


if __name__ == "__main__":
    submitted_run = get_submitted_run(os.environ)
    assert submitted_run is not None, "the batch script names the run"
    sys.exit(call_function_of_run(submitted_run))
