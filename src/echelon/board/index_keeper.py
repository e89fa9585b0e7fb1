"""Keeps the index of runs up to date while somebody looks at it.

Folders are watched where the kernel hears of all that is written there. On network file systems,
and where there are more folders than may be watched, they are looked at: those of active runs once
in a second, all others seldom. All of it costs at most about a hundredth of one core: rows that
change often are read again less often.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterable
from typing import NamedTuple

from echelon.board.folder_watch import FolderWatch, is_remote
from echelon.board.row_reader import read_rows
from echelon.board.run_index import RUN_FILES, SWEEP_FILES, RunIndex, is_run_folder
from echelon.board.run_rows import UNSETTLED, LiveRow, RunRowText, make_run_id
from echelon.board.slurm_answers import SlurmAnswers

_LOOK_ACTIVE_S = 1.0
_LOOK_ALL_S = 5.0
_CHECK_ALIVE_S = 5.0
_SAVE_S = 5.0
_MIN_PAUSE_S = 0.25
_MAX_PAUSE_S = 4.0
_SHARE_OF_CORE = 0.005
_METRICS_FILE = "metrics.jsonl"
_STATUS_FILES = {
    *RUN_FILES,
    *("history.jsonl", "annotations.json", "exit", "job", "cancelled", "archived", "command.json"),
    ".origin",
}
"""What a row is made of, beside summary.json: a row that is followed has its own summary."""


class RunKey(NamedTuple):
    """A run in one of the roots."""

    root: int
    name: str


class IndexKeeper:
    """Hears and looks for what changes, and reads rows again. It is used by one thread, which calls
    begin(), then look() again and again, and end()."""

    def __init__(self, index: RunIndex, slurm: SlurmAnswers, on_change: Callable[[], None]) -> None:
        self._index = index
        self._slurm = slurm
        self._on_change = on_change
        """Called when the index has changed, from time to time during a long check."""
        self._numbers = {str(root): number for number, root in enumerate(index.roots)}
        self._watch: FolderWatch | None = None
        self._polled: set[int] = set()
        """Roots in which not everything is watched."""
        self._live: dict[RunKey, LiveRow] = {}
        self._seen: dict[RunKey, tuple[int, ...]] = {}
        """What was seen of live runs that are not watched."""
        self._dirty: set[RunKey] = set()
        self._grown: set[RunKey] = set()
        """Runs whose metrics were appended to, and whose row was not read since."""
        self._newly_grown: set[RunKey] = set()
        self._logs: dict[str, str] = {}
        """Folders of logs that a page shows, with the id of their run."""
        self._log_sizes: dict[str, int] = {}
        self._used_s = 0.0
        """What this thread has used of a core when it read rows last."""
        self._next_rows = self._next_active = self._next_all = self._next_save = 0.0

    # --- from the first look to the last ---

    def begin(self) -> None:
        """Watch what can be watched, and compare every row with its folder."""
        self._watch = FolderWatch()
        self._polled = {
            number
            for number, root in enumerate(self._index.roots)
            if is_remote(root) or not self._watch.add(str(root))
        }
        self._index.drop_old_defaults()
        self._check(range(len(self._index.roots)), is_whole=True)
        for root in range(len(self._index.roots)):
            self._watch_runs(root)
        self._index.is_complete = True
        self._used_s = time.thread_time()
        self._on_change()
        self._save()

    def end(self) -> None:
        """Stop looking. What changes from now on is found by the next begin()."""
        self._index.is_complete = False
        if self._watch is not None:
            self._watch.close()
        self._live.clear()
        self._seen.clear()
        self._dirty.clear()
        self._grown.clear()
        self._newly_grown.clear()
        self._logs.clear()
        self._log_sizes.clear()
        self._save()

    def wait(self, wake: int) -> None:
        """Wait until there is something to do, or the handle `wake` can be read."""
        assert self._watch is not None
        now = time.monotonic()
        due = [self._next_active, self._next_save]
        if self._polled:
            due.append(self._next_all)
        if self._dirty or self._grown:
            due.append(self._next_rows)
        self._watch.wait(max(0.0, min(due) - now), wake)

    def look(self, watched: Iterable[str]) -> dict[str, set[str]]:
        """Read again what has changed, and return the ids of those `watched` runs that grew, by
        what grew: metrics or logs."""
        self._watch_logs(watched)
        grown_logs = self._take_events()
        now = time.monotonic()
        if now >= self._next_active:
            self._next_active = now + _LOOK_ACTIVE_S
            grown_logs |= self._look_at_active(now)
        if self._polled and now >= self._next_all:
            self._check(self._polled)
            # On a slow file system less often, so that it never costs much.
            self._next_all = time.monotonic() + max(_LOOK_ALL_S, 100 * (time.monotonic() - now))
        wanted = set(watched)
        grown_ids = {make_run_id(*key) for key in self._newly_grown} & wanted
        self._grown |= self._newly_grown
        self._newly_grown = set()
        if now >= self._next_rows and (self._dirty or self._grown):
            self._read_changed()
            # By all that this thread has done since it read rows before.
            used_s = time.thread_time()
            cost_s, self._used_s = used_s - self._used_s, used_s
            pause_s = min(_MAX_PAUSE_S, max(_MIN_PAUSE_S, cost_s / _SHARE_OF_CORE))
            self._next_rows = time.monotonic() + pause_s
        if now >= self._next_save:
            self._save()
        return {"metrics": grown_ids, "logs": grown_logs & wanted}

    def _save(self) -> None:
        began = time.monotonic()
        self._index.save()
        took_s = time.monotonic() - began
        self._next_save = began + max(_SAVE_S, took_s / _SHARE_OF_CORE)

    # --- all rows ---

    def _check(self, roots: Iterable[int], is_whole: bool = False) -> None:
        """Compare rows with their folders, and read those that differ."""
        for root in roots:
            names, gone, is_there = self._index.find_differences(root)
            if not is_there:
                continue
            if self._index.update(root, (), gone):
                self._on_change()
            for name in gone:
                self._forget(RunKey(root, name))
            # What is followed is looked at more often than this.
            names = [name for name in names if is_whole or RunKey(root, name) not in self._live]
            folders = [os.path.join(self._index.roots[root], name) for name in names]
            for rows in read_rows(folders, self._index.get_sweeps(root), self._slurm.ask):
                if self._index.update(root, rows):
                    self._on_change()
            for name in self._index.list_unsettled(root):
                self._follow(RunKey(root, name))

    def _watch_runs(self, root: int) -> None:
        assert self._watch is not None
        if root in self._polled:
            return
        folder = self._index.roots[root]
        for name in self._index.list_names(root):
            if not self._watch.add(os.path.join(folder, name)) and is_run_folder(
                os.path.join(folder, name)
            ):
                self._polled.add(root)
                break
        # What has changed before it was watched.
        self._check([root])

    def _get_folder(self, key: RunKey) -> str:
        return os.path.join(self._index.roots[key.root], key.name)

    def _follow(self, key: RunKey) -> LiveRow:
        live = self._live.get(key)
        if live is None:
            sweeps = self._index.get_sweeps(key.root)
            live = LiveRow(self._get_folder(key), sweeps, self._slurm.ask)
            self._live[key] = live
            # The first look tells how it is; one after the other, so that they stay apart.
            live.wait_until(time.monotonic() + _CHECK_ALIVE_S * (len(self._live) % 16) / 16)
            self._seen[key] = self._measure(key)
        return live

    def _forget(self, key: RunKey) -> None:
        self._live.pop(key, None)
        self._seen.pop(key, None)
        self._dirty.discard(key)
        self._grown.discard(key)
        self._newly_grown.discard(key)
        if self._watch is not None:
            self._watch.remove(self._get_folder(key))

    # --- what is heard ---

    def _take_events(self) -> set[str]:
        """Note what is heard of, and return the ids of runs whose logs grew."""
        assert self._watch is not None
        grown_logs: set[str] = set()
        for event in self._watch.read_events():
            number = self._numbers.get(event.folder)
            if number is not None:
                if event.name and not event.name.startswith("."):
                    self._note_folder(RunKey(number, event.name), event.is_growth)
                elif not event.name:
                    self._polled.add(number)  # the root itself is gone, or another one
                continue
            if event.folder in self._logs:
                grown_logs.add(self._logs[event.folder])
                continue
            parent, _, name = event.folder.rpartition("/")
            if (number := self._numbers.get(parent)) is None:
                continue
            key = RunKey(number, name)
            if event.name == _METRICS_FILE and event.is_growth:
                self._newly_grown.add(key)
            elif event.name in _STATUS_FILES or not event.name:
                self._dirty.add(key)
            elif event.name in SWEEP_FILES:
                self._index.add_sweep(*key)
            elif event.name == "summary.json" and key not in self._live:
                self._dirty.add(key)
        if self._watch.has_overflowed:
            self._watch.has_overflowed = False
            self._check(range(len(self._index.roots)))
        return grown_logs

    def _note_folder(self, key: RunKey, is_growth: bool) -> None:
        assert self._watch is not None
        if is_growth:
            return
        folder = self._get_folder(key)
        # A folder of the same name may be another one: the watch is on the old one.
        self._watch.remove(folder)
        self._live.pop(key, None)
        if os.path.isdir(folder) and not os.path.islink(folder):
            if not self._watch.add(folder):
                self._polled.add(key.root)
            for name in SWEEP_FILES:
                if os.path.lexists(f"{folder}/{name}"):
                    self._index.add_sweep(*key)
        self._dirty.add(key)

    # --- what is looked at ---

    def _look_at_active(self, now: float) -> set[str]:
        """Look at runs that are active or changed just now, and at logs; return the ids of runs
        whose logs grew."""
        assert self._watch is not None
        for key, live in self._live.items():
            if key.root in self._polled and not self._watch.is_watched(self._get_folder(key)):
                seen, known = self._measure(key), self._seen.get(key, ())
                self._seen[key] = seen
                if seen[:1] != known[:1]:
                    self._dirty.add(key)
                if seen[1:] != known[1:]:
                    self._newly_grown.add(key)
            if live.is_due(now):
                # Of many runs each is asked less often: it takes a look at its process.
                live.wait_until(now + max(_CHECK_ALIVE_S, 0.1 * len(self._live)))
                if live.has_other_state():
                    self._dirty.add(key)
        grown: set[str] = set()
        for folder, run_id in self._logs.items():
            if not self._watch.is_watched(folder):
                size = _measure_logs(folder)
                if self._log_sizes.get(folder, size) != size:
                    grown.add(run_id)
                self._log_sizes[folder] = size
        return grown

    def _measure(self, key: RunKey) -> tuple[int, ...]:
        folder = self._get_folder(key)
        times: list[int] = []
        for path in (folder, f"{folder}/{_METRICS_FILE}"):
            with contextlib.suppress(OSError):
                status = os.lstat(path)
                times += (status.st_mtime_ns,) if path is folder else (status.st_size,)
        return tuple(times)

    def _watch_logs(self, run_ids: Iterable[str]) -> None:
        """Watch the logs of the runs that pages show, and no others."""
        assert self._watch is not None
        folders: dict[str, str] = {}
        for run_id in run_ids:
            number, _, name = run_id.partition(":")
            if number.isdecimal() and int(number) < len(self._index.roots) and "/" not in name:
                folders[os.path.join(self._index.roots[int(number)], name, "logs")] = run_id
        if folders.keys() == self._logs.keys():
            return
        for folder in self._logs.keys() - folders.keys():
            self._watch.remove(folder)
        for folder in folders.keys() - self._logs.keys():
            if int(folders[folder].partition(":")[0]) not in self._polled:
                self._watch.add(folder)
        self._logs = folders

    # --- reading ---

    def _read_changed(self) -> None:
        dirty, self._dirty = self._dirty, set()
        grown, self._grown = self._grown - dirty, set()
        is_changed = False
        for root in {key.root for key in dirty | grown}:
            rows: list[RunRowText] = []
            gone: list[str] = []
            for key in dirty | grown:
                if key.root != root:
                    continue
                if key in dirty and not self._is_run(key):
                    gone.append(key.name)
                    if not os.path.isdir(self._get_folder(key)):
                        self._forget(key)
                    self._live.pop(key, None)
                elif (row := self._read(key, is_growth=key in grown)) is not None:
                    rows.append(row)
            is_changed = self._index.update(root, rows, gone) or is_changed
        if is_changed:
            self._on_change()

    def _is_run(self, key: RunKey) -> bool:
        folder = self._get_folder(key)
        return not os.path.islink(folder) and is_run_folder(folder)

    def _read(self, key: RunKey, is_growth: bool) -> RunRowText | None:
        """Return the row of a run; None if it has not changed, or is gone at this moment."""
        live = self._follow(key)
        row = None
        with contextlib.suppress(OSError):
            row = live.read_growth() if is_growth else live.read()
        if row is not None and row.signature != UNSETTLED:
            self._live.pop(key, None)
            self._seen.pop(key, None)
        return row


def _measure_logs(folder: str) -> int:
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        return sum(entry.stat().st_size for entry in entries)
    return 0
