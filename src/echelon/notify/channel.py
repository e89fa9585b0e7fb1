"""What a way of sending is: one file, one class, behind one protocol."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from echelon.config.schema import NotifyConfig
from echelon.errors import Fault
from echelon.notify.message import Message

TRY_S = 8.0
"""How long a server may take for one message, from the first byte to the last."""


class Channel(Protocol):
    """One way on which messages are sent."""

    name: str
    """As it is typed: notify=NAME."""
    secret_variables: tuple[str, ...]
    """Environment variables whose values must appear nowhere."""

    def find_fault(self, config: NotifyConfig, env: Mapping[str, str]) -> Fault | None:
        """Return what is missing before anything could be sent; it asks no server."""

    def send(self, message: Message, config: NotifyConfig, env: Mapping[str, str]) -> str:
        """Send a message, and return where it went, in words; raise ChannelError if it did not."""


class ChannelError(Exception):
    """A message was not sent; the text says why, and to which host it should have gone."""

    def __init__(self, why: str, may_pass: bool = False) -> None:
        super().__init__(why)
        self.may_pass = may_pass
        """Whether it may work a moment later: no connection, no answer, an error of the server."""
