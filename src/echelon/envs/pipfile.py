"""Pipfile and Pipfile.lock.

A lock is a list of exact versions with their hashes, and is given to uv or pip as one: pipenv,
which takes longer to fetch than most environments to build, is needed only to make a lock.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from echelon.envs import toml
from echelon.envs.requirements import Read, Wanted, outside, within
from echelon.errors import EchelonError, Fault

_NOT_CATEGORIES = {
    *("source", "packages", "dev-packages", "requires", "scripts", "pipfile", "pipenv"),
    *("default", "develop"),
}
_PYPI = {"name": "pypi", "url": "https://pypi.org/simple", "verify_ssl": True}


def read(source: Path, environ: Mapping[str, str]) -> tuple[Read, dict[str, Any]]:
    """What is wanted, from the lock where there is one; and the Pipfile itself."""
    file, lock = source / "Pipfile", source / "Pipfile.lock"
    pipfile = toml.load(file)
    found = Read(files=[file])
    if lock.exists():
        found.files.append(lock)
        locked = _load_lock(lock)
        if _stale(pipfile, locked):
            found.faults.append(
                Fault(
                    "Pipfile was changed after Pipfile.lock was made from it",
                    "run `pipenv lock` in the source folder",
                )
            )
        add_locked(found, locked, lock, source, environ)
    else:
        _add_sources(found, toml.tables(pipfile.get("source")), file, environ)
        for name, entry in toml.table(pipfile.get("packages")).items():
            _check_local(found, name, toml.table(entry), file, source)
            found.wanted.append(Wanted(name, file, toml.line_of(file, name)))
    return found, pipfile


def wishes(pipfile: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """(what is said, how it is compared, version)"""
    requires = toml.table(pipfile.get("requires"))
    return [
        (f'Pipfile asks for {name} = "{requires[name]}"', how, str(requires[name]))
        for name, how in (("python_version", "minor"), ("python_full_version", "exact"))
        if name in requires
    ]


def digest(pipfile: Mapping[str, Any]) -> str:
    """pipenv's own: a lock holds that of the Pipfile it was made from."""
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


def add_locked(
    found: Read, locked: Mapping[str, Any], lock: Path, source: Path, environ: Mapping[str, str]
) -> None:
    """The lock's packages as requirements, its sources as indexes."""
    meta = toml.table(locked.get("_meta"))
    _add_sources(found, toml.tables(meta.get("sources")), lock, environ)
    packages = {
        name: toml.table(entry) for name, entry in toml.table(locked.get("default")).items()
    }
    for name, entry in packages.items():
        _check_local(found, name, entry, lock, source)
        found.wanted.append(Wanted(_line(name, entry), lock, toml.line_of(lock, name)))
    # With one package that no hash can be given for, pip refuses the hashes of all others.
    if not all(entry.get("hashes") for entry in packages.values()):
        found.wanted[:] = [w._replace(text=w.text.partition(" --hash=")[0]) for w in found.wanted]


def _load_lock(lock: Path) -> dict[str, Any]:
    try:
        locked = json.loads(lock.read_text(encoding="utf-8-sig"))
    except (OSError, ValueError) as error:
        raise EchelonError(
            Fault(f"{lock} cannot be read: {error}", "run `pipenv lock` in the source folder")
        ) from error
    return toml.table(locked)


def _stale(pipfile: Mapping[str, Any], locked: Mapping[str, Any]) -> bool:
    said = toml.table(toml.table(locked.get("_meta")).get("hash")).get("sha256")
    return said is not None and said != digest(pipfile)


def _add_sources(
    found: Read, sources: list[dict[str, Any]], file: Path, environ: Mapping[str, str]
) -> None:
    """The first is the index, the others are added to it. Their ${VARIABLES} hold passwords."""
    for number, entry in enumerate(sources):
        raw = str(entry.get("url", ""))
        url = _expanded(raw, environ, found)
        # Pip's own mirror is not passed by for the sake of a default nobody chose.
        if url.rstrip("/") == _PYPI["url"] and len(sources) == 1:
            continue
        found.urls.append((url, f"{file.name}:{toml.line_of(file, 'url')}"))
        found.options.append(("--extra-index-url" if number else "--index-url", url))
        if entry.get("verify_ssl") is False and "://" in url:
            host = url.partition("://")[2].partition("/")[0].rpartition("@")[2]
            found.options.append(("--trusted-host", host))


def _expanded(text: str, environ: Mapping[str, str], found: Read) -> str:
    for name in sorted(environ, key=len, reverse=True):
        for form in (f"${{{name}}}", f"${name}"):
            if form in text:
                found.variables.add(name)
                text = text.replace(form, environ[name])
    return text


def _check_local(
    found: Read, name: str, entry: Mapping[str, Any], file: Path, source: Path
) -> None:
    path = str(entry.get("path") or entry.get("file") or "")
    if not path or "://" in path:
        if path:
            found.urls.append((path, f"{file.name}:{toml.line_of(file, name)}"))
        return
    target = within(path, source)
    if target is None:
        found.faults.append(outside(path, f"{file.name}:{toml.line_of(file, name)}"))
    else:
        found.local.append(target)


def _line(name: str, entry: Mapping[str, Any]) -> str:
    extras = f"[{','.join(entry['extras'])}]" if entry.get("extras") else ""
    markers = f" ; {entry['markers']}" if entry.get("markers") else ""
    hashes = "".join(f" --hash={value}" for value in entry.get("hashes", ()))
    if path := entry.get("path") or entry.get("file"):
        is_url = "://" in str(path)
        start = f"{name}{extras} @ {path}" if is_url else f"./{path}{extras}".replace("././", "./")
        return start + markers
    for system in ("git", "hg", "svn", "bzr"):
        if repository := entry.get(system):
            below = f"#subdirectory={entry['subdirectory']}" if "subdirectory" in entry else ""
            ref = f"@{entry['ref']}" if entry.get("ref") else ""
            return f"{name}{extras} @ {system}+{repository}{ref}{below}{markers}"
    version = entry.get("version", "")
    return f"{name}{extras}{'' if version == '*' else version}{markers}{hashes}"
