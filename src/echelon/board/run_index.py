"""The index of all runs of the board's roots: rows as JSON texts, kept in a file per root.

``ROOT/.board/index.jsonl`` has a header and then a line per run: ``CRC32 SIGNATURE ROW``. The rows
are served at once, without parsing them, and checked in the background by stat alone. A line that
is damaged is a run that is read again, and a file of another version is none.
"""

from __future__ import annotations

import contextlib
import json
import os
import stat
import threading
import time
import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from echelon.board.request import NotFoundError
from echelon.board.run_rows import (
    UNSETTLED,
    RunRowText,
    compute_signature,
    encode_row,
    find_name_text,
    find_odd_file,
    get_default_settings,
    make_run_id,
    make_shown_name,
    read_row_text,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from echelon.board.run_rows import AskSlurm

    ReadForeignRow = Callable[[str], tuple[dict[str, Any], str] | None]

BOARD_FOLDER = ".board"
"""In a root: what the board keeps there."""
_INDEX_FILE = "index.jsonl"
_FORMAT = 1
RUN_FILES = ("config.json", "status.json", "metrics.jsonl")
"""A folder with one of these is a run, as in `runs.find`."""
SWEEP_FILES = ("sweep.json", "server.json")
_MAX_REMOVED = 10_000
"""Ids that are remembered so that pages hear of it."""


class IndexedRow(NamedTuple):
    """A row and where it is from."""

    root: int
    row: RunRowText
    text: bytes
    """The whole row, as it is served."""
    generation: int
    """When it last changed."""
    folder: str
    """That of the run; of a run of another program, the one that it was converted into."""
    is_foreign: bool = False


class RowChanges(NamedTuple):
    """What changed since a generation."""

    generation: int
    is_complete: bool
    changed: list[bytes]
    removed: list[str]


class RunIndex:
    """The rows of all runs, for any thread."""

    def __init__(self, roots: list[Path]) -> None:
        self.roots = roots
        self.is_complete = False
        """Whether every row was compared with its folder, and changes are heard of."""
        self.needs_saving = False
        self.ask_slurm: AskSlurm | None = None
        """What to ask about jobs; None: their states are those that they last wrote."""
        self.read_foreign_row: ReadForeignRow = lambda run_id: None
        """Reads the row of another program's run, and its folder; None for one that is gone."""
        # A page keeps its generation when the server is started again: no two starts share one.
        self._first_generation = self.generation = int(time.time() * 1000)
        self._rows: dict[str, IndexedRow] = {}
        """In the order of their changes."""
        self._removed: dict[str, int] = {}
        self._sweeps: dict[int, frozenset[str]] = {}
        self._lock = threading.Lock()
        self._defaults: dict[str, Any] | None = None
        self._folders = [f"{str(root).rstrip('/')}/" for root in roots]
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
        """Return the folder of a run; NotFoundError where there is none by this id, and for one
        with files that are not to be read, such as links that lead out of its root.

        An id is looked up, and its name is one of a folder in a root: no text leads elsewhere.
        """
        row = self._rows.get(run_id)
        if row is not None and row.is_foreign:
            return Path(row.folder)
        folder = row.folder if row is not None else self._find_new_folder(run_id)
        if folder is None or os.path.islink(folder) or not is_run_folder(folder):
            raise make_missing_run_error(run_id)
        if problem := find_odd_file(folder):
            raise NotFoundError(
                f"of run {make_shown_name(os.path.basename(folder))}, {problem}",
                "the board shows what is in its folders of runs",
            )
        return Path(folder)

    def _find_new_folder(self, run_id: str) -> str | None:
        number, _, name = run_id.partition(":")
        if not number.isdecimal() or int(number) >= len(self.roots) or not is_plain_name(name):
            return None
        return os.path.join(self.roots[int(number)], name)

    def get_row(self, run_id: str) -> bytes:
        """Return the row of a run as JSON; NotFoundError where there is none."""
        row = self._rows.get(run_id)
        if row is None:
            raise make_missing_run_error(run_id)
        return row.text

    def read_again(self, run_id: str) -> bytes:
        """Read a run at once and return its row."""
        folder = self.find_folder(run_id)
        root = int(run_id.partition(":")[0])
        known = self._rows.get(run_id)
        if known is not None and known.is_foreign:
            row = self.read_foreign_row(run_id)
            self.update_foreign(root, [] if row is None else [row])
        else:
            row_text = read_row_text(str(folder), self.get_sweeps(root), self.ask_slurm)
            self.update(root, [row_text])
        return self.get_row(run_id)

    def get_changes(self, since: int) -> RowChanges | None:
        """Return what changed since a generation; None for one that is not of this index."""
        with self._lock:
            if not self._first_generation <= since <= self.generation:
                return None
            changed = []
            for row in reversed(self._rows.values()):
                if row.generation <= since:
                    break
                changed.append(row.text)
            removed = [run_id for run_id, when in self._removed.items() if when > since]
            return RowChanges(self.generation, self.is_complete, changed, removed)

    def get_sweeps(self, root: int) -> frozenset[str]:
        """Return the names of the sweeps in a root."""
        return self._sweeps.get(root, frozenset())

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
                if row.signature != UNSETTLED:
                    self.needs_saving = True
                text = row.render(root, self._prefixes[root])
                folder = f"{self._folders[root]}{row.name}"
                if known is not None and known.text == text:
                    self._rows[run_id] = IndexedRow(root, row, text, known.generation, folder)
                    continue
                self._put(run_id, IndexedRow(root, row, text, generation, folder))
                is_changed = True
            for name in removed:
                run_id = make_run_id(root, name)
                if self._rows.pop(run_id, None) is not None:
                    self._note_removal(run_id, generation)
                    self.needs_saving = is_changed = True
            if is_changed:
                self.generation = generation
            return is_changed

    def update_foreign(
        self, root: int, rows: Iterable[tuple[dict[str, Any], str]], removed: Iterable[str] = ()
    ) -> bool:
        """Take over rows of other programs' runs, each with the folder that it was converted into,
        and ids that are gone; return whether any differs. They are in no file."""
        with self._lock:
            generation = self.generation + 1
            is_changed = False
            for row, folder in rows:
                run_id, text = row["id"], encode_row(row)
                known = self._rows.get(run_id)
                if known is not None and (known.text == text or not known.is_foreign):
                    continue
                kept = RunRowText(run_id, UNSETTLED, text)
                self._put(run_id, IndexedRow(root, kept, text, generation, folder, True))
                is_changed = True
            for run_id in removed:
                if self._rows.pop(run_id, None) is not None:
                    self._note_removal(run_id, generation)
                    is_changed = True
            if is_changed:
                self.generation = generation
            return is_changed

    def _put(self, run_id: str, row: IndexedRow) -> None:
        self._rows.pop(run_id, None)  # so that it is the last one
        self._rows[run_id] = row
        self._removed.pop(run_id, None)

    def _note_removal(self, run_id: str, generation: int) -> None:
        self._removed[run_id] = generation
        if len(self._removed) > _MAX_REMOVED:
            oldest = next(iter(self._removed))
            # A page that has not heard of it has to begin anew.
            self._first_generation = max(self._first_generation, self._removed.pop(oldest))

    def add_sweep(self, root: int, name: str) -> None:
        """Note that there is a sweep of this name in a root."""
        self._sweeps[root] = self.get_sweeps(root) | {name}

    def find_differences(self, root: int) -> tuple[list[str], list[str], bool]:
        """Return the names of runs in a root that must be read, the newest first, those that are
        gone, and whether the root could be looked at; where it could not, nothing is gone."""
        with self._lock:
            known = {
                row.row.name: row.row.signature
                for row in self._rows.values()
                if row.root == root and not row.is_foreign
            }
        try:
            names, sweeps = scan_root(self.roots[root], known)
        except FileNotFoundError:
            return [], list(known), True
        except OSError:
            return [], [], False
        self._sweeps[root] = frozenset(sweeps)
        changed: list[tuple[int, str]] = []
        gone = list(known.keys() - set(names))
        for name in names:
            try:
                signature, newest_ns = compute_signature(os.path.join(self.roots[root], name))
            except OSError:
                gone += [name] if name in known else []
                continue
            if signature == UNSETTLED or known.get(name) != signature:
                changed.append((newest_ns, name))
        return [name for _, name in sorted(changed, reverse=True)], gone, True

    def list_unsettled(self, root: int) -> list[str]:
        """Return the names of the runs in a root that are active or changed just now."""
        with self._lock:
            return [
                row.row.name
                for row in self._rows.values()
                if row.root == root and row.row.signature == UNSETTLED and not row.is_foreign
            ]

    def list_names(self, root: int) -> list[str]:
        """Return the names of all runs in a root, those that changed last first."""
        with self._lock:
            rows = [r for r in self._rows.values() if r.root == root and not r.is_foreign]
        return [row.row.name for row in reversed(rows)]

    # --- files ---

    def load(self) -> bool:
        """Take over what the files of the index hold; return whether each root has one."""
        is_whole = True
        for number, root in enumerate(self.roots):
            defaults, rows = read_index_file(find_board_folder(root) / _INDEX_FILE)
            if defaults is not None and (self._defaults is None or self._defaults == defaults):
                self._defaults = defaults
                self.update(number, rows)
            else:
                is_whole = False
        self.needs_saving = False
        return is_whole

    def drop_old_defaults(self) -> bool:
        """Forget all rows if they leave out other defaults than this version has; return whether
        that was so. Pages have to begin anew."""
        defaults = get_default_settings()
        if self._defaults is None or self._defaults == defaults:
            self._defaults = defaults
            return False
        with self._lock:
            self._defaults = defaults
            self._rows = {key: row for key, row in self._rows.items() if row.is_foreign}
            self._removed.clear()
            self.generation += 1
            self._first_generation = self.generation
        return True

    def save(self) -> None:
        """Write the files of the index, if anything changed. A full disk must not end the board
        over it."""
        if not self.needs_saving:
            return
        self.needs_saving = False
        for number, root in enumerate(self.roots):
            with self._lock:
                rows = [
                    row.row
                    for row in self._rows.values()
                    if row.root == number and not row.is_foreign
                ]
            with contextlib.suppress(OSError):
                folder = find_board_folder(root)
                folder.mkdir(parents=True, exist_ok=True, mode=0o700)
                write_index_file(folder / _INDEX_FILE, get_default_settings(), rows)


def make_missing_run_error(run_id: str) -> NotFoundError:
    """Return the error for a run that is not there, or not any more."""
    return NotFoundError(f"there is no run {run_id[:200]!r}", "it may have been removed")


def is_plain_name(name: str) -> bool:
    """Return whether a name is that of something in a folder, and leads nowhere else."""
    return bool(name) and not name.startswith(".") and "/" not in name and "\0" not in name


def is_run_folder(folder: str) -> bool:
    """Return whether a folder is a run, sound or broken."""
    return any(os.path.lexists(f"{folder}/{name}") for name in RUN_FILES)


def scan_root(root: Path, known: Mapping[str, Any]) -> tuple[list[str], list[str]]:
    """Return the names of the runs in a root and of its sweeps. Links are none. Raises OSError
    where it cannot be listed."""
    names: list[str] = []
    sweeps: list[str] = []
    with os.scandir(root) as entries:
        for entry in entries:
            if entry.name.startswith(".") or not entry.is_dir(follow_symlinks=False):
                continue
            if entry.name in known or is_run_folder(entry.path):
                names.append(entry.name)
            elif any(os.path.lexists(f"{entry.path}/{file}") for file in SWEEP_FILES):
                sweeps.append(entry.name)
    return names, sweeps


# --- files of the index ---


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
    import hashlib

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
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None, []
    return header["defaults"], list(filter(None, map(_parse_line, lines)))


def _parse_line(line: bytes) -> RunRowText | None:
    rest = line[9:]
    try:
        if int(line[:8], 16) != zlib.crc32(rest):
            return None
        signature, _, text = rest.partition(b" ")
        name = find_name_text(text).decode("ascii")
        name = json.loads(f'"{name}"') if "\\" in name else name
    except ValueError:
        return None
    return RunRowText(name, signature.decode("ascii"), text)


def write_index_file(file: Path, defaults: Mapping[str, Any], rows: Iterable[RunRowText]) -> None:
    """Replace an index file."""
    from echelon.utils.files import replace_file

    lines = [json.dumps({"format": _FORMAT, "defaults": defaults}).encode()]
    for row in rows:
        if make_shown_name(row.name) == row.name:  # else the line would not say which folder it is
            rest = b"%b %b" % (row.signature.encode(), row.text)
            lines.append(b"%08x %b" % (zlib.crc32(rest), rest))
    with replace_file(file) as temporary:
        temporary.write_bytes(b"\n".join(lines) + b"\n")


def _make_folder_prefix(root: Path) -> bytes:
    shown = make_shown_name(str(root)).rstrip("/") + "/"
    return json.dumps(shown).encode()[1:-1]
