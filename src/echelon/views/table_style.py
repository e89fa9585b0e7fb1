"""What tables of runs have in common: colours of states, widths."""

from __future__ import annotations

from rich.console import Console

COLUMN_GAP = 2
PIPED_WIDTH = 1000
"""Columns of what is no terminal: a line is then for another program, and stays whole."""
STATE_STYLES = {
    **{"running": "green", "starting": "green", "queued": "yellow", "requeued": "yellow"},
    **{"finished": "blue", "preempted": "yellow", "cancelled": "magenta"},
    **{"failed": "red", "lost": "red", "broken": "red"},
}


def get_width(console: Console) -> int:
    """Return the columns of the terminal; output to a file or pipe is not cut."""
    return console.width if console.is_terminal else PIPED_WIDTH
