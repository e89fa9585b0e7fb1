"""A message that fits a phone: a short subject and a few lines."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from typing import Any

from echelon.errors import escape_controls
from echelon.utils.text import truncate_text

BODY_VERSION = 1
"""Of what a webhook receives; raised when a field changes its meaning or goes."""
_MAX_SUBJECT, _MAX_LINE, _MAX_LINES = 78, 200, 6


@dataclass(frozen=True)
class Message:
    """What is sent. Make it with make_message(), which keeps it short and on its lines."""

    event: str
    """One of config.schema.NEWS_EVENTS, or `test`."""
    name: str
    """Of the run or the sweep."""
    subject: str
    lines: tuple[str, ...]
    facts: dict[str, Any] = field(default_factory=dict)
    """Further fields of a webhook's body."""

    @property
    def text(self) -> str:
        """The lines as one text."""
        return "\n".join(self.lines)

    def to_json(self) -> dict[str, Any]:
        """Return the body of a webhook, as `echelon notify --help` documents it."""
        return {
            "version": BODY_VERSION,
            "event": self.event,
            "run": self.name,
            "subject": self.subject,
            "lines": list(self.lines),
            "time": datetime.now(timezone.utc).isoformat(timespec="seconds"),
            "host": socket.gethostname(),
            **self.facts,
        }


def make_message(
    event: str, name: str, subject: str, lines: Sequence[str], facts: dict[str, Any] | None = None
) -> Message:
    """Return a message without what could end a header or command a terminal: names of folders
    and texts of errors are in it, and any character may be in those."""
    kept = [_flatten(line, _MAX_LINE) for line in lines if line.strip()]
    shown = tuple(kept[:_MAX_LINES])
    return Message(event, _flatten(name, 200), _flatten(subject, _MAX_SUBJECT), shown, facts or {})


def _flatten(text: str, width: int) -> str:
    return truncate_text(escape_controls(" ".join(text.split())), width)
