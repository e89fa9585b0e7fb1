"""What `echelon env` prints."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path

from echelon.environments.activate import activation_lines
from echelon.environments.build import build_environment
from echelon.environments.build_lock import PrintLine
from echelon.environments.build_plan import EnvironmentPlan, plan_environment
from echelon.environments.cache import (
    CachedEnvironment,
    EnvironmentPaths,
    clean_cache,
    environments_root,
    list_cached,
)
from echelon.environments.requirements import format_path
from echelon.errors import Exit
from echelon.utils.text import format_age, format_bytes


def show_environment(source: Path, location: str, python: str, as_json: bool) -> int:
    environment_plan, cached = (
        plan_environment(source, location, os.environ, python),
        list_cached(os.environ),
    )
    if as_json:
        print(
            json.dumps(
                environment_plan.to_dict() | {"cache": [one.to_dict() for one in cached]}, indent=2
            )
        )
        return Exit.OK
    for name, text in _plan_rows(environment_plan):
        print(f"{name:<13}{text}")
    print(f"\n{len(cached)} in the cache, {environments_root(os.environ)}")
    for one in cached:
        print("  " + _format_cached(one))
    return Exit.OK


def make_environment(source: Path, location: str, python: str, as_json: bool, shell: bool) -> int:
    """The folder, the plan or the shell lines on stdout; all else on stderr."""
    environment_plan = plan_environment(source, location, os.environ, python)
    with _open_progress() as say:
        for line in list_warnings(environment_plan):
            say(line)
        build_environment(environment_plan, say)
    if shell:
        print("\n".join(activation_lines(environment_plan)))
    elif as_json:
        print(json.dumps(environment_plan.to_dict() | {"ready": True}, indent=2))
    else:
        print(
            environment_plan.folder
            if environment_plan.kind != "none"
            else "no environment is needed"
        )
    return Exit.OK


def clean_environments(older_days: float, everything: bool, dry_run: bool) -> int:
    freed = clean_cache(os.environ, older_days, everything, dry_run, print)
    print(f"{'would free' if dry_run else 'freed'} {format_bytes(freed)}")
    return Exit.OK


def list_warnings(plan: EnvironmentPlan) -> list[str]:
    """What is not wrong, but should be known before a build."""
    if not plan.ignored:
        return []
    names = ", ".join(file.name for file in plan.ignored)
    return [f"{plan.files[0].name} decides, not {names}"]


@contextlib.contextmanager
def _open_progress() -> Iterator[PrintLine]:
    """At a terminal one line that changes; elsewhere every line, for a log."""
    if not sys.stderr.isatty():
        yield lambda line: print(line, file=sys.stderr, flush=True)
        return
    from rich.console import Console
    from rich.markup import escape

    console = Console(stderr=True, highlight=False)
    with console.status("") as status:

        def say(line: str) -> None:
            if line.startswith("  "):
                status.update(escape(line.strip()[: max(20, console.width - 4)]))
            else:
                console.print(line, markup=False, soft_wrap=True)

        yield say


def _plan_rows(plan: EnvironmentPlan) -> Iterator[tuple[str, str]]:
    yield "source", str(plan.source)
    if plan.kind == "none":
        yield "environment", "none: no file here asks for one"
        return
    first, *more = (format_path(file, plan.source) for file in plan.files)
    yield "decided by", first + (f", with {', '.join(more)}" if more else "")
    if plan.ignored:
        yield "and not", ", ".join(file.name for file in plan.ignored)
    yield "environment", str(plan.folder)
    yield "state", _describe_state(plan)
    if not plan.ready:
        for command in plan.commands:
            yield "would run", command


def _describe_state(plan: EnvironmentPlan) -> str:
    place = EnvironmentPaths(plan.folder)
    marker = place.read_marker()
    if plan.ready:
        size, age = format_bytes(marker.get("bytes", 0)), format_age(marker.get("made", 0.0))
        return f"ready: {size}, built {age} with {marker.get('builder')}"
    if marker:
        return "to be rebuilt: what decides it has changed, or its Python is gone"
    failed = f"; the log of a failed build is {place.log}" if place.log.exists() else ""
    return f"not built yet{failed}"


def _format_cached(environment: CachedEnvironment) -> str:
    if not environment.marker:
        return f"{environment.key}  unfinished"
    files = ", ".join(environment.marker.get("files", [])) or "a tool"
    usage = f"{format_bytes(environment.marker.get('bytes', 0)):>8}  used {format_age(environment.last_used):<14}"
    return f"{environment.key}  {usage}  {files} of {environment.marker.get('source')}"
