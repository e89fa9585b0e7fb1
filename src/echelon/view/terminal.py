"""What the terminal, or the file in its place, can show: how wide, and which letters."""

from __future__ import annotations

import os
import sys

from rich.console import Console

from echelon.track.letters import beyond_ascii, in_ascii


def console() -> Console:
    """Standard output, where a letter that cannot be written is a question mark and no error."""
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="replace")
    return Console(soft_wrap=True, highlight=False, markup=False, emoji=False)


def plain(text: str) -> str:
    """As it is, or in the letters that this terminal has; never longer."""
    return text if beyond_ascii(sys.stdout, os.environ) else in_ascii(text)
