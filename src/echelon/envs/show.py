"""What `echelon env` prints."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from echelon.envs.activate import activation
from echelon.envs.build import build
from echelon.envs.places import Place, environments
from echelon.envs.plan import EnvPlan, plan
from echelon.envs.requirements import shown
from echelon.envs.store import Kept, clean, kept
from echelon.errors import Exit
from echelon.utils.text import format_age, format_bytes

Say = Callable[[str], None]


def show(source: Path, where: str, python: str, as_json: bool) -> int:
    planned, cached = plan(source, where, os.environ, python), kept(os.environ)
    if as_json:
        print(
            json.dumps(planned.to_dict() | {"cache": [one.to_dict() for one in cached]}, indent=2)
        )
        return Exit.OK
    for name, text in _rows(planned):
        print(f"{name:<13}{text}")
    print(f"\n{len(cached)} in the cache, {environments(os.environ)}")
    for one in cached:
        print("  " + _line(one))
    return Exit.OK


def make(source: Path, where: str, python: str, as_json: bool, shell: bool) -> int:
    """The folder, the plan or the shell lines on stdout; all else on stderr."""
    planned = plan(source, where, os.environ, python)
    with _progress() as say:
        for line in warnings(planned):
            say(line)
        build(planned, say)
    if shell:
        print("\n".join(activation(planned)))
    elif as_json:
        print(json.dumps(planned.to_dict() | {"ready": True}, indent=2))
    else:
        print(planned.folder if planned.kind != "none" else "no environment is needed")
    return Exit.OK


def sweep(older_days: float, everything: bool, dry_run: bool) -> int:
    freed = clean(os.environ, older_days, everything, dry_run, print)
    print(f"{'would free' if dry_run else 'freed'} {format_bytes(freed)}")
    return Exit.OK


def warnings(planned: EnvPlan) -> list[str]:
    """What is not wrong, but should be known before a build."""
    if not planned.ignored:
        return []
    names = ", ".join(file.name for file in planned.ignored)
    return [f"{planned.files[0].name} decides, not {names}"]


@contextlib.contextmanager
def _progress() -> Iterator[Say]:
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


def _rows(planned: EnvPlan) -> Iterator[tuple[str, str]]:
    yield "source", str(planned.source)
    if planned.kind == "none":
        yield "environment", "none: no file here asks for one"
        return
    first, *more = (shown(file, planned.source) for file in planned.files)
    yield "decided by", first + (f", with {', '.join(more)}" if more else "")
    if planned.ignored:
        yield "and not", ", ".join(file.name for file in planned.ignored)
    yield "environment", str(planned.folder)
    yield "state", _state(planned)
    if not planned.ready:
        for command in planned.commands:
            yield "would run", command


def _state(planned: EnvPlan) -> str:
    place = Place(planned.folder)
    made = place.made()
    if planned.ready:
        size, age = format_bytes(made.get("bytes", 0)), format_age(made.get("made", 0.0))
        return f"ready: {size}, built {age} with {made.get('builder')}"
    if made:
        return "to be rebuilt: what decides it has changed, or its Python is gone"
    failed = f"; the log of a failed build is {place.log}" if place.log.exists() else ""
    return f"not built yet{failed}"


def _line(one: Kept) -> str:
    if not one.made:
        return f"{one.key}  unfinished"
    files = ", ".join(one.made.get("files", [])) or "a tool"
    told = f"{format_bytes(one.made.get('bytes', 0)):>8}  used {format_age(one.used):<14}"
    return f"{one.key}  {told}  {files} of {one.made.get('source')}"
