"""Why a build failed: the package, the line that required it and the cause, found in the log."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from packaging.utils import canonicalize_name

from echelon.environments.package_indexes import hide_passwords
from echelon.environments.requirements import RequirementLine
from echelon.errors import Fault

_NAME = r"[`'\"]?([A-Za-z0-9][A-Za-z0-9._-]*)(?!\S*://)"
"""A package name; not one that a URL follows, as in the middle of an address."""
_PACKAGE_PATTERNS = [
    re.compile(pattern.replace("NAME", _NAME))
    for pattern in (
        # pip
        r"No matching distribution found for NAME",
        r"Could not find a version that satisfies the requirement NAME",
        r"Failed (?:to build|building wheel for) NAME",
        r"Could not build wheels for NAME",
        r"Package NAME requires a different Python",
        r"(?m)^\s+╰─> NAME\s*$",
        r"Cannot install (?:.*? and )?NAME\S* because",
        r"(?s)DO NOT MATCH THE HASHES.*?\n\s+NAME",
        # uv
        r"Because NAME was not found",
        r"there (?:is|are) no versions? of NAME",
        r"[Bb]ecause only NAME",
        r"(?:Failed to (?:build|download|fetch|prepare|install):?|Hash mismatch for) NAME",
        r"you require NAME",
        r"(?:Distribution not found at|Failed to fetch): \S*/([\w.]+?)-\d",
        # conda, mamba
        r"(?s)ResolvePackageNotFound:\s+- NAME",
        r"(?s)PackagesNotFoundError:.*?\n\s+- (?:\S+::)?NAME",
        r"nothing provides (?:requested )?NAME",
        r"(?m)^\W*NAME\b.* does not exist",
    )
]
"""How pip, uv and conda name the package that they could not provide."""
_LAST_ATTEMPT = re.compile(rf"(?m)^\s*(?:Collecting|Processing|Building wheel for) (?:\./)?{_NAME}")
"""What pip was working on; the last of these is the next best guess."""
_KNOWN_CAUSES = {
    "No space left on device": "no space is left on the disk",
    "Disk quota exceeded": "your disk quota is used up",
    "ensurepip is not available": "this Python has no ensurepip (Debian: install python3-venv)",
    "needs to be updated, but `--locked`": "uv.lock does not fit pyproject.toml any more; run "
    "`uv lock`",
}
"""Text in the log, and what it means; none of these is the fault of a package."""
_CONNECTION_ERROR = re.compile(
    r"(?i)temporary failure in name resolution|connection refused|connection timed out|"
    r"network is unreachable|dns error|error sending request"
)


def explain_build_failure(
    log: str, requirements: Iterable[RequirementLine], source: Path, log_file: Path, tail: int = 12
) -> list[Fault]:
    """Return one fault with the package, the requirement's location, the cause and the end of the
    log."""
    lines = [line for line in log.splitlines() if line.strip() and not line.startswith("$ ")]
    end = "\n".join(f"    {line.rstrip()}" for line in lines[-tail:])
    # A full disk is not the fault of the package that happened to be next.
    location = (
        ""
        if any(text in log for text in _KNOWN_CAUSES)
        else _locate_requirement(log, list(requirements), source)
    )
    return [
        Fault(
            f"the environment could not be built{location}{_find_cause(log)}; "
            f"the last lines of its output:\n{end}",
            f"read the whole log: {log_file}",
        )
    ]


def find_failed_packages(log: str) -> list[str]:
    """Return canonical names of packages that could not be installed, the likeliest first."""
    found = [name for pattern in _PACKAGE_PATTERNS for name in pattern.findall(log)]
    if not found and (attempts := _LAST_ATTEMPT.findall(log)):
        found = attempts[-1:]
    bare = (re.sub(r"-\d[\w.]*(\.tar\.gz|\.zip|-.*\.whl)$", "", name) for name in found)
    return list(dict.fromkeys(canonicalize_name(name.rstrip(".")) for name in bare))


def _locate_requirement(log: str, requirements: list[RequirementLine], source: Path) -> str:
    """Return which requirement failed and where it is written; empty if the log does not tell."""
    names = find_failed_packages(log)
    for name in names:
        for requirement in requirements:
            if requirement.name == name:
                text = hide_passwords(requirement.text.partition(" --hash=")[0])
                return f": {text} ({requirement.format_location(source)})"
    return f": {names[0]}, which another package needs" if names else ""


def _find_cause(log: str) -> str:
    """Return the known cause that the log shows, as the end of a sentence."""
    for text, cause in _KNOWN_CAUSES.items():
        if text in log:
            return f", as {cause}"
    return ", as the index could not be reached" if _CONNECTION_ERROR.search(log) else ""
