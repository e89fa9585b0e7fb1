"""`echelon gpus`: one look, or one after the other, on a screen, in lines, or as JSON."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

from echelon.errors import Exit
from echelon.gpus import choose
from echelon.gpus.look import Machine
from echelon.gpus.snapshot import VERSION, Node, to_dict

_PATIENCE_S = 3.0
"""For the first answers, before those that came are shown."""

Look = Callable[[], list[Node]]


class Wanted(NamedTuple):
    """As it was typed."""

    users: tuple[str, ...] = ()
    gpus: tuple[int, ...] = ()
    as_json: bool = False
    every_s: float | None = None
    hosts: tuple[str, ...] = ()
    slurm: str | None = None
    """A partition; empty: my jobs."""
    ssh: str = "ssh"


def show(wanted: Wanted) -> int:
    with _looking(wanted) as look:
        nodes = look()
        if not any(node.gpus for node in nodes) and not (wanted.every_s and _is_elsewhere(wanted)):
            return _no_gpu(nodes, wanted)
        choose.require_there(wanted.gpus, [len(node.gpus) for node in nodes])
        if not _is_elsewhere(wanted):  # who has an account there cannot be known here
            choose.require_known(wanted.users, nodes)
        if wanted.every_s is None:
            _print(_chosen(nodes, wanted), wanted)
            return Exit.OK
        return _watch(look, nodes, wanted, wanted.every_s)


def show_free(count: int | None, wanted: Wanted) -> int:
    """Nothing is printed where too few are idle: half of what was asked for would be used."""
    with _looking(wanted) as look:
        [node] = look()
    if not node.gpus:
        return _no_gpu([node], wanted)
    choose.require_there(wanted.gpus, [len(node.gpus)])
    found = choose.free(choose.only(node, (), wanted.gpus), os.environ)
    if len(found) < (count or 1):
        asked = f"{count} are wanted, but " if count else ""
        some = f"only {len(found)} is" if len(found) == 1 else f"only {len(found)} are"
        here = some if found else "none is"
        among = " among those that CUDA_VISIBLE_DEVICES leaves"
        among = among if "CUDA_VISIBLE_DEVICES" in os.environ else ""
        print(f"{asked}{here} idle{among}; `echelon gpus` shows who uses them", file=sys.stderr)
        return Exit.BUSY
    chosen = found[:count]
    print(json.dumps({"version": VERSION, "free": chosen}) if wanted.as_json else ",".join(chosen))
    return Exit.OK


# --- where to look ---


def _is_elsewhere(wanted: Wanted) -> bool:
    return bool(wanted.hosts) or wanted.slurm is not None


@contextmanager
def _looking(wanted: Wanted) -> Iterator[Look]:
    """A way to look, as often as one likes."""
    if not _is_elsewhere(wanted):
        machine = Machine()
        try:
            yield lambda: [machine.look()]
        finally:
            machine.close()
        return
    from echelon.gpus import elsewhere, slurm

    there = elsewhere.by_ssh(wanted.hosts, wanted.ssh)
    if wanted.slurm is not None:
        there += slurm.machines(wanted.slurm, choose.me(), wanted.ssh)
    if wanted.every_s is None:
        yield lambda: elsewhere.look_at(there)
        return
    feeds = [elsewhere.Feed(machine, wanted.every_s) for machine in there]
    try:
        for feed in feeds:
            feed.wait(_PATIENCE_S)
        yield lambda: [feed.newest() for feed in feeds]
    finally:
        for feed in feeds:
            feed.close()


def _no_gpu(nodes: Sequence[Node], wanted: Wanted) -> int:
    if wanted.as_json:
        print(_json(nodes, wanted))
    for node in nodes:
        where = f"{node.host}: " if _is_elsewhere(wanted) else ""
        print(f"{where}no GPU: {node.fault}", file=sys.stderr)
    return Exit.NO_GPU


# --- how to show it ---


def _chosen(nodes: Sequence[Node], wanted: Wanted) -> list[Node]:
    return [choose.only(node, wanted.users, wanted.gpus) for node in nodes]


def _watch(look: Look, nodes: list[Node], wanted: Wanted, every_s: float) -> int:
    """Each look at its time, however long the last one took."""
    from echelon.gpus.screen import screen

    def looks() -> Iterator[list[Node]]:
        yield _chosen(nodes, wanted)
        due = time.monotonic()
        while True:
            due = max(due + every_s, time.monotonic())
            time.sleep(max(0.0, due - time.monotonic()))
            yield _chosen(look(), wanted)

    try:
        if wanted.as_json or not sys.stdout.isatty():
            for seen in looks():
                _print(seen, wanted)
            return Exit.OK
        with screen() as drawn:
            for seen in looks():
                drawn.draw(_drawn(seen, wanted, time.strftime("%H:%M:%S")))
    except KeyboardInterrupt:
        pass
    return Exit.OK


def _print(nodes: Sequence[Node], wanted: Wanted) -> None:
    if wanted.as_json:
        print(_json(nodes, wanted), flush=True)
        return
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="replace")
    if sys.stdout.isatty():
        lines = _drawn(nodes, wanted)
    else:
        from echelon.gpus.lines import plain_lines
        from echelon.utils.text import convert_for_terminal

        lines = [*map(convert_for_terminal, plain_lines(nodes))] or _nobody(wanted)
    print("\n".join(lines), flush=True)


def _drawn(nodes: Sequence[Node], wanted: Wanted, clock: str = "") -> list[str]:
    import shutil  # takes longer to import than all lines of a pipe take

    from echelon.gpus.table import painted, table
    from echelon.utils.text import convert_for_terminal

    width = shutil.get_terminal_size().columns
    colour = "NO_COLOR" not in os.environ and os.environ.get("TERM") != "dumb"
    lines = table(nodes, width, choose.me(), clock)
    shown = [convert_for_terminal(painted(line, colour)) for line in lines]
    return shown if any(node.gpus or node.fault for node in nodes) else shown + _nobody(wanted)


def _nobody(wanted: Wanted) -> list[str]:
    return [f"no process of {' or '.join(wanted.users)} on a GPU"]


def _json(nodes: Sequence[Node], wanted: Wanted) -> str:
    """One look after the other is an object on each line."""
    told = {"version": VERSION, "time": time.time(), "nodes": [to_dict(node) for node in nodes]}
    return json.dumps(told, indent=2 if wanted.every_s is None else None)
