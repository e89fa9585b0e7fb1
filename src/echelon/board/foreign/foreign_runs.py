"""Runs of other programs: folders with TensorBoard's event files, and those of wandb's runs.

Each is converted into a folder of ours in the user's cache folder (`converted_run`), which follows
the original while that grows. Nothing is written beside the originals, and no link is followed.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import stat
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

from echelon.board.foreign.converted_run import (
    FOREIGN_FILE,
    ConvertedRun,
    ForeignFacts,
    get_size,
    is_same_beginning,
    load_facts,
)
from echelon.board.request import NotFoundError, Request, Response, Route, json_response
from echelon.board.run_rows import make_shown_name
from echelon.runs.run_folder import CONFIG_FILE, METRICS_FILE, STATUS_FILE, Run
from echelon.utils.cache_root import get_cache_root
from echelon.utils.locks import FileLock, LocksUnsupportedError
from echelon.utils.trust import make_trusted_folder

TENSORBOARD, WANDB = "tensorboard", "wandb"
_MAX_DEPTH = 6
_MAX_FOLDERS = 20_000
_GROWING_S = 300.0
"""A run without a last word is running if its files grew within this time."""
_MAX_BYTES = 1 << 50
_EVENT_FILE = re.compile(r".*tfevents\.\d+.*")
_WANDB_FOLDER = re.compile(r"(offline-)?run-.+")
_OUR_EVENT_FILE = re.compile(r"events\.out\.tfevents\.\d{17,}\..*")
_VALIDATION = re.compile(r"(?<![a-z])(val|valid|validation|eval|test|dev)(?![a-z])")
_MAX_TEXT = 1000
_MAX_NAMES = 300
"""Settings and metrics in a row."""


# --- finding them ---


@dataclass(frozen=True)
class ForeignScan:
    """The runs of other programs below a folder."""

    runs: list[ForeignRun]
    stopped: str
    """Why there may be more of them; else empty."""


def list_foreign_runs(root: Path) -> list[ForeignRun]:
    """Return the runs of other programs below a folder, by name."""
    return scan_foreign_runs(root).runs


def scan_foreign_runs(root: Path, max_folders: int = _MAX_FOLDERS) -> ForeignScan:
    """Return the runs of other programs below a folder, by name, and whether these are all.

    Folders are read level by level, six deep. Runs of Echelon are left out with all that is in
    them: their event files and wandb's show the same again. So are hidden folders and links.
    """
    root = root.absolute()
    runs: list[ForeignRun] = []
    stopped = ""
    waiting = deque([(str(root), 0)])
    count = 0
    while waiting:
        folder, depth = waiting.popleft()
        count += 1
        if count > max_folders:
            stopped = f"{root} has more than {max_folders:,} folders, so only these were searched"
            break
        files, folders = _read_entries(folder)
        if _is_own_run(folder, files):
            continue
        events = [name for name in files if "tfevents" in name and _is_event_file(name)]
        if events and not _shows_own_run(folder, events):
            runs.append(ForeignRun(root, Path(folder), TENSORBOARD))
        logs = sorted(name for name in files if name.endswith(".wandb"))
        if logs and _WANDB_FOLDER.fullmatch(os.path.basename(folder)):
            runs.append(ForeignRun(root, Path(folder), WANDB))
            continue
        if depth < _MAX_DEPTH:
            waiting += [(f"{folder}/{name}", depth + 1) for name in sorted(folders)]
    return ForeignScan(sorted(runs, key=lambda run: (run.name, run.source)), stopped)


def _read_entries(folder: str) -> tuple[list[str], list[str]]:
    """Return the names of the files and of the folders in a folder; none of one that cannot be
    read."""
    files, folders = [], []
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            if entry.is_file(follow_symlinks=False):
                files.append(entry.name)
            elif entry.is_dir(follow_symlinks=False) and not _is_skipped(entry.name):
                folders.append(entry.name)
    return files, folders


def _is_skipped(name: str) -> bool:
    is_hidden = name.startswith(".") and name != ".wandb"  # where wandb may write its runs
    return is_hidden or name in ("__pycache__", "node_modules", "site-packages")


def _is_event_file(name: str) -> bool:
    return _EVENT_FILE.fullmatch(name) is not None and not name.endswith((".gz", ".tmp"))


def _is_own_run(folder: str, files: Sequence[str]) -> bool:
    """Return whether a folder is a run of Echelon. Models of other libraries have a config.json
    too."""
    if CONFIG_FILE in files:
        if STATUS_FILE in files:
            return True
        with contextlib.suppress(OSError), open(f"{folder}/{CONFIG_FILE}", "rb") as file:
            return b'"run_format"' in file.read(200)
        return False
    return STATUS_FILE in files and METRICS_FILE in files


def _shows_own_run(folder: str, events: Sequence[str]) -> bool:
    """Return whether event files are Echelon's, of a run whose folder is there too: with
    `track.tensorboard.folder` they are in a folder of their own."""
    names = [name for name in events if _OUR_EVENT_FILE.fullmatch(name)]
    if len(names) < len(events):
        return False
    place = _find_own_run(f"{folder}/{min(names)}")
    if place is None:
        return False
    # A relative one is as seen from where the training was started, which is somewhere above.
    return any((above / place / CONFIG_FILE).is_file() for above in Path(folder).parents)


@lru_cache(maxsize=20_000)
def _find_own_run(event_file: str) -> str | None:
    """Return in which folder the run of an event file of Echelon is, as its settings say."""
    from echelon.board.foreign.tensorboard_events import find_config

    config = find_config(Path(event_file))
    run = config.get("run") if config is not None else None
    if not isinstance(run, dict) or not all(isinstance(run.get(k), str) for k in ("dir", "name")):
        return None
    return os.path.join(run["dir"], run["name"])


# --- one of them ---


@dataclass
class ForeignRun:
    """A run of another program."""

    root: Path
    folder: Path
    """The original."""
    source: str
    """`tensorboard` or `wandb`."""
    is_complete: bool = False
    """Whether the last refresh() came to the end of its files."""
    _facts: ForeignFacts | None = field(default=None, repr=False)
    _loaded: tuple[int, int] = field(default=(0, 0), repr=False)
    """Which foreign.json the facts are from."""
    _files: dict[str, os.stat_result] = field(default_factory=dict, repr=False)

    @cached_property
    def name(self) -> str:
        """Its folder as seen from the root, by which it is known; that of the root itself is the
        root's name."""
        relative = self.folder.relative_to(self.root).as_posix()
        return make_shown_name(self.folder.name if relative == "." else relative)

    @cached_property
    def converted(self) -> Run:
        """The run folder that it is converted into."""
        key = hashlib.blake2b(os.fsencode(self.folder), digest_size=12).hexdigest()
        cache = get_cache_root(os.environ) / "board" / "foreign"
        return Run(cache / f"{self.source}-{key}")

    @property
    def facts(self) -> ForeignFacts:
        """What is known of it beside its metrics, as of the last refresh()."""
        if self._facts is None:
            self._load_facts()
        return self._facts or ForeignFacts(self.source, folder=str(self.folder))

    def _load_facts(self) -> None:
        """Read foreign.json, if another process has replaced it or it was not read yet."""
        try:
            status = os.stat(self.converted.folder / FOREIGN_FILE)
        except OSError:
            self._facts = None
            return
        loaded = (status.st_ino, status.st_mtime_ns)
        if self._facts is None or loaded != self._loaded:
            self._facts, self._loaded = load_facts(self.converted.folder), loaded

    def make_id(self, root_number: int) -> str:
        """Return the id under which a page knows it."""
        return f"{root_number}:{self.source}:{self.name}"

    def refresh(self, max_bytes: int = _MAX_BYTES) -> bool:
        """Bring the converted folder up to date, and return whether anything was new.

        Only what was added to the originals is read; if one was replaced or is gone, all is read
        again. With `max_bytes` of the originals it stops in between, and is_complete is False. It
        waits for another process that converts the same run.

        Raises OSError where the cache folder cannot be written.
        """
        self._files = self._stat_files()
        if not self._files:
            return False
        self._load_facts()
        if self._facts is not None and self._is_up_to_date(self._facts):
            self.is_complete = True
            return False
        folder = self.converted.folder
        if not folder.is_dir():
            make_trusted_folder(folder.parent, 0o700)
            folder.mkdir(mode=0o700, exist_ok=True)
        with contextlib.ExitStack() as stack:
            with contextlib.suppress(
                LocksUnsupportedError
            ):  # then one board at a time is hoped for
                stack.enter_context(FileLock(folder / ".lock", mode=0o600))
            return self._convert(max_bytes)

    def _convert(self, max_bytes: int) -> bool:
        self._load_facts()  # another process may have been faster
        known = self._facts
        if known is not None and self._is_up_to_date(known):
            self.is_complete = True
            return True
        self._facts = None
        facts = known or ForeignFacts(self.source, folder=str(self.folder))
        converted = ConvertedRun(self.converted, facts)
        if known is None or not self._continues(known) or not converted.drop_unfinished_lines():
            converted.begin_anew()
        paths = [self.folder / name for name in self._files]
        if self.source == TENSORBOARD:
            from echelon.board.foreign.tensorboard_events import convert_event_files

            self.is_complete = not convert_event_files(converted, paths, max_bytes)
        else:
            from echelon.board.foreign.wandb_files import convert_wandb_file

            self.is_complete = not convert_wandb_file(converted, paths[0], max_bytes)
        if known is None or not known.metrics_bytes:
            converted.keep_summary()  # later read_summary() does, where it is worth it
        self._load_facts()
        return True

    def _stat_files(self) -> dict[str, os.stat_result]:
        """Return the files to read, in their order, and what the system knows of them."""
        files = _read_entries(str(self.folder))[0]
        if self.source == TENSORBOARD:
            from echelon.board.foreign.tensorboard_events import sort_event_files

            events = [self.folder / name for name in files if _is_event_file(name)]
            names = [path.name for path in sort_event_files(events)]
        else:
            names = sorted(name for name in files if name.endswith(".wandb"))[:1]
        found = {}
        for name in names:
            with contextlib.suppress(OSError):
                status = os.stat(self.folder / name, follow_symlinks=False)
                if stat.S_ISREG(status.st_mode):
                    found[name] = status
        return found

    def _is_up_to_date(self, facts: ForeignFacts) -> bool:
        return (
            list(facts.files) == list(self._files)
            and all(facts.files[name].is_unchanged(s) for name, s in self._files.items())
            and get_size(self.converted.metrics_file) == facts.metrics_bytes
        )

    def _continues(self, facts: ForeignFacts) -> bool:
        """Return whether what was read of the files is still there, and new files come after
        them."""
        known, present = list(facts.files), list(self._files)
        return known == present[: len(known)] and all(
            facts.files[name].is_unchanged(self._files[name])
            or is_same_beginning(self.folder / name, facts.files[name])
            for name in known
        )

    # --- what is shown of it ---

    @property
    def signature(self) -> str:
        """What a change of the run changes, by a look at its files alone. Whether it is running is
        part of it, which time alone changes."""
        files = self._files = self._stat_files()
        parts = [f"{name}:{s.st_size:x}.{s.st_mtime_ns:x}" for name, s in files.items()]
        text = "/".join((*parts, str(self._is_growing())))
        return hashlib.blake2b(text.encode("utf-8", "replace"), digest_size=12).hexdigest()

    @property
    def state(self) -> str:
        """Its state, by its own last word or by whether its files grow."""
        if self.facts.state == "unknown" and self._is_growing():
            return "running"
        return self.facts.state

    def _get_changed(self) -> float:
        return max((status.st_mtime for status in self._files.values()), default=0.0)

    def _is_growing(self) -> bool:
        return abs(time.time() - self._get_changed()) < _GROWING_S

    def make_row(self, root_number: int) -> dict[str, Any]:
        """Return the row of the run, as of the last refresh()."""
        from echelon.runs.annotations import read_annotations
        from echelon.runs.metric_direction import guess_best_is
        from echelon.runs.metrics_summary import read_summary

        if not self._files:
            self._files = self._stat_files()
        facts, summary = self.facts, read_summary(self.converted)
        annotations = read_annotations(self.converted)
        metrics = {
            name: [each.last, each.min, each.max, each.count, guess_best_is(name) or "min"]
            for name, each in summary.metrics.items()
        }
        best_name = choose_best_metric(list(metrics))
        best = summary.metrics.get(best_name)
        best_is = guess_best_is(best_name) or "min"
        started = facts.started or self._get_changed()
        step = summary.last_step
        return {
            "id": self.make_id(root_number),
            "root": root_number,
            "folder": make_shown_name(str(self.folder)),
            "name": facts.name or self.name,
            "source": self.source,
            "state": self.state,
            "why": self._explain_state() or None,
            "experiment": _shorten(facts.memory.get("project") or os.path.basename(facts.program)),
            "step": step if step is None else int(step),
            "total_steps": None,
            "best": None if best is None else best.get_best(best_is),
            "best_name": best_name,
            "best_is": best_is,
            "trained_s": self._count_trained_s(summary.last_time),
            "eta_s": None,
            "started": round(started, 3),
            "updated": round(self._get_changed(), 3),
            "launcher": None,
            "host": _shorten(facts.host) or None,
            "job": None,
            "nodes": None,
            "processes": None,
            "tags": list(dict.fromkeys([*facts.tags, *annotations.tags])),
            "note": _shorten(annotations.note or facts.note),
            "archived": False,
            "early": False,
            "sweep": None,
            "settings": {
                _shorten(key): _shorten_value(value)
                for key, value in list(facts.settings.items())[:_MAX_NAMES]
            },
            "metrics": dict(list(metrics.items())[:_MAX_NAMES]),
        }

    def _explain_state(self) -> str:
        texts = [self.facts.why] if self.facts.why else []
        if self.facts.faults:
            named = [f"{what} ({n} ×)" if n > 1 else what for what, n in self.facts.faults.items()]
            texts.append(f"could not be read: {', '.join(named[:3])}")
        return _shorten("; ".join(texts))

    def _count_trained_s(self, last_time: float | None) -> float | None:
        runtime_s = self.facts.memory.get("runtime_s")
        if isinstance(runtime_s, (int, float)):
            return round(float(runtime_s), 1)
        if last_time is None or self.facts.started is None:
            return None
        return round(max(0.0, last_time - self.facts.started), 1)


def choose_best_metric(names: Sequence[str]) -> str:
    """Return the metric that a list shows of a run that has not said which one matters: one that
    was evaluated and whose better direction is known, else the loss."""
    from echelon.runs.metric_direction import guess_best_is

    def rank(name: str) -> tuple[bool, bool, bool, str]:
        bare = name.rpartition("/")[2].lower()
        is_evaluated = _VALIDATION.search(name.lower()) is not None
        return not is_evaluated, guess_best_is(name) != "max", "loss" not in bare, name

    known = [name for name in names if guess_best_is(name)]
    return min(known, key=rank) if known else "loss"


def show_facts(request: Request) -> Response:
    """Answer with what is known of a run of another program beside its metrics: what could not be
    read of it, and what is in its files and not shown."""
    run = request.board.find_run(request.path_values["id"])
    facts = load_facts(run.folder)
    if facts is None:
        raise NotFoundError(f"{run.name} is not a run of another program")
    return json_response(
        {
            "source": facts.source,
            "folder": facts.folder,
            "program": facts.program,
            "host": facts.host,
            "files": {name: known.offset for name, known in facts.files.items()},
            "faults": facts.faults,
            "left_out": facts.left_out,
        }
    )


ROUTES: list[Route] = [("GET", "/api/run/{id}/foreign", show_facts)]


def remove_stale_conversions(older_s: float = 30 * 86400.0) -> int:
    """Remove converted runs whose original is gone and that nobody has looked at for so long, and
    return how many these were."""
    import shutil

    count = 0
    cache = get_cache_root(os.environ) / "board" / "foreign"
    with contextlib.suppress(OSError), os.scandir(cache) as entries:
        for entry in entries:
            with contextlib.suppress(OSError):
                if time.time() - os.stat(f"{entry.path}/foreign.json").st_mtime < older_s:
                    continue
                facts = load_facts(Path(entry.path))
                if facts is None or not os.path.isdir(facts.folder):
                    shutil.rmtree(entry.path, ignore_errors=True)
                    count += 1
    return count


def _shorten(text: str) -> str:
    return text if len(text) <= _MAX_TEXT else text[:_MAX_TEXT] + "…"


def _shorten_value(value: Any) -> Any:
    if isinstance(value, str):
        return _shorten(value)
    if isinstance(value, (list, dict)):
        text = json.dumps(value)
        return value if len(text) <= _MAX_TEXT else _shorten(text)
    return value
