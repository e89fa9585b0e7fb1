"""Reading pyproject.toml and uv.lock.

The project's dependencies are installed, not the project itself: a job imports the project from the
copy it runs in (see `activate.py`). So the environment survives every edit that does not change a
dependency. What is missing are the project's console scripts and metadata; `-e .` in a
requirements.txt installs them, at the price of a new environment for every edit.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name

from echelon.environments import toml_files
from echelon.environments.interpreter import PythonRequest
from echelon.environments.requirements import (
    ParsedDependencies,
    RequirementLine,
    make_outside_fault,
    resolve_within,
)
from echelon.errors import EchelonError, Fault


def is_project(file: Path) -> bool:
    """Return whether a pyproject.toml declares a project.

    Many contain nothing but settings of linters. A file that cannot be parsed counts as a project,
    so that its fault is reported if it determines the environment.
    """
    try:
        content = toml_files.load_toml(file)
    except EchelonError:
        return True
    return "project" in content or "poetry" in toml_files.get_table_or_empty(content.get("tool"))


def read_pyproject(source: Path) -> tuple[ParsedDependencies, dict[str, Any]]:
    """Return the dependencies of [project], and the content of the file."""
    file = source / "pyproject.toml"
    pyproject = toml_files.load_toml(file)
    parsed = ParsedDependencies(files=[file])
    project = toml_files.get_table_or_empty(pyproject.get("project"))
    if "project" not in pyproject:
        parsed.faults.append(
            Fault(
                "pyproject.toml has its dependencies in [tool.poetry], which only Poetry reads",
                "write them to [project], or run `poetry export -o requirements.txt`",
            )
        )
    if "dependencies" in project.get("dynamic", ()):
        parsed.faults.append(
            Fault(
                "pyproject.toml has its dependencies as `dynamic`, so they are known only when "
                "the project is built",
                "list them in [project], or in a requirements.txt, which wins",
            )
        )
    for text in map(str, project.get("dependencies", ())):
        number = toml_files.find_line(file, text.partition(";")[0].strip())
        try:
            Requirement(text)
        except InvalidRequirement as error:
            what = f"pyproject.toml:{number}: {text!r} is not a requirement: {error}"
            parsed.faults.append(Fault(what.splitlines()[0], "fix the line"))
            continue
        url = text.partition("@")[2].partition(" ;")[0].strip()
        if url.startswith("file:"):
            parsed.faults.append(make_outside_fault(url, f"pyproject.toml:{number}"))
        elif "://" in url:
            parsed.urls.append((url, f"pyproject.toml:{number}"))
        parsed.requirements.append(RequirementLine(text, file, number))
    parsed.faults += _find_uv_source_faults(parsed.requirements, pyproject)
    return parsed, pyproject


def _find_uv_source_faults(
    requirements: list[RequirementLine], pyproject: dict[str, Any]
) -> Iterator[Fault]:
    """Yield a fault for each dependency that [tool.uv.sources] redirects, which only a lock file
    can follow.

    Installed by name from an index, it could be a different package.
    """
    uv = toml_files.get_table_or_empty(
        toml_files.get_table_or_empty(pyproject.get("tool")).get("uv")
    )
    sourced = {canonicalize_name(name) for name in toml_files.get_table_or_empty(uv.get("sources"))}
    for requirement in requirements:
        if requirement.name in sourced:
            yield Fault(
                f"pyproject.toml:{requirement.line_number}: [tool.uv.sources] says where "
                f"{requirement.name} comes from, which only a lock file can follow",
                "run `uv lock`: the environment is then built from uv.lock",
            )


def read_uv_lock(source: Path) -> tuple[ParsedDependencies, dict[str, Any]]:
    """Return what uv.lock installs, and the content of pyproject.toml.

    uv itself installs from its lock file; what is read here serves the cache key and the error
    messages.
    """
    lock, file = source / "uv.lock", source / "pyproject.toml"
    parsed = ParsedDependencies(files=[lock])
    if not file.is_file():
        parsed.faults.append(
            Fault("uv.lock has no pyproject.toml beside it", "restore the file, or remove uv.lock")
        )
        return parsed, {}
    parsed.files.append(file)
    pyproject = toml_files.load_toml(file)
    # uv compares its lock file with these; edits elsewhere in the file change no environment.
    project = toml_files.get_table_or_empty(pyproject.get("project"))
    asked = [project.get(name) for name in ("dependencies", "requires-python")]
    parsed.extra_key = json.dumps(
        [*asked, toml_files.get_table_or_empty(pyproject.get("tool")).get("uv")]
    )
    for package in toml_files.filter_tables(toml_files.load_toml(lock).get("package")):
        name = str(package.get("name", ""))
        number = toml_files.find_line(lock, name)
        location, origin = f"uv.lock:{number}", toml_files.get_table_or_empty(package.get("source"))
        parsed.requirements.append(RequirementLine(name, lock, number))
        parsed.urls += [
            (str(origin[k]), location) for k in ("registry", "url", "git") if k in origin
        ]
        for path in (str(origin[k]) for k in ("editable", "directory", "path") if k in origin):
            target = resolve_within(path, source)
            if target is None:
                parsed.faults.append(make_outside_fault(path, location))
            elif path != ".":  # that is the project itself
                parsed.local_paths.append(target)
    return parsed, pyproject


def read_python_requests(pyproject: dict[str, Any]) -> list[PythonRequest]:
    """Return the version of Python that requires-python asks for."""
    asked = toml_files.get_table_or_empty(pyproject.get("project")).get("requires-python")
    statement = f'pyproject.toml asks for requires-python = "{asked}"'
    return [PythonRequest(statement, "specifiers", str(asked))] if asked else []
