"""Standard output as a place for tables and curves."""

from __future__ import annotations

import sys

from rich.console import Console


def create_console() -> Console:
    """Standard output, where a letter that cannot be written is a question mark and no error."""
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="replace")
    return Console(soft_wrap=True, highlight=False, markup=False, emoji=False)
