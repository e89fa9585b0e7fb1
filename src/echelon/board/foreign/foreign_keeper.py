"""Rows of other programs' runs: found, converted and followed in a thread of their own, while a
page is connected. Their files may be long, and nobody waits for them."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from echelon.board.run_index import RunIndex

if TYPE_CHECKING:
    from echelon.board.foreign.foreign_runs import ForeignRun

_SCAN_EVERY_S = 60.0
_LOOK_EVERY_S = 2.0
_SHARE_OF_TIME = 0.01
"""Of looking for what is new; on a slow file system less often than the times above."""
_MAX_BYTES = 16 << 20
"""Of one run at a time, so that all of them show something soon."""


class ForeignKeeper:
    """Keeps the rows of other programs' runs up to date."""

    def __init__(
        self,
        index: RunIndex,
        wait_for_listeners: Callable[[], None],
        tell: Callable[[], None],
        tell_growth: Callable[[str, set[str]], None],
    ) -> None:
        self._index = index
        self._wait_for_listeners = wait_for_listeners
        self._tell = tell
        self._tell_growth = tell_growth
        self._runs: list[dict[str, ForeignRun]] = [{} for _ in index.roots]
        """By id, for each root."""
        self._signatures: dict[str, str] = {}
        self._next_scan = 0.0
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Begin, unless it has begun."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._keep, name="board-foreign", daemon=True)
            self._thread.start()

    def read_row(self, run_id: str) -> tuple[dict[str, Any], str] | None:
        """Return the row of a run as it is now, and its folder; None for one that is not known."""
        number = run_id.partition(":")[0]
        if not number.isdecimal() or int(number) >= len(self._runs):
            return None
        run = self._runs[int(number)].get(run_id)
        return None if run is None else _describe(run, int(number))

    def _keep(self) -> None:
        self._wait_for_listeners()
        _forget_runs_that_are_gone()
        while True:
            self._wait_for_listeners()
            began = time.monotonic()
            try:
                if began >= self._next_scan:
                    for number in range(len(self._runs)):
                        self._scan(number)
                    took_s = time.monotonic() - began
                    self._next_scan = began + max(_SCAN_EVERY_S, took_s / _SHARE_OF_TIME)
                    began = time.monotonic()
                looked_s = self._look()
            except OSError:  # the cache folder cannot be written: it may be later
                looked_s = _LOOK_EVERY_S
            except Exception:  # a bug of ours must not end all others
                import traceback

                traceback.print_exc()
                looked_s = _LOOK_EVERY_S
            time.sleep(max(_LOOK_EVERY_S, looked_s / _SHARE_OF_TIME))

    def _scan(self, number: int) -> None:
        """Find the runs of a root; those that are gone lose their rows."""
        from echelon.board.foreign.foreign_runs import list_foreign_runs

        known = self._runs[number]
        found = {run.make_id(number): run for run in list_foreign_runs(self._index.roots[number])}
        self._runs[number] = {key: known.get(key, run) for key, run in found.items()}
        gone = known.keys() - found.keys()
        for run_id in gone:
            self._signatures.pop(run_id, None)
        if self._index.update_foreign(number, (), gone):
            self._tell()

    def _look(self) -> float:
        """Read what is new in each run; return for how long it was looked, without reading."""
        looked_s = 0.0
        is_behind = True
        while is_behind:
            is_behind = False
            for number, runs in enumerate(self._runs):
                for run_id, run in runs.items():
                    began = time.monotonic()
                    signature = run.signature
                    looked_s += time.monotonic() - began
                    if self._signatures.get(run_id) == signature:
                        continue
                    is_new = run.refresh(_MAX_BYTES)
                    if not is_new or run.is_complete:
                        self._signatures[run_id] = signature
                    else:
                        is_behind = True
                    if self._index.update_foreign(number, [_describe(run, number)]):
                        self._tell()
                    if is_new:
                        self._tell_growth("metrics", {run_id})
        return looked_s


def _forget_runs_that_are_gone() -> None:
    from echelon.board.foreign.foreign_runs import remove_stale_conversions

    remove_stale_conversions()


def _describe(run: ForeignRun, number: int) -> tuple[dict[str, Any], str]:
    return run.make_row(number), os.fspath(run.converted.folder)
