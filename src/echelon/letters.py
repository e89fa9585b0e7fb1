"""What fits a line: texts cut to a width, times in few letters, and which letters can be read."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from typing import TextIO

_IN_ASCII = str.maketrans(
    {
        **{"–": "-", "—": "-", "…": "~", "×": "x", "·": "|", "└": "`", "→": ">"},
        **{"━": "#", "─": "-", "╸": "-", "°": " ", "≥": ">"},
    }
)


def cut(text: str, width: int) -> str:
    return text if len(text) <= width else text[: width - 1] + "…"


def spread(names: Sequence[str], most: int = 8) -> str:
    """All of them, or where they begin and end."""
    return ", ".join(names) if len(names) <= most else f"{names[0]} … {names[-1]}"


def counted(number: int, what: str) -> str:
    """1 step, 1,000 steps."""
    return f"{number:,} {what}" + "s" * (number != 1)


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


def in_ascii(text: str) -> str:
    """Never longer."""
    return text.translate(_IN_ASCII)


def plain(text: str) -> str:
    """As it is, or in the letters that this terminal has; never longer."""
    return text if beyond_ascii(sys.stdout, os.environ) else in_ascii(text)
