"""Text for people: sizes, durations and counts in few characters, and what a terminal can show."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping, Sequence
from typing import TextIO

_ASCII_SUBSTITUTES = str.maketrans(
    {
        **{"–": "-", "—": "-", "…": "~", "×": "x", "·": "|", "└": "`", "→": ">"},
        **{"━": "#", "─": "-", "╸": "-", "°": " ", "≥": ">"},
    }
)


def truncate_text(text: str, width: int) -> str:
    """Return the text in at most ``width`` characters; an ellipsis replaces what was cut."""
    return text if len(text) <= width else text[: width - 1] + "…"


def join_names(names: Sequence[str], max_names: int = 8) -> str:
    """Return the names with commas, or of too many the first and the last: ``r0 … r63``."""
    return ", ".join(names) if len(names) <= max_names else f"{names[0]} … {names[-1]}"


def format_count(number: int, noun: str) -> str:
    """Return ``1 step``, ``1,000 steps``."""
    return f"{number:,} {noun}" + "s" * (number != 1)


def format_bytes(size_bytes: float) -> str:
    """Return three significant digits and a decimal unit: ``512 B``, ``1.23 kB``, ``51.3 GB``."""
    value, unit = float(size_bytes), "B"
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if value < 999.5 or unit == "TB":  # 999.5 would be rounded to 1e+03
            break
        value /= 1000
    return f"{value:.3g} {unit}" if value < 999.5 else f"{value:,.0f} {unit}"


def format_duration(seconds: float) -> str:
    """Return the two largest units: ``42s``, ``1m54s``, ``3h05m``, ``2d04h``."""
    minutes, left_s = divmod(max(0, int(seconds)), 60)
    if minutes < 1:
        return f"{left_s}s"
    if minutes < 60:
        return f"{minutes}m{left_s:02}s"
    hours = minutes // 60
    if hours < 48:
        return f"{hours}h{minutes % 60:02}m"
    return f"{hours // 24}d{hours % 24:02}h"


def format_elapsed(seconds: float) -> str:
    """Return how long something took, for a sentence: ``7.7 s``, from a minute on ``1m54s``."""
    return f"{seconds:.1f} s" if seconds < 59.95 else format_duration(round(seconds))


def format_time_ago(moment: float) -> str:
    """Return how long ago a time in seconds since 1970 was: ``3 days ago``, ``just now``."""
    seconds = max(0.0, time.time() - moment)
    for unit, length_s in (("day", 86400), ("hour", 3600), ("minute", 60)):
        if seconds >= length_s:
            return f"{format_count(int(seconds // length_s), unit)} ago"
    return "just now"


def format_timestamp(moment: float) -> str:
    """Return a time in seconds since 1970 as local date and minute: ``2026-02-28 09:05``."""
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(moment))


def can_print_unicode(stream: TextIO, env: Mapping[str, str]) -> bool:
    """Return whether more than ASCII may be written to a stream.

    Its encoding does not decide alone: Python writes UTF-8 even under LANG=C, by which a person
    says that the terminal cannot show it.
    """
    chosen = env.get("LC_ALL") or env.get("LANG") or ""
    own = env.get("LC_CTYPE", "")  # Python itself sets it to C.UTF-8 under LANG=C
    if chosen in ("C", "POSIX") and (env.get("LC_ALL") or own in ("", "C", "POSIX", "C.UTF-8")):
        return False
    try:
        # What captures the output of a program that draws its own screen has no encoding.
        encoding = getattr(stream, "encoding", getattr(sys.__stdout__, "encoding", None))
        "⣿▁│└×…".encode(encoding or "ascii")
    except (UnicodeError, LookupError):
        return False
    return True


def convert_to_ascii(text: str) -> str:
    """Return the text with our signs beyond ASCII replaced by similar ones; never longer."""
    return text.translate(_ASCII_SUBSTITUTES)


def print_to_stderr(line: str) -> None:
    """Print a line for people on stderr, at once."""
    print(line, file=sys.stderr, flush=True)


def convert_for_terminal(text: str) -> str:
    """Return the text as standard output can show it: unchanged, or in ASCII; never longer."""
    return text if can_print_unicode(sys.stdout, os.environ) else convert_to_ascii(text)
