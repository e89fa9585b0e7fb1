"""Digests of what an environment depends on. Nothing of it is written down but the digest: URLs
and variables among it hold passwords."""

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
"""What installing a project leaves in it, besides its .egg-info."""
_MAX_HASHED_BYTES = 4_000_000
"""Bytes; of a larger file in a project, which is data, size and time must do."""


class EnvironmentRequest(NamedTuple):
    """All that is known when nothing is wrong."""

    source: Path
    kind: str
    parsed: ParsedDependencies
    ignored: tuple[Path, ...]
    interpreter: Interpreter
    indexes: PackageIndexes
    builder: str
    tool: str
    """The path of uv or conda; of pip there is one in the environment."""
    environ: Mapping[str, str]


def compute_key(request: EnvironmentRequest) -> str:
    """Of what the builder is given, so that a comment or a linter's setting changes nothing."""
    hashes_whole_files = request.builder in ("pipenv", "conda") or request.kind == "uv.lock"
    contents = [
        [f.name, f.read_bytes().hex()] for f in request.parsed.files if f.name != "pyproject.toml"
    ]
    # Folders of wheels in the source count by what is in them: a copy has them elsewhere.
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
            replace(request.indexes, find_links=links).cache_key_parts(),
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
    if request.kind == "conda":
        return _hash_conda_settings(request.environ)
    return _hash_uv_settings(request.source, request.environ) if request.tool else []


def _compute_digest(parts: list[object]) -> str:
    """Short enough for a folder's name, long enough that no two environments ever share one."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:20]


def _hash_tree(path: Path) -> list[tuple[str, str]]:
    """Every file of a local project, by its content: it is installed as it is now."""
    if path.is_file():
        return [(path.name, _hash_file(path))]
    return [(os.path.relpath(file, path), _hash_file(file)) for file in sorted(_iter_files(path))]


def _hash_uv_settings(source: Path, environ: Mapping[str, str]) -> list[str]:
    """uv's own settings, which it looks for upwards from the source, and the user's."""
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
    """Its channels and mirrors, where most have them."""
    home = Path(environ.get("HOME", "/"))
    config_file = environ.get("CONDARC")
    files = [*([Path(config_file)] if config_file else []), home / ".condarc", home / ".mambarc"]
    return [_hash_file(file) for file in files if file.is_file()]


def _read_tool_uv(file: Path) -> str | None:
    try:
        table = (
            toml_files.as_table(toml_files.load_toml(file).get("tool")).get("uv")
            if file.is_file()
            else None
        )
    except EchelonError:
        return None  # a broken file above the source, which uv would pass by too
    return None if table is None else json.dumps(table, sort_keys=True, default=str)


def _iter_files(folder: Path) -> Iterator[Path]:
    for where, folders, names in os.walk(folder):
        folders[:] = [f for f in folders if not _is_product(f) and not is_ignored(Path(where, f))]
        yield from (Path(where, name) for name in names if not name.endswith(".pyc"))


def _is_product(folder_name: str) -> bool:
    return folder_name in _BUILD_FOLDERS or folder_name.endswith(".egg-info")


def _hash_file(file: Path) -> str:
    try:
        state = file.stat()
        if not stat.S_ISREG(state.st_mode):
            return ""  # a pipe would be waited for
        if state.st_size > _MAX_HASHED_BYTES:
            return f"{state.st_size} {state.st_mtime_ns}"
        return hashlib.sha256(file.read_bytes()).hexdigest()
    except OSError as error:  # a dangling link
        return str(error.errno)
