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
from echelon.gpus import selection
from echelon.gpus.probe import GpuProbe
from echelon.gpus.state import GPUS_JSON_VERSION, GpuNode, node_to_dict

_FIRST_ANSWER_TIMEOUT_S = 3.0
"""For the first answers, before those that came are shown."""

ReadNodes = Callable[[], list[GpuNode]]


class GpusOptions(NamedTuple):
    """As it was typed."""

    users: tuple[str, ...] = ()
    gpus: tuple[int, ...] = ()
    as_json: bool = False
    interval_s: float | None = None
    hosts: tuple[str, ...] = ()
    slurm: str | None = None
    """A partition; empty: my jobs."""
    ssh: str = "ssh"


def show_gpus(options: GpusOptions) -> int:
    with _open_reader(options) as look:
        nodes = look()
        if not any(node.gpus for node in nodes) and not (
            options.interval_s and _is_remote(options)
        ):
            return _report_no_gpu(nodes, options)
        selection.require_indices_exist(options.gpus, [len(node.gpus) for node in nodes])
        if not _is_remote(options):  # who has an account there cannot be known here
            selection.require_known_users(options.users, nodes)
        if options.interval_s is None:
            _print_nodes(_filter_nodes(nodes, options), options)
            return Exit.OK
        return _watch(look, nodes, options, options.interval_s)


def show_idle_gpus(count: int | None, options: GpusOptions) -> int:
    """Nothing is printed where too few are idle: half of what was asked for would be used."""
    with _open_reader(options) as look:
        [node] = look()
    if not node.gpus:
        return _report_no_gpu([node], options)
    selection.require_indices_exist(options.gpus, [len(node.gpus)])
    found = selection.list_idle_gpus(selection.filter_node(node, (), options.gpus), os.environ)
    if len(found) < (count or 1):
        asked = f"{count} are wanted, but " if count else ""
        some = f"only {len(found)} is" if len(found) == 1 else f"only {len(found)} are"
        here = some if found else "none is"
        among = " among those that CUDA_VISIBLE_DEVICES leaves"
        among = among if "CUDA_VISIBLE_DEVICES" in os.environ else ""
        print(f"{asked}{here} idle{among}; `echelon gpus` shows who uses them", file=sys.stderr)
        return Exit.BUSY
    chosen = found[:count]
    print(
        json.dumps({"version": GPUS_JSON_VERSION, "free": chosen})
        if options.as_json
        else ",".join(chosen)
    )
    return Exit.OK


# --- where to look ---


def _is_remote(options: GpusOptions) -> bool:
    return bool(options.hosts) or options.slurm is not None


@contextmanager
def _open_reader(options: GpusOptions) -> Iterator[ReadNodes]:
    """A way to look, as often as one likes."""
    if not _is_remote(options):
        machine = GpuProbe()
        try:
            yield lambda: [machine.read_node()]
        finally:
            machine.close()
        return
    from echelon.gpus import remote, slurm_nodes

    there = remote.list_ssh_machines(options.hosts, options.ssh)
    if options.slurm is not None:
        there += slurm_nodes.list_slurm_machines(
            options.slurm, selection.get_current_user(), options.ssh
        )
    if options.interval_s is None:
        yield lambda: remote.read_remote_nodes(there)
        return
    feeds = [remote.NodeFeed(machine, options.interval_s) for machine in there]
    try:
        for feed in feeds:
            feed.wait(_FIRST_ANSWER_TIMEOUT_S)
        yield lambda: [feed.get_latest() for feed in feeds]
    finally:
        for feed in feeds:
            feed.close()


def _report_no_gpu(nodes: Sequence[GpuNode], options: GpusOptions) -> int:
    if options.as_json:
        print(_render_json(nodes, options))
    for node in nodes:
        where = f"{node.host}: " if _is_remote(options) else ""
        print(f"{where}no GPU: {node.fault}", file=sys.stderr)
    return Exit.NO_GPU


# --- how to show it ---


def _filter_nodes(nodes: Sequence[GpuNode], options: GpusOptions) -> list[GpuNode]:
    return [selection.filter_node(node, options.users, options.gpus) for node in nodes]


def _watch(
    read_nodes: ReadNodes, nodes: list[GpuNode], options: GpusOptions, interval_s: float
) -> int:
    """Each look at its time, however long the last one took."""
    from echelon.gpus.screen import open_full_screen

    def looks() -> Iterator[list[GpuNode]]:
        yield _filter_nodes(nodes, options)
        due = time.monotonic()
        while True:
            due = max(due + interval_s, time.monotonic())
            time.sleep(max(0.0, due - time.monotonic()))
            yield _filter_nodes(read_nodes(), options)

    try:
        if options.as_json or not sys.stdout.isatty():
            for seen in looks():
                _print_nodes(seen, options)
            return Exit.OK
        with open_full_screen() as drawn:
            for seen in looks():
                drawn.draw(_render_for_terminal(seen, options, time.strftime("%H:%M:%S")))
    except KeyboardInterrupt:
        pass
    return Exit.OK


def _print_nodes(nodes: Sequence[GpuNode], options: GpusOptions) -> None:
    if options.as_json:
        print(_render_json(nodes, options), flush=True)
        return
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="replace")
    if sys.stdout.isatty():
        lines = _render_for_terminal(nodes, options)
    else:
        from echelon.gpus.plain_lines import render_plain_lines
        from echelon.utils.text import convert_for_terminal

        lines = [*map(convert_for_terminal, render_plain_lines(nodes))] or _render_no_process(
            options
        )
    print("\n".join(lines), flush=True)


def _render_for_terminal(
    nodes: Sequence[GpuNode], options: GpusOptions, clock: str = ""
) -> list[str]:
    import shutil  # takes longer to import than all lines of a pipe take

    from echelon.gpus.table import paint_line, render_gpu_table
    from echelon.utils.text import convert_for_terminal

    width = shutil.get_terminal_size().columns
    colour = "NO_COLOR" not in os.environ and os.environ.get("TERM") != "dumb"
    lines = render_gpu_table(nodes, width, selection.get_current_user(), clock)
    shown = [convert_for_terminal(paint_line(line, colour)) for line in lines]
    return (
        shown
        if any(node.gpus or node.fault for node in nodes)
        else shown + _render_no_process(options)
    )


def _render_no_process(options: GpusOptions) -> list[str]:
    return [f"no process of {' or '.join(options.users)} on a GPU"]


def _render_json(nodes: Sequence[GpuNode], options: GpusOptions) -> str:
    """One look after the other is an object on each line."""
    document = {
        "version": GPUS_JSON_VERSION,
        "time": time.time(),
        "nodes": [node_to_dict(node) for node in nodes],
    }
    return json.dumps(document, indent=2 if options.interval_s is None else None)
