"""The cache key of an environment: a digest of everything that determines what is installed.

Two sources with the same key share one environment. Only the digest is stored, because the URLs and
variables that go into it may contain passwords.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from echelon.environments import toml_files
from echelon.environments.interpreter import Interpreter
from echelon.environments.package_indexes import PackageIndexes
from echelon.environments.requirements import ParsedDependencies
from echelon.errors import EchelonError
from echelon.utils.ignore import is_ignored

_BUILD_FOLDERS = {"build", "dist"}
"""What installing a project leaves in its folder, besides `*.egg-info`."""
_MAX_HASHED_BYTES = 4_000_000
"""A larger file in a project is data: its size and modification time stand for its content."""


class EnvironmentRequest(NamedTuple):
    """Everything known about an environment once its files were read and found valid."""

    source: Path
    kind: str
    parsed: ParsedDependencies
    ignored: tuple[Path, ...]
    interpreter: Interpreter
    indexes: PackageIndexes
    builder: str
    tool: str
    """The path of uv or conda; empty if pip installs, which the environment has itself."""
    environ: Mapping[str, str]


def compute_key(request: EnvironmentRequest) -> str:
    """Return the cache key.

    It is computed from what the builder is given, not from the files themselves, so that a comment
    or a linter's setting in them changes nothing. The order and form of the parts are fixed:
    another key would rebuild every environment.
    """
    hashes_whole_files = request.builder in ("pipenv", "conda") or request.kind == "uv.lock"
    contents = [
        [f.name, f.read_bytes().hex()] for f in request.parsed.files if f.name != "pyproject.toml"
    ]
    # Wheel folders inside the source count by their content: a copy has them at another path.
    local_uris = {path.as_uri() for path in request.parsed.local_paths}
    links = tuple(link for link in request.indexes.find_links if link not in local_uris)
    python = [request.interpreter.platform, request.interpreter.machine, request.interpreter.libc]
    if request.kind != "conda":
        python += [
            request.interpreter.version,
            request.interpreter.build,
            request.interpreter.implementation,
            request.interpreter.base,
        ]
    return _compute_digest(
        [
            *(2, request.kind, request.builder, bool(request.tool), python),
            replace(request.indexes, find_links=links).list_cache_key_parts(),
            [w.text for w in request.parsed.requirements],
            [w.text for w in request.parsed.constraints],
            contents if hashes_whole_files else [],
            request.parsed.extra_key,
            [_hash_tree(path) for path in request.parsed.local_paths],
            [request.environ.get(name, "") for name in sorted(request.parsed.variables)],
            [f.read_bytes().hex() for f in map(Path, request.indexes.constraint) if f.is_file()],
            _hash_tool_settings(request),
        ]
    )


def _hash_tool_settings(request: EnvironmentRequest) -> list[str]:
    """Return digests of the settings files of uv or conda that change what is installed."""
    if request.kind == "conda":
        return _hash_conda_settings(request.environ)
    return _hash_uv_settings(request.source, request.environ) if request.tool else []


def _compute_digest(parts: list[object]) -> str:
    """Return a digest that is short enough for a folder name, yet too long for collisions."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:20]


def _hash_tree(path: Path) -> list[tuple[str, str]]:
    """Return name and digest of every file of a local project, which is installed as it is now."""
    if path.is_file():
        return [(path.name, _hash_file(path))]
    return [(os.path.relpath(file, path), _hash_file(file)) for file in sorted(_iter_files(path))]


def _hash_uv_settings(source: Path, environ: Mapping[str, str]) -> list[str]:
    """Return digests of uv's settings: the user's, and the nearest above the source folder."""
    home = Path(environ.get("XDG_CONFIG_HOME") or Path(environ.get("HOME", "/"), ".config"))
    config_file = environ.get("UV_CONFIG_FILE")
    files = [
        home / "uv" / "uv.toml",
        Path("/etc/uv/uv.toml"),
        *([Path(config_file)] if config_file else []),
    ]
    digests = [_hash_file(file) for file in files if file.is_file()]
    for folder in (source, *source.parents):
        if (folder / "uv.toml").is_file():
            return [*digests, _hash_file(folder / "uv.toml")]
        if (settings := _read_tool_uv(folder / "pyproject.toml")) is not None:
            return [*digests, settings]
    return digests


def _hash_conda_settings(environ: Mapping[str, str]) -> list[str]:
    """Return digests of .condarc and .mambarc, which name channels and mirrors."""
    home = Path(environ.get("HOME", "/"))
    config_file = environ.get("CONDARC")
    files = [*([Path(config_file)] if config_file else []), home / ".condarc", home / ".mambarc"]
    return [_hash_file(file) for file in files if file.is_file()]


def _read_tool_uv(file: Path) -> str | None:
    """Return the table [tool.uv] of a pyproject.toml as text, or None if there is none."""
    try:
        table = (
            toml_files.get_table_or_empty(toml_files.load_toml(file).get("tool")).get("uv")
            if file.is_file()
            else None
        )
    except EchelonError:
        return None  # a broken file above the source: uv ignores it too
    return None if table is None else json.dumps(table, sort_keys=True, default=str)


def _iter_files(folder: Path) -> Iterator[Path]:
    """Yield the files of a project, without caches and build products."""
    for parent, folders, names in os.walk(folder):
        folders[:] = [f for f in folders if not _is_product(f) and not is_ignored(Path(parent, f))]
        yield from (Path(parent, name) for name in names if not name.endswith(".pyc"))


def _is_product(folder_name: str) -> bool:
    """Return whether a folder is left behind by building the project."""
    return folder_name in _BUILD_FOLDERS or folder_name.endswith(".egg-info")


def _hash_file(file: Path) -> str:
    """Return a digest of the content, or a stand-in for what cannot or should not be read."""
    try:
        state = file.stat()
        if not stat.S_ISREG(state.st_mode):
            return ""  # reading a named pipe would block
        if state.st_size > _MAX_HASHED_BYTES:
            return f"{state.st_size} {state.st_mtime_ns}"
        return hashlib.sha256(file.read_bytes()).hexdigest()
    except OSError as error:  # a dangling link
        return str(error.errno)
