"""Messages in the output of a command that runs on another machine.

A login may print lines of its own, and so may programs, so a message is a line of JSON behind a
character that text does not contain. The text of this file is sent to machines that may lack
Echelon and may have a Python as old as 3.9: it imports the standard library alone.
"""

from __future__ import annotations

import json
import sys
from typing import Any

MARK = "\x1e"
"""ASCII's record separator: what follows it up to the end of the line is a message."""


def send_message(message: dict[str, Any]) -> None:
    """Print a message to standard output at once.

    It is a single write: srun may mix the lines of several nodes, but not within one.
    """
    sys.stdout.write(f"{MARK}{json.dumps(message)}\n")
    sys.stdout.flush()


def split_message(line: str) -> tuple[str, dict[str, Any] | None]:
    """Return a line's text, and the message behind it or None.

    A message that is cut short or is not an object counts as none: a line may be all that is left
    of a connection that was lost.
    """
    text, _, encoded = line.partition(MARK)
    if not encoded:
        return text, None
    try:
        message = json.loads(encoded)
    except ValueError:
        return text, None
    return text, message if isinstance(message, dict) else None
