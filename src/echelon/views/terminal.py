"""Standard output for tables and curves."""

from __future__ import annotations

import sys

from rich.console import Console


def create_console() -> Console:
    """Return a console on standard output, where a character that cannot be encoded becomes a
    question mark instead of an error."""
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="replace")
    return Console(soft_wrap=True, highlight=False, markup=False, emoji=False)
