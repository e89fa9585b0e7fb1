"""A picture of a result: bars with their spread, and in red what was to be reached."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from common import Figure, Result

OUR_COLOUR, PEER_COLOUR, GOAL_COLOUR = "#1f6f8b", "#b8b8b8", "#c0392b"
OURS = ("Echelon", "echelon", "loop blocked", "loop held up", "reading", "until", "from kill")
OURS += ("drawing", "… by the first")

Panel = tuple[int, Callable[[Any], None]]
"""How many bars it has, and what draws it on an axis."""


def draw(title: str, result: Result, file: Path) -> None:
    """A machine without matplotlib leaves this to another, by --pictures."""
    try:
        import matplotlib
    except ModuleNotFoundError:
        print("no matplotlib here: draw elsewhere with --pictures", file=sys.stderr)
        return
    matplotlib.use("Agg")
    if result["benchmark"] == "order":
        plot = growth(result)
    else:
        plot = draw_stacked_panels(title, [*step_panels(result), *ratio_panels(result)])
    plot.savefig(file, dpi=120, bbox_inches="tight")


def draw_stacked_panels(title: str, panels: Sequence[Panel]) -> Any:
    from matplotlib import pyplot

    heights = [count + 0.8 for count, _ in panels]
    height = 0.42 * sum(heights) + 0.8 * len(panels)
    plot, axes = pyplot.subplots(
        len(panels),
        1,
        figsize=(9, height),
        squeeze=False,
        gridspec_kw={"height_ratios": heights, "hspace": 0.55},
    )
    for axis, (_, panel) in zip(axes.flat, panels, strict=True):
        panel(axis)
        axis.spines[["top", "right"]].set_visible(False)
    plot.subplots_adjust(top=1 - 0.7 / height)
    plot.suptitle(title, fontsize=13, fontweight="bold", y=1 - 0.05 / height, va="top")
    return plot


# --- everybody's step, on one scale -------------------------------------------------------------


def step_panels(result: Result) -> list[Panel]:
    """Contestants are so far apart that only their orders of size fit on one axis."""
    return [
        (len(named), lambda axis, at=at, named=named: step_panel(axis, at, named, result))
        for at, named in contestants(result).items()
    ]


def contestants(result: Result) -> dict[str, dict[str, Any]]:
    """By the setting they ran in, where every value is kept; one benchmark has several."""
    told = result.get("microseconds_per_step", {})
    settings = {"": told} if all(map(_is_figure, told.values())) else told
    return {at: named for at, named in settings.items() if any(map(_is_figure, named.values()))}


def _is_figure(value: Any) -> bool:
    return isinstance(value, dict) and "median" in value


def step_panel(axis: Any, at: str, named: dict[str, Any], result: Result) -> None:
    floor = named.get("floor")
    rows = [row for row in named.values() if _is_figure(row)]
    rows.sort(key=lambda row: -row["median"])
    goals = {row["what"]: row["at_most"] for row in result["figures"] if row["unit"] == "µs"}
    setting = f"{at}: " if at else ""
    for y, row in enumerate(rows):
        bar(axis, y, row, goals.get(f"{setting}{row['what']}, µs per step"))
    axis.set_xscale("log")
    lowest = min([row["min"] for row in rows] + ([floor] if floor else []))
    axis.set_xlim(lowest / 1.6, 2.2 * max(row["max"] for row in rows))
    if floor:
        axis.axvline(floor, color="#777777", ls=":", lw=1.5)
        axis.annotate(f" memory traffic alone: {floor:.3g}", (floor, len(rows) - 0.45), fontsize=8)
    axis.set_yticks(range(len(rows)), [row["what"] for row in rows], fontsize=9)
    axis.set_title(f"{setting}µs per step, logarithmic", fontsize=10, loc="left")


# --- ratios -------------------------------------------------------------------------------------


def ratio_panels(result: Result) -> list[Panel]:
    """One panel for each thing that is compared with, as its ratios share a scale."""
    shown = {name for named in contestants(result).values() for name in named}
    panels: dict[str, list[Figure]] = {}
    for row in result["figures"]:
        if not bar_label(row["what"]).startswith(tuple(shown) or (" ",)):
            panels.setdefault(panel_of(row), []).append(row)
    return [
        (len(rows), lambda axis, name=name, rows=rows: ratio_panel(axis, name, rows))
        for name, rows in panels.items()
    ]


def panel_of(row: Figure) -> str:
    subject, colon, _ = row["what"].partition(": ")
    compared = f"× {row['what'].rpartition(', × ')[2]}" if ", × " in row["what"] else row["unit"]
    return f"{subject}: {compared}" if colon else compared


def bar_label(what: str) -> str:
    text = what.partition(": ")[2] or what
    return text.rpartition(", × ")[0] or text


def ratio_panel(axis: Any, name: str, rows: Sequence[Figure]) -> None:
    for y, row in enumerate(reversed(rows)):
        bar(axis, y, {**row, "what": bar_label(row["what"])}, row["at_most"])
    axis.set_yticks(range(len(rows)), [bar_label(r["what"]) for r in reversed(rows)], fontsize=9)
    axis.set_title(f"{name}   (line: spread, red: to reach)", fontsize=10, loc="left")
    axis.set_xlim(0, 1.12 * max(max(r["max"], r["at_most"] or 0) for r in rows))


def bar(axis: Any, y: int, row: Figure, at_most: float | None) -> None:
    mine = at_most is not None or any(word in row["what"] for word in OURS)
    below, above = row["median"] - row["min"], row["max"] - row["median"]
    axis.barh(y, row["median"], 0.62, color=OUR_COLOUR if mine else PEER_COLOUR)
    axis.errorbar(row["median"], y, xerr=[[below], [above]], color="#333333", capsize=3)
    if at_most is not None:
        axis.plot([at_most] * 2, [y - 0.42, y + 0.42], color=GOAL_COLOUR, lw=2)
    axis.annotate(
        f"{row['median']:,.0f}" if row["median"] >= 1000 else f"{row['median']:.3g}",
        (row["max"], y),
        xytext=(6, 0),
        textcoords="offset points",
        va="center",
        fontsize=9,
        bbox={"boxstyle": "square,pad=0.1", "color": "white", "alpha": 0.8},
    )


# --- starting an epoch --------------------------------------------------------------------------


def growth(result: Result) -> Any:
    from matplotlib import pyplot

    plot, (time_axis, memory_axis) = pyplot.subplots(1, 2, figsize=(11, 4.2))
    for name, colour in (("echelon", OUR_COLOUR), ("DistributedSampler", "#777777")):
        rows = sorted((r for r in result["start"] if r["name"] == name), key=lambda r: r["size"])
        sizes = [row["size"] for row in rows]
        middle = [1e3 * row["seconds"]["median"] for row in rows]
        below = [m - 1e3 * r["seconds"]["least"] for m, r in zip(middle, rows, strict=True)]
        above = [1e3 * r["seconds"]["most"] - m for m, r in zip(middle, rows, strict=True)]
        time_axis.errorbar(
            sizes, middle, yerr=[below, above], marker="o", capsize=3, color=colour, label=name
        )
        memory = [max(0.01, row["megabytes"] or 0.0) for row in rows]
        memory_axis.plot(sizes, memory, marker="o", color=colour, label=name)
    for axis, what in ((time_axis, "milliseconds"), (memory_axis, "megabytes")):
        axis.axhline(1.0, color=GOAL_COLOUR, lw=1, label="to stay under at 10⁹")
        axis.set(xscale="log", yscale="log", xlabel="samples in the data set", ylabel=what)
        axis.grid(alpha=0.3)
        axis.legend(fontsize=9)
    time_axis.set_title("until the first batch is there", fontsize=10)
    memory_axis.set_title("memory it takes (0.01: none seen)", fontsize=10)
    plot.suptitle("Starting an epoch, rank 0 of 8", fontsize=13, fontweight="bold")
    return plot
