"""What the terminal, or the file in its place, can show: how wide, and which letters."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from typing import TextIO

from rich.console import Console

_IN_ASCII = str.maketrans({"–": "-", "—": "-", "…": "~", "×": "x", "·": "|", "└": "`", "→": ">"})


def console() -> Console:
    """Standard output, where a letter that cannot be written is a question mark and no error."""
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="replace")
    return Console(soft_wrap=True, highlight=False, markup=False, emoji=False)


def beyond_ascii(stream: TextIO, env: Mapping[str, str]) -> bool:
    """Python writes UTF-8 even under LANG=C, where a person has said that it cannot be read."""
    chosen = env.get("LC_ALL") or env.get("LANG") or ""
    own = env.get("LC_CTYPE", "")  # Python itself sets it to C.UTF-8 under LANG=C
    if chosen in ("C", "POSIX") and (env.get("LC_ALL") or own in ("", "C", "POSIX", "C.UTF-8")):
        return False
    try:
        "⣿▁│└×…".encode(stream.encoding or "ascii")
    except (UnicodeError, LookupError):
        return False
    return True


def plain(text: str) -> str:
    """As it is, or in the letters that this terminal has; never longer."""
    return text if beyond_ascii(sys.stdout, os.environ) else text.translate(_IN_ASCII)
