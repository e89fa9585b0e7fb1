"""What the tables of runs have in common: colours of states, widths, times in few letters."""

from __future__ import annotations

from rich.console import Console

GAP = 2
UNBROKEN = 1000
"""Columns of what is no terminal: a line is then for another program, and stays whole."""
STYLES = {
    **{"running": "green", "starting": "green", "queued": "yellow", "requeued": "yellow"},
    **{"finished": "blue", "preempted": "yellow", "cancelled": "magenta"},
    **{"failed": "red", "lost": "red", "broken": "red"},
}


def columns(console: Console) -> int:
    return console.width if console.is_terminal else UNBROKEN


def cut(text: str, width: int) -> str:
    return text if len(text) <= width else text[: width - 1] + "…"


def duration(seconds: float) -> str:
    """The two largest units, or one: 42s, 7m, 3h05, 2d."""
    minutes = int(seconds) // 60
    if minutes < 1:
        return f"{max(0, int(seconds))}s"
    if minutes < 60:
        return f"{minutes}m"
    if minutes < 48 * 60:
        return f"{minutes // 60}h{minutes % 60:02}"
    return f"{minutes // (24 * 60)}d"
