"""Colours that most people with and without colour blindness can distinguish (Okabe and Ito's, less
their yellow and black, which vanish on white and on dark), then the same with other dashes."""

from __future__ import annotations

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#7A7A7A")
ON_DARK = ("#4AA8E8", "#F07B36", "#22C595", "#E39AC6", "#F2B632", "#8CCBF2", "#A8A8A8")
DASHES: tuple[tuple[float, ...], ...] = ((1, 0), (4, 1.6), (1.4, 1.2), (5, 1.4, 1.2, 1.4))
"""Lengths on and off, in widths of the line."""
