"""The colours of all charts: pages, light and dark, and images.

Every colour has a contrast of at least 3:1 with black, with white and with the cards of the pages,
so one palette serves them all. Within that band the colours were chosen to be as different as
possible for people with and without colour blindness. More lines than colours repeat them with
other dashes.
"""

from __future__ import annotations

COLOURS = ("#166CBF", "#FF5D20", "#39A658", "#933AFF", "#C17AC4", "#B34A00", "#7A7A7A")
BLUE, ORANGE, GREEN, GREY = COLOURS[0], COLOURS[1], COLOURS[2], COLOURS[6]
WORST, BEST = "#94867A", BLUE
"""The ends of the scale from a bad result to a good one."""
DASHES: tuple[tuple[float, ...], ...] = ((1, 0), (4, 1.6), (1.4, 1.2), (5, 1.4, 1.2, 1.4))
"""Lengths on and off, in widths of the line."""


def blend_by_goodness(goodness: float) -> str:
    """Return the colour between WORST (0) and BEST (1)."""
    ends = zip(_parse_channels(WORST), _parse_channels(BEST), strict=True)
    return "#" + "".join(f"{round(bad + (good - bad) * goodness):02X}" for bad, good in ends)


def _parse_channels(colour: str) -> list[int]:
    """Return red, green and blue of `#RRGGBB`."""
    return [int(colour[i : i + 2], 16) for i in (1, 3, 5)]
