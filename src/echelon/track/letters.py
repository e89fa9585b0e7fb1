"""Which letters a stream can show, and what stands for those that it cannot."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TextIO

_IN_ASCII = str.maketrans({"–": "-", "—": "-", "…": "~", "×": "x", "·": "|", "└": "`", "→": ">"})


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
