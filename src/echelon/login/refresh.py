"""Bringing copies of runs up to date: once, before something is shown, or for as long as it is."""

from __future__ import annotations

import contextlib
import json
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from echelon.errors import EchelonError
from echelon.login.connection import LoginConnection, LoginTarget, open_connection
from echelon.login.local_copy import LocalCopy
from echelon.runs.origin import list_changing_copies, read_origin
from echelon.runs.run_folder import Run
from echelon.utils.os_errors import format_os_error_reason
from echelon.utils.text import format_time_ago

LIST_LIMIT_S = 20.0
"""How long a list waits for a login node before it shows what is known."""
_RETRY_S = (1.0, 2.0, 4.0, 8.0, 15.0)
_RELIST_S = 5.0


def refresh_runs(
    runs: Sequence[Run], with_logs: bool = False, limit_s: float = LIST_LIMIT_S
) -> None:
    """Bring these runs up to date, those of one login node by one ssh call.

    A node that does not answer is a warning: what is known is shown, and how old it is.
    """
    for target, copies in _group_by_target(runs):
        try:
            with open_connection(target, limit_s, asks_questions=False) as connection:
                refresh_copies(connection, copies, with_logs)
        except (EchelonError, OSError) as error:
            reason = _describe_error(error)
            _mark_unreachable(copies, reason)
            print(f"warning: {_describe_age(copies)}: {reason}", file=sys.stderr, flush=True)


def refresh_copies(
    connection: LoginConnection, copies: Sequence[LocalCopy], with_logs: bool
) -> None:
    """Bring copies up to date by an open connection."""
    connection.step = "bringing back what the run wrote"
    known = [copy.describe_known(with_logs) for copy in copies]
    connection.send({"do": "refresh", "logs": with_logs}, json.dumps(known).encode())
    by_folder = {copy.origin.folder: copy for copy in copies}
    while True:
        message, data = connection.receive()
        if message.get("done"):
            break
        by_folder[str(message["folder"])].apply(message, data)
    for copy in copies:
        copy.save()
    if trials := [LocalCopy(run) for copy in copies for run in copy.new_trials]:
        refresh_copies(connection, trials, with_logs)


def _group_by_target(runs: Sequence[Run]) -> list[tuple[LoginTarget, list[LocalCopy]]]:
    groups: dict[LoginTarget, list[LocalCopy]] = {}
    for run in dict.fromkeys(runs):
        if (origin := read_origin(run)) is not None:
            groups.setdefault(LoginTarget.from_origin(origin), []).append(LocalCopy(run))
    return list(groups.items())


def _describe_error(error: EchelonError | OSError) -> str:
    """Return what kept copies from being brought up to date: the node, or the disk of this
    machine."""
    if isinstance(error, EchelonError):
        return error.faults[0].what
    where = f" ({error.filename})" if error.filename else ""
    return f"what came cannot be written here{where}: {format_os_error_reason(error)}"


def _mark_unreachable(copies: Sequence[LocalCopy], reason: str) -> None:
    for copy in copies:
        with contextlib.suppress(OSError):
            copy.save(unreachable=reason)


def _describe_age(copies: Sequence[LocalCopy]) -> str:
    asked = max(copy.state.asked for copy in copies)
    age = f"is as of {format_time_ago(asked)}" if asked else "was never brought up to date"
    names = copies[0].run.name if len(copies) == 1 else f"{len(copies)} runs"
    return f"what is shown of {names} {age}"


# --- following ---


class Follower:
    """Keeps copies up to date in threads, over connections that are opened again when they are
    lost: the laptop may sleep, or change networks."""

    def __init__(
        self, list_wanted: Callable[[], Sequence[Run]], with_logs: bool, is_verbose: bool = True
    ) -> None:
        self._list_wanted = list_wanted
        self._with_logs = with_logs
        self._is_verbose = is_verbose
        self._stopping = threading.Event()
        self._first_answer = threading.Event()
        self._connections: dict[LoginTarget, LoginConnection] = {}
        self._supervisor = threading.Thread(
            target=self._supervise, name="login-follow", daemon=True
        )

    def start(self) -> None:
        """Begin, in the background."""
        self._supervisor.start()

    def wait_for_first_answer(self, limit_s: float) -> None:
        """Wait until the copies are as new as they can be: an answer came, or none can come."""
        self._first_answer.wait(limit_s)

    def stop(self) -> None:
        """End all connections."""
        self._stopping.set()
        for connection in list(self._connections.values()):
            connection.kill()
        self._supervisor.join(5)

    def _supervise(self) -> None:
        """Have a thread for every login node that has runs to follow, as long as it has any."""
        threads: dict[LoginTarget, threading.Thread] = {}
        while not self._stopping.is_set():
            for target in self._find_targets():
                if target not in threads or not threads[target].is_alive():
                    threads[target] = threading.Thread(
                        target=self._follow, args=(target,), name="login-node", daemon=True
                    )
                    threads[target].start()
            self._stopping.wait(_RELIST_S)
        for thread in threads.values():
            thread.join(5)

    def _find_targets(self) -> dict[LoginTarget, list[LocalCopy]]:
        return dict(_group_by_target(self._list_wanted()))

    def _follow(self, target: LoginTarget) -> None:
        """Follow the runs of one login node until there are none, or until it is stopped."""
        failures = 0
        while not self._stopping.is_set():
            copies = self._find_targets().get(target)
            if not copies:
                return
            began = time.monotonic()
            try:
                with open_connection(target, asks_questions=False) as connection:
                    self._connections[target] = connection
                    if failures and self._is_verbose:
                        print(f"{target.host} answers again", file=sys.stderr, flush=True)
                    failures = 0
                    self._receive(connection, target, copies)
            except (EchelonError, OSError) as error:
                if self._stopping.is_set():
                    return
                if time.monotonic() - began > _RETRY_S[-1]:
                    failures = 0
                reason = _describe_error(error)
                _mark_unreachable(copies, reason)
                self._first_answer.set()
                if self._is_verbose and failures == 0:
                    print(f"warning: {reason}; trying again", file=sys.stderr, flush=True)
                self._stopping.wait(_RETRY_S[min(failures, len(_RETRY_S) - 1)])
                failures += 1
            finally:
                self._connections.pop(target, None)

    def _receive(
        self, connection: LoginConnection, target: LoginTarget, copies: Sequence[LocalCopy]
    ) -> None:
        """Apply what comes, until other runs are wanted."""
        connection.step = "following"
        known = [copy.describe_known(self._with_logs) for copy in copies]
        request = {"do": "follow", "logs": self._with_logs}
        connection.send(request, json.dumps(known).encode())
        by_folder = {copy.origin.folder: copy for copy in copies}
        names = {copy.run.folder for copy in copies}
        while not self._stopping.is_set():
            message, data = connection.receive()
            if not message.get("beat"):
                by_folder[str(message["folder"])].apply(message, data)
                continue
            for copy in copies:
                copy.save()
            self._first_answer.set()
            wanted = {copy.run.folder for copy in self._find_targets().get(target, [])}
            if wanted != names:
                return


@contextlib.contextmanager
def following(runs: Sequence[Run], *, is_new: bool = False) -> Iterator[None]:
    """Keep these runs and their logs up to date in the background; runs of this machine need
    nothing.

    Of a run that was submitted just now (`is_new`) every line that comes is new; else what is there
    is brought first, so that what is shown begins with it.
    """
    copies = [run for run in runs if run.origin_file.exists()]
    if not copies:
        yield
        return
    follower = Follower(lambda: copies, with_logs=True)
    follower.start()
    try:
        if not is_new:
            follower.wait_for_first_answer(LIST_LIMIT_S)
        yield
    finally:
        follower.stop()


@contextlib.contextmanager
def following_folders(roots: Sequence[Path], with_logs: bool, is_verbose: bool) -> Iterator[None]:
    """Keep all runs of these folders up to date in the background, also those that are new."""
    if not roots:
        yield
        return
    follower = Follower(
        lambda: [run for root in roots for run in list_changing_copies(root)], with_logs, is_verbose
    )
    follower.start()
    try:
        yield
    finally:
        follower.stop()
