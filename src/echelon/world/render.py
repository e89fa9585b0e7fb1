"""A detected world as a table to read and as JSON, for `echelon explain`."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from echelon.world.types import Detection, World

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

DITTO_MARK = '"'


def detection_to_dict(detection: Detection) -> dict[str, Any]:
    """Return the detection as plain dicts, lists, strings and numbers; a round trip through JSON
    changes nothing."""
    world = asdict(detection.world)
    world["devices"] = list(detection.world.devices)
    return {
        "world": world,
        "reasons": [asdict(reason) for reason in detection.reasons],
        "ignored": [asdict(ignored) for ignored in detection.ignored],
    }


def render_detection(detection: Detection) -> RenderableType:
    """Return the decision in a line, the table of its reasons, and what was ignored."""
    from rich.console import Group
    from rich.text import Text

    reasons = [(r.field.replace("_", " "), r.value, r.because) for r in detection.reasons]
    parts: list[RenderableType] = [
        Text(_render_headline(detection), style="bold"),
        _make_table(("field", "value", "because"), reasons),
    ]
    if not detection.world.settled:
        parts.append(Text("guesses are settled when the processes meet and tell their hosts\n"))
    if detection.ignored:
        parts.append(Text("seen and ignored", style="bold"))
        ignored = [(i.variable, i.value, i.why) for i in detection.ignored]
        parts.append(_make_table(("variable", "value", "why"), ignored))
    return Group(*parts)


def _render_headline(detection: Detection) -> str:
    """Return the decision in one line."""
    world = detection.world
    if world.size > 1:
        return _render_place(world)
    if world.source != "single process":
        return f"one process, from {world.source}"
    if detection.ignored:
        return "one process: nothing that is set makes a world"
    return "no launcher variables: one process"


def _render_place(world: World) -> str:
    """Which rank this process is, on which devices and node."""
    return (
        f"rank {world.rank} of {world.size} on {', '.join(world.devices)}, "
        f"node {world.node_rank} of {world.nodes}, from {world.source}"
    )


def _make_table(header: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> Table:
    """Return a table in which a repeated reason is a ditto mark."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, header_style="bold")
    for name in header:
        # Folding keeps long values whole: a cut host list or path cannot be copied.
        table.add_column(name, overflow="fold")
    above = ""
    for *cells, why in rows:
        # Text, not markup: a host list like n[1-3] is not markup.
        table.add_row(*map(Text, cells), Text(DITTO_MARK if why == above else why))
        above = why
    return table
