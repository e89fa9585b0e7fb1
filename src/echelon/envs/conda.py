"""conda's environment.yml."""

from __future__ import annotations

import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from echelon.envs.requirements import Read, Wanted, add_line, decoded
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
    """conda gives them to pip as they are; -r files in there decide too."""
    text = file.read_text(encoding="utf-8-sig", errors="replace")
    for line in lines:
        number = _line_of(text, line)
        if re.match(r"(-e|--editable)\b", line):
            what = f"{file.name}:{number}: {line} would link to one copy of the source for ever"
            found.faults.append(Fault(what, "leave out the -e"))
        else:
            add_line(found, line, file, number, source, environ)


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
