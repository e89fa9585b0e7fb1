"""The last composition of the same words, while nothing that it was made of has changed.

To compose a configuration, the file of the experiment is imported, and torch with it: seconds, in
which nothing is found out that was not known before. So what came of it is kept, with everything
that went into it: the words, the variables, the installed packages, and the content of every file
that was read meanwhile.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import sysconfig
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from echelon.config.defaults_files import FileDefaults
from echelon.config.schema import Config, build_config
from echelon.errors import EchelonError
from echelon.login.package_archive import compute_package_digest
from echelon.runs.trusted_code import require_trusted_file
from echelon.utils.cache_root import get_cache_root
from echelon.utils.files import read_json_object, write_json_atomically

_CHANGING_VARIABLES = ("_", "SHLVL", "OLDPWD")
"""They differ from one command to the next and decide nothing."""
_MAX_FILES = 2000
_KEPT_S = 30 * 86400.0
_SYSTEM_FOLDERS = ("/proc/", "/sys/", "/dev/", "/etc/", "/usr/", "/lib/", "/lib64/", "/bin/")


class CompositionCache:
    """What is kept of one command."""

    def __init__(
        self, words: Sequence[str], defaults: FileDefaults, environ: Mapping[str, str]
    ) -> None:
        variables = {k: v for k, v in environ.items() if k not in _CHANGING_VARIABLES}
        what = [
            list(words),
            os.getcwd(),
            sorted(variables.items()),
            [repr(defaults.launch), repr(defaults.others)],
            [sys.version, *_describe_packages()],
            compute_package_digest(),
        ]
        digest = hashlib.sha256(json.dumps(what).encode("utf-8", "surrogateescape")).hexdigest()
        self._folder = get_cache_root(environ) / "login" / "composed"
        self._file = self._folder / f"{digest[:32]}.json"
        self._began = 0.0

    def read(self) -> Config | None:
        """Return the configuration, if the same command was composed from the same files."""
        found = read_json_object(self._file)
        if found is None:
            return None
        try:
            require_trusted_file(self._file)
            if any(_digest(path) != digest for path, digest in found["files"].items()):
                return None
            return build_config(found["config"])
        except (EchelonError, KeyError, TypeError, AttributeError):
            return None

    def watch(self) -> None:
        """Begin to see which files are read."""
        self._began = time.time()
        _watch_files()

    def write(self, config: Config) -> None:
        """Keep what was composed since `watch`, unless a file has changed meanwhile."""
        files = _list_files_read()
        if len(files) > _MAX_FILES or any(_get_change_time(f) > self._began for f in files):
            return
        entry = {"config": config.to_dict(), "files": {str(f): _digest(f) for f in files}}
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            for old in self._folder.iterdir():
                if time.time() - old.stat().st_mtime > _KEPT_S:
                    old.unlink()
            write_json_atomically(self._file, entry, names_code=True)
        except OSError:  # the next command only takes longer
            return


def _describe_packages() -> list[Any]:
    """Return what changes when a package is installed or removed."""
    folders = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
    return [sys.prefix, *((f, os.stat(f).st_mtime_ns) for f in sorted(folders) if os.path.isdir(f))]


def _digest(path: str | Path) -> str:
    """Return the digest of a file's content, or of the names in a folder; empty without either."""
    try:
        if os.path.isdir(path):
            return hashlib.sha256("\0".join(sorted(os.listdir(path))).encode()).hexdigest()
        return hashlib.sha256(Path(path).read_bytes()).hexdigest()
    except (OSError, UnicodeError):
        return ""


def _get_change_time(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


# --- which files were read ---

_opened: set[str] | None = None
_is_hooked = False


def _watch_files() -> None:
    """Have Python tell of the files that are opened from now on."""
    global _opened, _is_hooked
    _opened = set()
    if not _is_hooked:  # a hook cannot be taken away again
        _is_hooked = True
        sys.addaudithook(_note_opened)


def _note_opened(event: str, arguments: tuple[Any, ...]) -> None:
    if event != "open" or _opened is None or len(_opened) > _MAX_FILES:
        return
    path, _, flags = arguments
    if isinstance(path, (str, bytes)) and not (flags or 0) & os.O_ACCMODE:
        _opened.add(os.path.abspath(os.fsdecode(path)))


def _list_files_read() -> list[Path]:
    """Return the files of users that were read or imported, and the `conf` folders beside them; no
    more are noted."""
    global _opened
    imported = {str(getattr(module, "__file__", None) or "") for module in [*sys.modules.values()]}
    found = {os.path.abspath(file) for file in imported if file} | (_opened or set())
    _opened = None
    own = (*_SYSTEM_FOLDERS, f"{sys.prefix}/", f"{sys.base_prefix}/", f"{_get_own_folder()}/")
    files = {Path(f) for f in found if not f.startswith(own) and "/__pycache__/" not in f}
    files = {file for file in files if not file.is_dir()}
    conf = {folder for file in files for folder in (file.parent / "conf").glob("**/")}
    return sorted(files | conf)


def _get_own_folder() -> str:
    """Return Echelon's own folder, whose content has a digest of its own."""
    return str(Path(__file__).parents[1])
