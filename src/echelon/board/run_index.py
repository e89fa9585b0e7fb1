"""The index of all runs of the board's roots: rows as JSON texts, kept in a file per root.

``ROOT/.board/index.jsonl`` has a header and then a line per run: ``CRC32 SIGNATURE ROW``. The rows
are served at once, without parsing them, and checked in the background by stat alone. A line that
is damaged is a run that is read again, and a file of another version is none.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import stat
import threading
import time
import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from echelon.board.request import NotFoundError
from echelon.board.run_rows import (
    UNSETTLED,
    RunRowText,
    compute_signature,
    get_default_settings,
    make_run_id,
    read_row_text,
)

BOARD_FOLDER = ".board"
"""In a root: what the board keeps there."""
_INDEX_FILE = "index.jsonl"
_FORMAT = 1
_RUN_FILES = ("config.json", "status.json", "metrics.jsonl")
_SWEEP_FILES = ("sweep.json", "server.json")
_FIRST_ROWS = 200
"""After so many rows that were read the pages hear of them."""


class IndexedRow(NamedTuple):
    """A row and where it is from."""

    root: int
    row: RunRowText
    text: bytes
    """The whole row, as it is served."""
    generation: int
    folder: str


class RowChanges(NamedTuple):
    """What changed since a generation."""

    generation: int
    is_complete: bool
    changed: list[bytes]
    removed: list[str]


class RunIndex:
    """The rows of all runs. It may be used by any thread; `check` is called by one at a time."""

    def __init__(self, roots: list[Path]) -> None:
        self.roots = roots
        self.is_complete = False
        """Whether every row was compared with its folder since the last doubt."""
        # A page keeps its generation when the server is started again: no two starts share one.
        self._first_generation = self.generation = int(time.time() * 1000)
        self._rows: dict[str, IndexedRow] = {}
        self._removed: dict[str, int] = {}
        self._sweeps: dict[int, set[str]] = {}
        self._lock = threading.Lock()
        self._is_saved = True
        self._defaults: dict[str, Any] | None = None
        self._prefixes = [_make_folder_prefix(root) for root in roots]

    # --- what handlers ask for ---

    def render_rows(self) -> tuple[int, bool, bytes]:
        """Return the generation, whether the rows are complete, and all rows as a JSON list."""
        with self._lock:
            texts = [row.text for row in self._rows.values()]
            return self.generation, self.is_complete, b"[" + b",".join(texts) + b"]"

    def list_rows(self) -> list[IndexedRow]:
        """Return all rows as they are now."""
        with self._lock:
            return list(self._rows.values())

    def get_defaults(self) -> dict[str, Any]:
        """Return the settings that a run has unless its row says otherwise."""
        if self._defaults is None:
            self._defaults = get_default_settings()
        return self._defaults

    def find_folder(self, run_id: str) -> Path:
        """Return the folder of a run; NotFoundError where there is none by this id."""
        row = self._rows.get(run_id)
        if row is not None and os.path.isdir(row.folder):
            return Path(row.folder)
        number, _, name = run_id.partition(":")
        if number.isdecimal() and int(number) < len(self.roots) and is_plain_name(name):
            folder = os.path.join(self.roots[int(number)], name)
            if not os.path.islink(folder) and is_run_folder(folder):
                return Path(folder)
        raise make_missing_run_error(run_id)

    def get_row(self, run_id: str) -> bytes:
        """Return the row of a run as JSON; NotFoundError where there is none."""
        row = self._rows.get(run_id)
        if row is None:
            raise NotFoundError(
                f"there is no run {run_id[:200]!r} any more", "see the list of runs"
            )
        return row.text

    def read_again(self, run_id: str) -> bytes:
        """Read a run at once and return its row."""
        folder = self.find_folder(run_id)
        root = int(run_id.partition(":")[0])
        self.update(root, [read_row_text(str(folder), self._find_sweeps(root))])
        return self.get_row(run_id)

    def _find_sweeps(self, root: int) -> set[str]:
        return self._sweeps.get(root, set())

    def get_changes(self, since: int) -> RowChanges | None:
        """Return what changed since a generation; None for one that is not of this index."""
        with self._lock:
            if not self._first_generation <= since <= self.generation:
                return None
            changed = [row.text for row in self._rows.values() if row.generation > since]
            removed = [run_id for run_id, when in self._removed.items() if when > since]
            return RowChanges(self.generation, self.is_complete, changed, removed)

    # --- changes ---

    def update(self, root: int, rows: Iterable[RunRowText], removed: Iterable[str] = ()) -> bool:
        """Take over rows that were read and names that are gone; return whether any differs."""
        with self._lock:
            generation = self.generation + 1
            is_changed = False
            for row in rows:
                run_id = make_run_id(root, row.name)
                known = self._rows.get(run_id)
                if known is not None and known.row == row:
                    continue
                self._is_saved = False
                text = row.render(root, self._prefixes[root])
                is_same = known is not None and known.text == text
                when = known.generation if known is not None and is_same else generation
                folder = os.path.join(self.roots[root], row.name)
                self._rows[run_id] = IndexedRow(root, row, text, when, folder)
                self._removed.pop(run_id, None)
                is_changed = is_changed or not is_same
            for name in removed:
                run_id = make_run_id(root, name)
                if self._rows.pop(run_id, None) is not None:
                    self._removed[run_id] = generation
                    self._is_saved, is_changed = False, True
            if is_changed:
                self.generation = generation
            return is_changed

    def check(self, on_change: Any = None) -> bool:
        """Compare every row with its folder, and read those that differ; return whether any
        does."""
        is_changed = False
        for number, root in enumerate(self.roots):
            is_changed = self._check_root(number, root, on_change) or is_changed
        self.is_complete = True
        return is_changed

    def _check_root(self, number: int, root: Path, on_change: Any) -> bool:
        with self._lock:
            known = {row.row.name: row.row for row in self._rows.values() if row.root == number}
        names, sweeps = _scan_root(root, known)
        self._sweeps[number] = sweeps
        is_changed = self.update(number, (), known.keys() - set(names))
        pending: list[RunRowText] = []
        for name in names:
            folder = os.path.join(root, name)
            with contextlib.suppress(OSError):
                row = known.get(name)
                signature = compute_signature(folder)
                if row is not None and row.signature == signature != UNSETTLED:
                    continue
                pending.append(read_row_text(folder, sweeps))
            if len(pending) == _FIRST_ROWS:
                is_changed = self.update(number, pending) or is_changed
                pending = []
                if on_change is not None:
                    on_change()
        return self.update(number, pending) or is_changed

    # --- files ---

    def load(self) -> None:
        """Take over what the files of the index hold."""
        for number, root in enumerate(self.roots):
            header, rows = read_index_file(find_board_folder(root) / _INDEX_FILE)
            if header is not None:
                self._defaults = header
                self.update(number, rows)
        self._is_saved = True

    def save(self) -> None:
        """Write the files of the index, if anything changed. A full disk must not end the board
        over it."""
        if self._is_saved:
            return
        self._is_saved = True
        for number, root in enumerate(self.roots):
            with self._lock:
                rows = [row.row for row in self._rows.values() if row.root == number]
            with contextlib.suppress(OSError):
                folder = find_board_folder(root)
                folder.mkdir(parents=True, exist_ok=True, mode=0o700)
                write_index_file(folder / _INDEX_FILE, get_default_settings(), rows)


def make_missing_run_error(run_id: str) -> NotFoundError:
    """Return the error for a run that is not there, or not any more."""
    return NotFoundError(f"there is no run {run_id[:200]!r}", "see the list of runs")


def is_plain_name(name: str) -> bool:
    """Return whether a name is that of something in a folder, and leads nowhere else."""
    return bool(name) and name not in (".", "..") and "/" not in name and "\0" not in name


def is_run_folder(folder: str) -> bool:
    """Return whether a folder is a run, sound or broken."""
    return any(os.path.exists(f"{folder}/{name}") for name in _RUN_FILES)


def find_board_folder(root: Path) -> Path:
    """Return the folder in which the board keeps what it knows of a root: in the root where that
    is one's own, else in the user's cache folder. It need not exist."""
    own = root / BOARD_FOLDER
    with contextlib.suppress(OSError):
        user = os.geteuid()
        if root.stat().st_uid == user and os.access(root, os.W_OK):
            found = own.lstat() if os.path.lexists(own) else None
            if found is None or (stat.S_ISDIR(found.st_mode) and found.st_uid == user):
                return own
    return find_board_cache() / "roots" / hashlib.blake2b(os.fsencode(root)).hexdigest()[:24]


def find_board_cache() -> Path:
    """Return the board's folder in the user's cache folder."""
    from echelon.utils.cache_root import get_cache_root

    return get_cache_root(os.environ) / "board"


def read_index_file(file: Path) -> tuple[dict[str, Any] | None, list[RunRowText]]:
    """Return the default settings and the rows of an index file. Damaged lines are left out; of a
    file that is missing or of another version nothing is returned."""
    try:
        first, *lines = file.read_bytes().split(b"\n")
        header = json.loads(first)
        if header["format"] != _FORMAT or not isinstance(header["defaults"], dict):
            return None, []
    except (OSError, ValueError, KeyError, TypeError):
        return None, []
    rows = (_parse_line(line) for line in lines)
    return header["defaults"], [row for row in rows if row is not None]


def _parse_line(line: bytes) -> RunRowText | None:
    checksum, _, rest = line.partition(b" ")
    try:
        if int(checksum, 16) != zlib.crc32(rest):
            return None
        signature, _, text = rest.partition(b" ")
        name = json.loads(b'"%b"' % text[9 : text.index(b',"source":') - 1])
    except ValueError:
        return None
    return RunRowText(name, signature.decode(), text)


def write_index_file(file: Path, defaults: Mapping[str, Any], rows: Iterable[RunRowText]) -> None:
    """Replace an index file."""
    from echelon.utils.files import replace_file

    lines = [json.dumps({"format": _FORMAT, "defaults": defaults}).encode()]
    for row in rows:
        rest = b"%b %b" % (row.signature.encode(), row.text)
        lines.append(b"%08x %b" % (zlib.crc32(rest), rest))
    with replace_file(file) as temporary:
        temporary.write_bytes(b"\n".join(lines) + b"\n")


def _make_folder_prefix(root: Path) -> bytes:
    return json.dumps(str(root / "_")).encode()[1:-2]


def _scan_root(root: Path, known: Mapping[str, Any]) -> tuple[list[str], set[str]]:
    """Return the names of the runs in a root and of its sweeps; nothing of one that cannot be
    listed."""
    names: list[str] = []
    sweeps: set[str] = set()
    with contextlib.suppress(OSError), os.scandir(root) as entries:
        for entry in entries:
            if not entry.is_dir(follow_symlinks=False):
                continue
            if entry.name in known or is_run_folder(entry.path):
                names.append(entry.name)
            elif any(os.path.exists(f"{entry.path}/{file}") for file in _SWEEP_FILES):
                sweeps.add(entry.name)
    return names, sweeps
