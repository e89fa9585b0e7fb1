"""conda's environment.yml."""

from __future__ import annotations

import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from echelon.envs.requirements import Read, Wanted, decoded, shown
from echelon.envs.requirements import read as read_requirements
from echelon.errors import EchelonError, Fault

TOOLS = ("micromamba", "mamba", "conda")
"""The quickest first; all read the same file."""


def tool(environ: Mapping[str, str]) -> str | None:
    found = (shutil.which(name, path=environ.get("PATH")) for name in TOOLS)
    return next((path for path in found if path), None)


def missing() -> Fault:
    return Fault(
        "environment.yml is for conda, and none of micromamba, mamba and conda is on the PATH",
        "load the cluster's module (`module avail conda`), install micromamba or Miniforge, or "
        "write a requirements.txt, which wins",
    )


def read(file: Path, source: Path, environ: Mapping[str, str]) -> Read:
    text, said = _load(file)
    found = Read(files=[file])
    entries = said.get("dependencies")
    if not isinstance(entries, list):
        found.faults.append(
            Fault(f"{file.name} has no list of dependencies", "list some, e.g. `- python=3.11`")
        )
        return found
    for channel in said.get("channels") or ():
        found.urls += [(str(channel), file.name)] if "://" in str(channel) else []
    for entry in entries:
        if isinstance(entry, str):
            found.wanted.append(Wanted(entry, file, _line_of(text, entry)))
        elif isinstance(entry, dict):
            _add_pip(found, [str(line) for line in entry.get("pip") or ()], file, source, environ)
    return found


def command(tool: str, file: Path, folder: Path) -> tuple[str, ...]:
    if Path(tool).name == "micromamba":
        return (tool, "create", "--yes", "--prefix", str(folder), "--file", str(file))
    return (tool, "env", "create", "--prefix", str(folder), "--file", str(file))


def _add_pip(
    found: Read, lines: list[str], file: Path, source: Path, environ: Mapping[str, str]
) -> None:
    """conda gives them to pip; -r files in there decide too."""
    text = file.read_text(encoding="utf-8-sig", errors="replace")
    for line in lines:
        number = _line_of(text, line)
        if include := re.match(r"(?:-r|--requirement)[ =]*(.+)", line):
            target = source / include[1].strip()
            if not target.is_file():
                what = f"{shown(file, source)}:{number}: there is no {include[1].strip()}"
                found.faults.append(Fault(what, "make it, or edit the line"))
                continue
            more = read_requirements(target, source, environ)
            found.files += more.files
            found.wanted += more.wanted
            found.urls += more.urls
            found.local += more.local
            found.faults += more.faults
        else:
            found.wanted.append(Wanted(line, file, number))


def _load(file: Path) -> tuple[str, dict[str, Any]]:
    import yaml

    try:
        text = decoded(file.read_bytes())
        said = yaml.safe_load(text)
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        reason = " ".join(str(error).split())
        raise EchelonError(Fault(f"{file} is not YAML: {reason}", "mend the file")) from error
    return text, said if isinstance(said, dict) else {}


def _line_of(text: str, entry: str) -> int:
    before, found, _ = text.partition(entry)
    return before.count("\n") + 1 if found else 1
