"""Reading Pipfile and Pipfile.lock.

A lock file is a list of exact versions with their hashes and is passed to uv or pip as such. pipenv
itself, which takes longer to install than most environments take to build, is needed only to make a
lock file.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from echelon.environments import toml_files
from echelon.environments.interpreter import PythonRequest
from echelon.environments.requirements import (
    ParsedDependencies,
    RequirementLine,
    make_outside_fault,
    resolve_within,
)
from echelon.errors import EchelonError, Fault

_NOT_CATEGORIES = {
    *("source", "packages", "dev-packages", "requires", "scripts", "pipfile", "pipenv"),
    *("default", "develop"),
}
"""Top-level tables of a Pipfile that are not additional package categories."""
_PYPI = {"name": "pypi", "url": "https://pypi.org/simple", "verify_ssl": True}


def read_pipfile(
    source: Path, environ: Mapping[str, str]
) -> tuple[ParsedDependencies, dict[str, Any]]:
    """Return the dependencies, from the lock file if there is one, and the Pipfile itself."""
    file, lock = source / "Pipfile", source / "Pipfile.lock"
    pipfile = toml_files.load_toml(file)
    parsed = ParsedDependencies(files=[file])
    if lock.exists():
        parsed.files.append(lock)
        locked = _load_lock(lock)
        if _is_stale(pipfile, locked):
            parsed.faults.append(
                Fault(
                    "Pipfile was changed after Pipfile.lock was made from it",
                    "run `pipenv lock` in the source folder",
                )
            )
        add_locked_packages(parsed, locked, lock, source, environ)
    else:
        _add_sources(parsed, toml_files.filter_tables(pipfile.get("source")), file, environ)
        for name, entry in toml_files.get_table_or_empty(pipfile.get("packages")).items():
            _add_local_path_or_url(parsed, name, toml_files.get_table_or_empty(entry), file, source)
            parsed.requirements.append(
                RequirementLine(name, file, toml_files.find_line(file, name))
            )
    return parsed, pipfile


def read_python_requests(pipfile: Mapping[str, Any]) -> list[PythonRequest]:
    """Return the versions of Python that the Pipfile asks for."""
    requires = toml_files.get_table_or_empty(pipfile.get("requires"))
    return [
        PythonRequest(f'Pipfile asks for {name} = "{requires[name]}"', rule, str(requires[name]))
        for name, rule in (("python_version", "minor"), ("python_full_version", "exact"))
        if name in requires
    ]


def compute_pipfile_hash(pipfile: Mapping[str, Any]) -> str:
    """Return pipenv's own hash of a Pipfile, which a lock file records of the Pipfile it was made
    from."""
    data = {
        "_meta": {
            "sources": pipfile.get("source", [_PYPI]),
            "requires": pipfile.get("requires", {}),
        },
        "default": pipfile.get("packages", {}),
        "develop": pipfile.get("dev-packages", {}),
    }
    data |= {k: v for k, v in pipfile.items() if k not in _NOT_CATEGORIES}
    content = json.dumps(data, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(content.encode()).hexdigest()


def add_locked_packages(
    parsed: ParsedDependencies,
    locked: Mapping[str, Any],
    lock: Path,
    source: Path,
    environ: Mapping[str, str],
) -> None:
    """Add the packages of a lock file as requirements, and its sources as indexes."""
    meta = toml_files.get_table_or_empty(locked.get("_meta"))
    _add_sources(parsed, toml_files.filter_tables(meta.get("sources")), lock, environ)
    packages = {
        name: toml_files.get_table_or_empty(entry)
        for name, entry in toml_files.get_table_or_empty(locked.get("default")).items()
    }
    for name, entry in packages.items():
        _add_local_path_or_url(parsed, name, entry, lock, source)
        parsed.requirements.append(
            RequirementLine(
                _format_requirement(name, entry), lock, toml_files.find_line(lock, name)
            )
        )
    # If one package has no hash, pip refuses the hashes of all others, so none is passed.
    if not all(entry.get("hashes") for entry in packages.values()):
        parsed.requirements[:] = [
            w._replace(text=w.text.partition(" --hash=")[0]) for w in parsed.requirements
        ]


def _load_lock(lock: Path) -> dict[str, Any]:
    """Return the content of a Pipfile.lock, or raise with the reason."""
    try:
        locked = json.loads(lock.read_text(encoding="utf-8-sig"))
    except (OSError, ValueError) as error:
        raise EchelonError(
            Fault(f"{lock} cannot be read: {error}", "run `pipenv lock` in the source folder")
        ) from error
    return toml_files.get_table_or_empty(locked)


def _is_stale(pipfile: Mapping[str, Any], locked: Mapping[str, Any]) -> bool:
    """Return whether the Pipfile was edited after the lock file was made."""
    recorded_hash = toml_files.get_table_or_empty(
        toml_files.get_table_or_empty(locked.get("_meta")).get("hash")
    ).get("sha256")
    return recorded_hash is not None and recorded_hash != compute_pipfile_hash(pipfile)


def _add_sources(
    parsed: ParsedDependencies,
    sources: list[dict[str, Any]],
    file: Path,
    environ: Mapping[str, str],
) -> None:
    """Add the first source as the index and the others as extra indexes, with ${VARIABLES}
    expanded: they hold passwords."""
    for number, entry in enumerate(sources):
        raw = str(entry.get("url", ""))
        url = _expand_variables(raw, environ, parsed)
        # PyPI is the default that pipenv writes: it must not override a mirror in pip's settings.
        if url.rstrip("/") == _PYPI["url"] and len(sources) == 1:
            continue
        parsed.urls.append((url, f"{file.name}:{toml_files.find_line(file, 'url')}"))
        parsed.options.append(("--extra-index-url" if number else "--index-url", url))
        if entry.get("verify_ssl") is False and "://" in url:
            host = url.partition("://")[2].partition("/")[0].rpartition("@")[2]
            parsed.options.append(("--trusted-host", host))


def _expand_variables(text: str, environ: Mapping[str, str], parsed: ParsedDependencies) -> str:
    """Return the text with $NAME and ${NAME} replaced, and record the names for the cache key."""
    for name in sorted(environ, key=len, reverse=True):
        for form in (f"${{{name}}}", f"${name}"):
            if form in text:
                parsed.variables.add(name)
                text = text.replace(form, environ[name])
    return text


def _add_local_path_or_url(
    parsed: ParsedDependencies, name: str, entry: Mapping[str, Any], file: Path, source: Path
) -> None:
    """Record a local package or a URL; add a fault if the path is outside of the source folder."""
    path = str(entry.get("path") or entry.get("file") or "")
    if not path or "://" in path:
        if path:
            parsed.urls.append((path, f"{file.name}:{toml_files.find_line(file, name)}"))
        return
    target = resolve_within(path, source)
    if target is None:
        parsed.faults.append(
            make_outside_fault(path, f"{file.name}:{toml_files.find_line(file, name)}")
        )
    else:
        parsed.local_paths.append(target)


def _format_requirement(name: str, entry: Mapping[str, Any]) -> str:
    """Return one locked package as a line of a requirements file."""
    extras = f"[{','.join(entry['extras'])}]" if entry.get("extras") else ""
    markers = f" ; {entry['markers']}" if entry.get("markers") else ""
    hashes = "".join(f" --hash={value}" for value in entry.get("hashes", ()))
    if path := entry.get("path") or entry.get("file"):
        is_url = "://" in str(path)
        requirement = (
            f"{name}{extras} @ {path}" if is_url else f"./{path}{extras}".replace("././", "./")
        )
        return requirement + markers
    for system in ("git", "hg", "svn", "bzr"):
        if repository := entry.get(system):
            subdirectory = (
                f"#subdirectory={entry['subdirectory']}" if "subdirectory" in entry else ""
            )
            ref = f"@{entry['ref']}" if entry.get("ref") else ""
            return f"{name}{extras} @ {system}+{repository}{ref}{subdirectory}{markers}"
    version = entry.get("version", "")
    return f"{name}{extras}{'' if version == '*' else version}{markers}{hashes}"
