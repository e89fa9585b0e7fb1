"""What `echelon env show`, `echelon env build` and `echelon env clean` do and print."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path

from echelon.environments.activate import render_activation_lines
from echelon.environments.build import build_environment
from echelon.environments.build_lock import PrintLine
from echelon.environments.build_plan import EnvironmentPlan, plan_environment
from echelon.environments.cache import (
    CachedEnvironment,
    EnvironmentPaths,
    clean_cache,
    get_environments_root,
    list_cached_environments,
    require_trusted_environment,
)
from echelon.environments.requirements import format_relative_path
from echelon.errors import EchelonError, ExitCode
from echelon.utils.text import format_bytes, format_time_ago, print_to_stderr


def show_environment(source: Path, location: str, python: str, as_json: bool) -> int:
    """Print the build plan of a source folder and what the cache holds."""
    environment_plan, cached = (
        plan_environment(source, location, os.environ, python),
        list_cached_environments(os.environ),
    )
    refusal = _find_refusal(environment_plan)
    if as_json:
        print(
            json.dumps(
                environment_plan.to_dict()
                | {"ready": environment_plan.ready and not refusal}
                | {"cache": [environment.to_dict() for environment in cached]},
                indent=2,
            )
        )
        return ExitCode.OK
    for name, text in _make_plan_rows(environment_plan, refusal):
        print(f"{name:<13}{text}")
    print(f"\n{len(cached)} in the cache, {get_environments_root(os.environ)}")
    for environment in cached:
        print("  " + _format_cached_environment(environment))
    return ExitCode.OK


def make_environment(source: Path, location: str, python: str, as_json: bool, shell: bool) -> int:
    """Build the environment of a source folder.

    The folder, the plan (`--json`) or the activation lines (`--shell`) go to stdout, everything
    else to stderr.
    """
    environment_plan = plan_environment(source, location, os.environ, python)
    with _open_progress() as print_line:
        for line in list_warnings(environment_plan):
            print_line(line)
        build_environment(environment_plan, print_line)
    if shell:
        print("\n".join(render_activation_lines(environment_plan)))
    elif as_json:
        print(json.dumps(environment_plan.to_dict() | {"ready": True}, indent=2))
    else:
        print(
            environment_plan.folder
            if environment_plan.kind != "none"
            else "no environment is needed"
        )
    return ExitCode.OK


def clean_environments(older_days: float, everything: bool, dry_run: bool) -> int:
    """Remove unused environments from the cache and print what that freed."""
    freed = clean_cache(os.environ, older_days, everything, dry_run, print)
    print(f"{'would free' if dry_run else 'freed'} {format_bytes(freed)}")
    return ExitCode.OK


def list_warnings(plan: EnvironmentPlan) -> list[str]:
    """Return what is not an error but should be known before a build."""
    if not plan.ignored:
        return []
    names = ", ".join(file.name for file in plan.ignored)
    return [f"{plan.files[0].name} determines the environment; ignored: {names}"]


@contextlib.contextmanager
def _open_progress() -> Iterator[PrintLine]:
    """Yield the function that prints progress: one changing line on a terminal, every line
    elsewhere."""
    if not sys.stderr.isatty():
        yield print_to_stderr
        return
    from rich.console import Console
    from rich.markup import escape

    console = Console(stderr=True, highlight=False)
    with console.status("") as status:

        def print_line(line: str) -> None:
            if line.startswith("  "):
                status.update(escape(line.strip()[: max(20, console.width - 4)]))
            else:
                console.print(line, markup=False, soft_wrap=True)

        yield print_line


def _find_refusal(plan: EnvironmentPlan) -> str:
    """Return why an environment that is built will not be used; empty if it will."""
    if plan.ready:
        try:
            require_trusted_environment(EnvironmentPaths(plan.folder))
        except EchelonError as error:
            return error.faults[0].what
    return ""


def _make_plan_rows(plan: EnvironmentPlan, refusal: str) -> Iterator[tuple[str, str]]:
    """Yield the rows of `echelon env show` as label and text."""
    yield "source", str(plan.source)
    if plan.kind == "none":
        yield "environment", "none: the source has no dependency file"
        return
    first, *more = (format_relative_path(file, plan.source) for file in plan.files)
    yield "from", first + (f", with {', '.join(more)}" if more else "")
    if plan.ignored:
        yield "ignored", ", ".join(file.name for file in plan.ignored)
    yield "environment", str(plan.folder)
    yield "state", refusal or _describe_state(plan)
    if not plan.ready:
        for command in plan.commands:
            yield "would run", command


def _describe_state(plan: EnvironmentPlan) -> str:
    """Return whether the environment is ready, must be rebuilt or was not built yet."""
    paths = EnvironmentPaths(plan.folder)
    marker = paths.read_marker()
    if plan.ready:
        size, age = format_bytes(marker.get("bytes", 0)), format_time_ago(marker.get("made", 0.0))
        return f"ready: {size}, built {age} with {marker.get('builder')}"
    if marker:
        return "to be rebuilt: its dependencies have changed, or its Python is gone"
    failed = f"; the log of a failed build is {paths.log}" if paths.log.exists() else ""
    return f"not built yet{failed}"


def _format_cached_environment(environment: CachedEnvironment) -> str:
    """Return the line of one environment in the cache."""
    if not environment.marker:
        return f"{environment.key}  unfinished"
    files = ", ".join(environment.marker.get("files", [])) or "a tool"
    size, age = (
        format_bytes(environment.marker.get("bytes", 0)),
        format_time_ago(environment.last_used),
    )
    source = environment.marker.get("source")
    return f"{environment.key}  {size:>8}  used {age:<14}  {files} of {source}"
