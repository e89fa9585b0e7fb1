"""pyproject.toml and uv.lock.

The project's dependencies are installed, not the project: a job finds its code in the copy it runs
from (see `activate`). So the environment outlives every edit that does not touch a dependency;
what is missed is the project's own console scripts and metadata (`-e .` in a requirements.txt
brings them, at the price of an environment per edit).
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name

from echelon.envs import toml
from echelon.envs.requirements import Read, Wanted, outside, within
from echelon.errors import EchelonError, Fault


def is_project(file: Path) -> bool:
    """Many a pyproject.toml holds nothing but settings of linters. One that is broken may be meant
    as a project: it is told of when it decides, and else is nobody's concern."""
    try:
        found = toml.load(file)
    except EchelonError:
        return True
    return "project" in found or "poetry" in toml.table(found.get("tool"))


def read(source: Path) -> tuple[Read, dict[str, Any]]:
    file = source / "pyproject.toml"
    pyproject = toml.load(file)
    found = Read(files=[file])
    project = toml.table(pyproject.get("project"))
    if "project" not in pyproject:
        found.faults.append(
            Fault(
                "pyproject.toml has its dependencies in [tool.poetry], which only Poetry reads",
                "write them to [project], or run `poetry export -o requirements.txt`",
            )
        )
    if "dependencies" in project.get("dynamic", ()):
        found.faults.append(
            Fault(
                "pyproject.toml has its dependencies as `dynamic`, so they are known only when "
                "the project is built",
                "list them in [project], or in a requirements.txt, which wins",
            )
        )
    for text in map(str, project.get("dependencies", ())):
        number = toml.line_of(file, text.partition(";")[0].strip())
        try:
            Requirement(text)
        except InvalidRequirement as error:
            what = f"pyproject.toml:{number}: {text!r} is no requirement: {error}"
            found.faults.append(Fault(what.splitlines()[0], "mend the line"))
            continue
        url = text.partition("@")[2].partition(" ;")[0].strip()
        if url.startswith("file:"):
            found.faults.append(outside(url, f"pyproject.toml:{number}"))
        elif "://" in url:
            found.urls.append((url, f"pyproject.toml:{number}"))
        found.wanted.append(Wanted(text, file, number))
    found.faults += _unlocked_sources(found.wanted, pyproject)
    return found, pyproject


def _unlocked_sources(wanted: list[Wanted], pyproject: dict[str, Any]) -> Iterator[Fault]:
    """An index may have something else by that name."""
    uv = toml.table(toml.table(pyproject.get("tool")).get("uv"))
    named = {canonicalize_name(name) for name in toml.table(uv.get("sources"))}
    for want in wanted:
        if want.name in named:
            yield Fault(
                f"pyproject.toml:{want.number}: [tool.uv.sources] says where {want.name} comes "
                "from, which is followed only by a lock",
                "run `uv lock`: uv.lock then decides",
            )


def read_lock(source: Path) -> tuple[Read, dict[str, Any]]:
    """uv itself installs from its lock; what is read here is for the key and for faults."""
    lock, file = source / "uv.lock", source / "pyproject.toml"
    found = Read(files=[lock])
    if not file.is_file():
        found.faults.append(
            Fault("uv.lock has no pyproject.toml beside it", "restore the file, or remove uv.lock")
        )
        return found, {}
    found.files.append(file)
    pyproject = toml.load(file)
    # What uv compares its lock with; edits elsewhere in the file change no environment.
    project = toml.table(pyproject.get("project"))
    asked = [project.get(name) for name in ("dependencies", "requires-python")]
    found.besides = json.dumps([*asked, toml.table(pyproject.get("tool")).get("uv")])
    for package in toml.tables(toml.load(lock).get("package")):
        name = str(package.get("name", ""))
        number = toml.line_of(lock, name)
        where, origin = f"uv.lock:{number}", toml.table(package.get("source"))
        found.wanted.append(Wanted(name, lock, number))
        found.urls += [(str(origin[k]), where) for k in ("registry", "url", "git") if k in origin]
        for path in (str(origin[k]) for k in ("editable", "directory", "path") if k in origin):
            target = within(path, source)
            if target is None:
                found.faults.append(outside(path, where))
            elif path != ".":  # that is the project itself
                found.local.append(target)
    return found, pyproject


def wishes(pyproject: dict[str, Any]) -> list[tuple[str, str, str]]:
    asked = toml.table(pyproject.get("project")).get("requires-python")
    said = f'pyproject.toml asks for requires-python = "{asked}"'
    return [(said, "specifiers", str(asked))] if asked else []
