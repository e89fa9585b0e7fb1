"""Reading conda's environment.yml, and the command that builds from it."""

from __future__ import annotations

import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from echelon.environments.requirements import (
    ParsedDependencies,
    RequirementLine,
    add_line,
    decode_text,
)
from echelon.errors import EchelonError, Fault

TOOLS = ("micromamba", "mamba", "conda")
"""The fastest first; all of them read the same file."""


def find_conda(environ: Mapping[str, str]) -> str | None:
    """Return the path of micromamba, mamba or conda, or None if none is on the PATH."""
    paths = (shutil.which(name, path=environ.get("PATH")) for name in TOOLS)
    return next((path for path in paths if path), None)


def make_missing_conda_fault() -> Fault:
    """Return the fault for an environment.yml on a machine without conda."""
    return Fault(
        "environment.yml is for conda, and none of micromamba, mamba and conda is on the PATH",
        "load the cluster's module (`module avail conda`), install micromamba or Miniforge, or "
        "write a requirements.txt, which wins",
    )


def read_environment_yml(
    file: Path, source: Path, environ: Mapping[str, str]
) -> ParsedDependencies:
    """Return the dependencies of an environment.yml, including those for pip."""
    text, content = _load_yaml(file)
    parsed = ParsedDependencies(files=[file])
    entries = content.get("dependencies")
    if not isinstance(entries, list):
        parsed.faults.append(
            Fault(f"{file.name} has no list of dependencies", "list some, e.g. `- python=3.11`")
        )
        return parsed
    for channel in content.get("channels") or ():
        parsed.urls += [(str(channel), file.name)] if "://" in str(channel) else []
    for entry in entries:
        if isinstance(entry, str):
            parsed.requirements.append(RequirementLine(entry, file, _find_line(text, entry)))
        elif isinstance(entry, dict):
            _add_pip_lines(
                parsed, [str(line) for line in entry.get("pip") or ()], file, source, environ
            )
    return parsed


def create_command(tool: str, file: Path, folder: Path) -> tuple[str, ...]:
    """Return the command that creates the environment in `folder`."""
    if Path(tool).name == "micromamba":
        return (tool, "create", "--yes", "--prefix", str(folder), "--file", str(file))
    return (tool, "env", "create", "--prefix", str(folder), "--file", str(file))


def _add_pip_lines(
    parsed: ParsedDependencies,
    lines: list[str],
    file: Path,
    source: Path,
    environ: Mapping[str, str],
) -> None:
    """Add the lines under `pip:`, which conda passes to pip as they are.

    Files that they include with -r are read too, because their content is part of the cache key.
    """
    text = file.read_text(encoding="utf-8-sig", errors="replace")
    for line in lines:
        number = _find_line(text, line)
        if re.match(r"(-e|--editable)\b", line):
            what = (
                f"{file.name}:{number}: {line} would link the environment to one copy of the source"
            )
            parsed.faults.append(Fault(what, "leave out the -e"))
        else:
            add_line(parsed, line, file, number, source, environ)


def _load_yaml(file: Path) -> tuple[str, dict[str, Any]]:
    """Return the text of the file and its content, or raise with the reason."""
    import yaml

    try:
        text = decode_text(file.read_bytes())
        content = yaml.safe_load(text)
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        reason = " ".join(str(error).split())
        raise EchelonError(Fault(f"{file} is not YAML: {reason}", "fix the file")) from error
    return text, content if isinstance(content, dict) else {}


def _find_line(text: str, entry: str) -> int:
    """Return the number of the first line that contains the entry; 1 if none does."""
    before, found, _ = text.partition(entry)
    return before.count("\n") + 1 if found else 1
