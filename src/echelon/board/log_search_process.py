"""Searches logs, in a process of its own: a regular expression may take for ever, and Python cannot
interrupt it. `log_search.py` starts this file by its path; it imports nothing but the standard
library.

It reads one line of JSON: ``{"pattern", "is_regex", "keeps_case", "limit", "time_limit_s",
"files": [{"handle", "start", "end", "line"}]}``, where ``start`` to ``end`` are the bytes of whole
lines to search, and ``line`` is the number of the first of them. It prints ``FILE LINE`` for each
line that matches, up to the limit; ``fault TEXT`` for a pattern that is wrong; and at its end
``count N`` with the number of all that match.
"""

from __future__ import annotations

import json
import os
import re
import resource
import signal
import sys
from collections.abc import Callable, Iterator
from typing import Any

_BLOCK_BYTES = 4 << 20
"""A longer line is searched in pieces."""
_MEMORY_BYTES = 1 << 30
_ESCAPE = re.compile(rb"\x1b(?:\[[0-9;:?]*[ -/]*[@-~]|\][^\x07\x1b\n]*(?:\x07|\x1b\\)|[@-Z\\^_])")
"""Colours and their like, which stand between letters that a person sees side by side."""

Find = Callable[[Any, int, int], int]
"""From a text and two positions to where the pattern is found between them; -1: nowhere."""


def main() -> None:
    request = json.loads(sys.stdin.readline())
    # The signal's default ends the process also while the matcher runs, unlike a handler.
    signal.setitimer(signal.ITIMER_REAL, request["time_limit_s"])
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))
    os.nice(10)
    try:
        prepare, find = make_matcher(request["pattern"], request["is_regex"], request["keeps_case"])
    except (re.error, OverflowError, RecursionError, MemoryError) as error:
        print("fault", " ".join(str(error).split()), flush=True)
        return
    left, count = request["limit"], 0
    # In turns, so that the first matches are not all of the first log.
    searches = {
        index: search_file(file, prepare, find) for index, file in enumerate(request["files"])
    }
    while searches:
        for index, search in list(searches.items()):
            lines = next(search, None)
            if lines is None:
                del searches[index]
                continue
            count += len(lines)
            shown, left = lines[:left], max(0, left - len(lines))
            sys.stdout.write("".join(f"{index} {line}\n" for line in shown))
        sys.stdout.flush()
    print("count", count, flush=True)


def make_matcher(
    pattern: str, is_regex: bool, keeps_case: bool
) -> tuple[Callable[[bytes], Any], Find]:
    """Return what makes a searchable text of bytes, and what finds the pattern in it.

    A pattern of ASCII is searched in the bytes as they are, which is several times as fast.
    """
    is_ascii = pattern.isascii()
    if is_regex:
        flags = re.MULTILINE | (0 if keeps_case else re.IGNORECASE)
        compiled: Any = re.compile(pattern.encode() if is_ascii else pattern, flags)

        def find(text: Any, start: int, end: int) -> int:
            match = compiled.search(text, start, end)
            return -1 if match is None else match.start()

        return (lambda text: text) if is_ascii else _decode, find
    needle: Any = pattern.encode() if is_ascii else pattern
    needle = needle if keeps_case else needle.lower()

    def find_text(text: Any, start: int, end: int) -> int:
        return int(text.find(needle, start, end))

    if keeps_case:
        return (lambda text: text) if is_ascii else _decode, find_text
    return (lambda text: text.lower()) if is_ascii else lambda text: _decode(
        text
    ).lower(), find_text


def _decode(text: bytes) -> str:
    return text.decode(errors="replace")


def search_file(
    file: dict[str, int], prepare: Callable[[bytes], Any], find: Find
) -> Iterator[list[int]]:
    """Yield for each block of a file the numbers of the lines that match."""
    line, last = file["line"], -1
    for block in _read_blocks(file["handle"], file["start"], file["end"]):
        found = []
        text = prepare(_ESCAPE.sub(b"", block) if b"\x1b" in block else block)
        for number in find_lines(text, find):
            if line + number != last:  # the second piece of a long line
                last = line + number
                found.append(last)
        line += block.count(b"\n")
        yield found


def find_lines(text: Any, find: Find) -> Iterator[int]:
    """Yield the numbers of the lines of a text in which something is found, each once."""
    newline = b"\n" if isinstance(text, bytes) else "\n"
    number = counted = position = 0
    while position < len(text):
        at = find(text, position, len(text))
        if at < 0 or at >= len(text):
            return
        start = text.rfind(newline, 0, at) + 1
        end = text.find(newline, at)
        end = len(text) if end < 0 else end
        position = end + 1
        # What was found may reach over the end of its line, as with `\s+`.
        if find(text, start, end) >= 0:
            number += text.count(newline, counted, start)
            counted = start
            yield number


def _read_blocks(handle: int, start: int, end: int) -> Iterator[bytes]:
    """Yield the bytes of a file in blocks that end with a line, if the line is not too long."""
    while start < end:
        block = os.pread(handle, min(_BLOCK_BYTES, end - start), start)
        if not block:
            return
        cut = block.rfind(b"\n") + 1
        block = block[:cut] if cut and start + len(block) < end else block
        start += len(block)
        yield block


if __name__ == "__main__":
    main()
