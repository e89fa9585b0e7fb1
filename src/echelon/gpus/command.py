"""`echelon gpus`: one reading or repeated ones, as a table, as lines or as JSON.

The command is typed often and has to start at once, so modules that only some of its options need
are imported where they are used.
"""

from __future__ import annotations

import json
import os
import pwd
import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

from echelon.errors import EchelonError, ExitCode, Fault, suggest_nearest
from echelon.gpus.availability import list_idle_gpus
from echelon.gpus.probe import GPUS_JSON_VERSION, Gpu, GpuNode, GpuProbe, node_to_dict
from echelon.gpus.processes import look_up_user_name

_FIRST_ANSWER_TIMEOUT_S = 3.0
"""How long ``--watch`` waits for other machines before it shows those that have answered."""
_INDEX = re.compile(r"[0-9]{1,4}")
"""At most four digits: a mistyped range such as 0-99999999 must not become a list."""
_MAX_LISTED = 8

ReadNodes = Callable[[], list[GpuNode]]


class GpusOptions(NamedTuple):
    """The options as they were typed."""

    users: tuple[str, ...] = ()
    gpus: tuple[int, ...] = ()
    as_json: bool = False
    interval_s: float | None = None
    """None for a single reading."""
    hosts: tuple[str, ...] = ()
    slurm: str | None = None
    """A partition; empty for the nodes of the user's jobs; None without --slurm."""
    ssh: str = "ssh"

    @property
    def is_remote(self) -> bool:
        """Whether other machines are read instead of this one."""
        return bool(self.hosts) or self.slurm is not None


def show_gpus(options: GpusOptions) -> int:
    """Print or watch the GPUs that the options select; return the exit code."""
    with _open_reader(options) as read_nodes:
        nodes = read_nodes()
        # Machines that are watched over the network may still connect.
        may_appear = options.interval_s is not None and options.is_remote
        if not any(node.gpus for node in nodes) and not may_appear:
            return _report_no_gpu(nodes, options)
        require_indices_exist(options.gpus, [len(node.gpus) for node in nodes])
        if not options.is_remote:  # the accounts of other machines are not known here
            require_known_users(options.users, nodes)
        if options.interval_s is None:
            _print_nodes(_filter_each_node(nodes, options), options)
            return ExitCode.OK
        return _watch(read_nodes, nodes, options, options.interval_s)


def show_idle_gpus(count: int | None, options: GpusOptions) -> int:
    """Print ``count`` idle GPUs of this machine, or all; return the exit code.

    Nothing is printed if there are fewer: a script would use part of what it asked for.
    """
    with _open_reader(options) as read_nodes:
        [node] = read_nodes()
    if not node.gpus:
        return _report_no_gpu([node], options)
    require_indices_exist(options.gpus, [len(node.gpus)])
    idle = list_idle_gpus(filter_node(node, (), options.gpus), os.environ)
    if len(idle) < (count or 1):
        wanted = f"{count} are wanted, but " if count else ""
        some = f"only {len(idle)} is" if len(idle) == 1 else f"only {len(idle)} are"
        found = some if idle else "none is"
        is_limited = "CUDA_VISIBLE_DEVICES" in os.environ
        among = " among those that CUDA_VISIBLE_DEVICES allows" if is_limited else ""
        print(f"{wanted}{found} idle{among}; `echelon gpus` shows who uses them", file=sys.stderr)
        return ExitCode.BUSY
    chosen = idle[:count]
    document = {"version": GPUS_JSON_VERSION, "free": chosen}
    print(json.dumps(document) if options.as_json else ",".join(chosen))
    return ExitCode.OK


# --- arguments ---


def parse_gpu_indices(text: str) -> list[int]:
    """Return the indices of ``0,2`` and ``4-7``."""
    indices: list[int] = []
    invalid = []
    for word in text.split(","):
        first, dash, last = word.strip().partition("-")
        last = last if dash else first
        if _INDEX.fullmatch(first) and _INDEX.fullmatch(last) and int(first) <= int(last):
            indices += range(int(first), int(last) + 1)
        else:
            invalid.append(word.strip())
    if invalid:
        listed = ", ".join(map(repr, invalid))
        raise EchelonError(
            Fault(f"--gpu {text}: {listed} is not an index", "give indices: --gpu 0,2 or --gpu 4-7")
        )
    return indices


def parse_host_names(text: str) -> list[str]:
    """Return the hosts of ``a,b`` without repetitions.

    A name that begins with a dash is refused: ssh would take it for an option.
    """
    names = [name.strip() for name in text.split(",")]
    invalid = [name for name in names if not name or name.startswith("-") or " " in name]
    if invalid:
        listed = ", ".join(map(repr, invalid))
        hint = "give names that ssh knows: --hosts a,b"
        raise EchelonError(Fault(f"--hosts {text}: {listed} is not a host", hint))
    return list(dict.fromkeys(names))


def get_current_user() -> str:
    """Return the name of the user who runs this command."""
    return look_up_user_name(os.getuid())


def require_indices_exist(indices: Sequence[int], counts: Sequence[int]) -> None:
    """Raise a fault for indices that no machine has; ``counts`` are the machines' GPU counts."""
    max_count = max(counts, default=0)
    missing = sorted({index for index in indices if index >= max_count})
    if missing and max_count:
        last = max_count - 1
        known = f"there are 0 to {last}" if last else "there is only 0"
        listed = ", ".join(map(str, missing[:_MAX_LISTED])) + ", …" * (len(missing) > _MAX_LISTED)
        raise EchelonError(
            Fault(f"--gpu: there is no GPU {listed} here", known),
            exit=ExitCode.NOT_FOUND,
        )


def require_known_users(users: Sequence[str], nodes: Sequence[GpuNode]) -> None:
    """Raise a fault for users without an account on this machine or a process on a GPU."""
    users_on_gpus = {
        p.user for node in nodes for gpu in node.gpus for p in gpu.list_all_processes() if p.user
    }
    unknown = [user for user in users if user not in users_on_gpus and not _has_account(user)]
    if unknown:
        known = users_on_gpus | {entry.pw_name for entry in pwd.getpwall()}
        raise EchelonError(
            *(
                Fault(f"--user {user}: there is no such user", suggest_nearest(user, known))
                for user in unknown
            ),
            exit=ExitCode.NOT_FOUND,
        )


def _has_account(user: str) -> bool:
    try:
        pwd.getpwnam(user)
    except KeyError:
        return False
    return True


# --- reading ---


@contextmanager
def _open_reader(options: GpusOptions) -> Iterator[ReadNodes]:
    """Yield a function that reads the machines of the options, as often as it is called."""
    if not options.is_remote:
        probe = GpuProbe()
        try:
            yield lambda: [probe.read_node()]
        finally:
            probe.close()
        return
    from echelon.gpus import remote

    machines = remote.list_ssh_machines(options.hosts, options.ssh)
    if options.slurm is not None:
        machines += remote.list_slurm_machines(options.slurm, get_current_user(), options.ssh)
    if options.interval_s is None:
        yield lambda: remote.read_remote_nodes(machines)
        return
    feeds = [remote.NodeFeed(machine, options.interval_s) for machine in machines]
    try:
        for feed in feeds:
            feed.wait_for_first_reading(_FIRST_ANSWER_TIMEOUT_S)
        yield lambda: [feed.get_latest() for feed in feeds]
    finally:
        for feed in feeds:
            feed.close()


def _filter_each_node(nodes: Sequence[GpuNode], options: GpusOptions) -> list[GpuNode]:
    return [filter_node(node, options.users, options.gpus) for node in nodes]


def filter_node(node: GpuNode, users: Sequence[str], indices: Sequence[int]) -> GpuNode:
    """Return the node with only these GPUs, and with users only theirs and their processes.

    An empty sequence does not filter.
    """
    gpus = [gpu for gpu in node.gpus if not indices or gpu.index in indices]
    if users:
        gpus = [_filter_processes(gpu, users) for gpu in gpus]
        gpus = [gpu for gpu in gpus if gpu.list_all_processes()]
    return node._replace(gpus=tuple(gpus))


def _filter_processes(gpu: Gpu, users: Sequence[str]) -> Gpu:
    return gpu._replace(
        processes=tuple(p for p in gpu.processes if p.user in users),
        slices=tuple(
            part._replace(processes=tuple(p for p in part.processes if p.user in users))
            for part in gpu.slices
        ),
    )


# --- printing ---


def _report_no_gpu(nodes: Sequence[GpuNode], options: GpusOptions) -> int:
    if options.as_json:
        print(_render_json(nodes, options))
    for node in nodes:
        host = f"{node.host}: " if options.is_remote else ""
        print(f"{host}no GPU: {node.fault}", file=sys.stderr)
    return ExitCode.NO_GPU


def _watch(
    read_nodes: ReadNodes, nodes: list[GpuNode], options: GpusOptions, interval_s: float
) -> int:
    """Show a reading per interval until Ctrl-C; ``nodes`` is the first."""

    def iter_readings() -> Iterator[list[GpuNode]]:
        yield _filter_each_node(nodes, options)
        due = time.monotonic()
        while True:
            # From the time that was due, not from now: readings do not drift by their own length.
            due = max(due + interval_s, time.monotonic())
            time.sleep(max(0.0, due - time.monotonic()))
            yield _filter_each_node(read_nodes(), options)

    try:
        if options.as_json or not sys.stdout.isatty():
            for reading in iter_readings():
                _print_nodes(reading, options)
            return ExitCode.OK
        from echelon.gpus.terminal import open_full_screen

        with open_full_screen() as screen:
            for reading in iter_readings():
                screen.draw(_render_for_terminal(reading, options, time.strftime("%H:%M:%S")))
    except KeyboardInterrupt:
        pass
    return ExitCode.OK


def _print_nodes(nodes: Sequence[GpuNode], options: GpusOptions) -> None:
    if options.as_json:
        print(_render_json(nodes, options), flush=True)
        return
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="replace")
    if sys.stdout.isatty():
        lines = _render_for_terminal(nodes, options)
    else:
        from echelon.gpus.formatting import render_plain_lines
        from echelon.utils.text import convert_for_terminal

        lines = [convert_for_terminal(line) for line in render_plain_lines(nodes)]
        lines = lines or [_describe_no_process(options)]
    print("\n".join(lines), flush=True)


def _render_for_terminal(
    nodes: Sequence[GpuNode], options: GpusOptions, clock: str = ""
) -> list[str]:
    # Here, as `shutil` alone takes longer to import than printing to a pipe takes.
    import shutil

    from echelon.gpus.terminal import paint_line, render_gpu_table
    from echelon.utils.text import convert_for_terminal

    width = shutil.get_terminal_size().columns
    use_colour = "NO_COLOR" not in os.environ and os.environ.get("TERM") != "dumb"
    table = render_gpu_table(nodes, width, get_current_user(), clock)
    lines = [convert_for_terminal(paint_line(line, use_colour)) for line in table]
    if any(node.gpus or node.fault for node in nodes):
        return lines
    return [*lines, _describe_no_process(options)]


def _describe_no_process(options: GpusOptions) -> str:
    return f"no process of {' or '.join(options.users)} on a GPU"


def _render_json(nodes: Sequence[GpuNode], options: GpusOptions) -> str:
    """Return one reading; with ``--watch`` on a single line."""
    document = {
        "version": GPUS_JSON_VERSION,
        "time": time.time(),
        "nodes": [node_to_dict(node) for node in nodes],
    }
    return json.dumps(document, indent=2 if options.interval_s is None else None)
