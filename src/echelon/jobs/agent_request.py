"""What a person asks of a run that is running, by a file in its folder.

The agent that leads looks at the file twice a second, and writes its answer into another one; see
`launch/node/stack_exchange.py`. So no port is open for it, and the rights of the folder decide who
may ask.
"""

from __future__ import annotations

import contextlib
import json
import secrets
import time
from collections.abc import Mapping
from typing import Any

from echelon.errors import EchelonError, ExitCode, Fault
from echelon.runs.process_record import is_alive
from echelon.runs.run_folder import Run
from echelon.utils.files import read_json_object
from echelon.utils.os_errors import format_os_error_reason
from echelon.utils.processes import describe_process_state

_ANSWER_LIMIT_S = 30.0
"""Agents give each other 12 s; the rest is for a machine that is busy."""
_POLL_S = 0.1


def ask_agent(run: Run, question: Mapping[str, Any]) -> dict[str, Any]:
    """Ask the agent that leads, and return its answer. Raises EchelonError if none comes."""
    agent = read_json_object(run.stack_agent_file)
    if agent is None or is_alive(agent) is False:
        raise EchelonError(
            Fault(
                f"run {run.name} has no agent in {run.folder}: it has not begun, or was killed",
                "`echelon jobs` shows its state",
            ),
            exit=ExitCode.NOT_FOUND,
        )
    request = secrets.token_hex(8)
    try:
        _write_request(run, {**question, "id": request, "agent": agent})
        return _wait_for_answer(run, request, agent)
    finally:
        with contextlib.suppress(OSError):
            run.get_stack_answer_file(request).unlink(missing_ok=True)


def _write_request(run: Run, request: Mapping[str, Any]) -> None:
    """Write a request, in place: see Run.stack_request_file. Raises EchelonError for somebody who
    may not write there."""
    try:
        run.get_stack_answer_file(request["id"]).touch()
        run.stack_request_file.write_text(json.dumps(request), encoding="utf-8")
    except OSError as error:
        raise EchelonError(
            Fault(
                f"run {run.name} cannot be asked, since {error.filename} cannot be written: "
                f"{format_os_error_reason(error)}",
                "only those who may write there may ask: type it as the user who started the run",
            )
        ) from error


def _wait_for_answer(run: Run, request: str, agent: Mapping[str, Any]) -> dict[str, Any]:
    """Return the answer of the agent. Raises EchelonError if none comes."""
    deadline = time.monotonic() + _ANSWER_LIMIT_S
    while time.monotonic() < deadline:
        with contextlib.suppress(ValueError, KeyError, TypeError, OSError):
            text = run.get_stack_answer_file(request).read_bytes()
            if text.endswith(b"\n"):
                return dict(json.loads(text))
        if is_alive(agent) is False:
            raise EchelonError(
                Fault(f"run {run.name} ended while it was asked", "`echelon jobs` shows its state"),
                exit=ExitCode.NOT_FOUND,
            )
        time.sleep(_POLL_S)
    host, pid = agent.get("host"), agent.get("pid")
    state = describe_process_state(int(str(pid))) if is_alive(agent) else ""
    raise EchelonError(
        Fault(
            f"the agent of run {run.name}, process {pid} on {host}, did not answer within "
            f"{_ANSWER_LIMIT_S:g} s" + f": it is {state}" * bool(state),
            f"`kill -CONT {pid}` lets it go on"
            if state.startswith("stopped (")
            else f"look there whether it waits for a disk: ps -o stat,wchan -p {pid}",
        ),
        exit=ExitCode.FAILED,
    )
