"""Sending over all chosen channels at once, within a time limit, whatever the servers do."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from echelon.config.schema import NotifyConfig
from echelon.errors import escape_controls
from echelon.notify.channel import TRY_S, Channel, ChannelError
from echelon.notify.message import Message, make_message
from echelon.notify.registry import CHANNELS

_RETRY_AFTER_S = 2.0
CLOSE_LIMIT_S = 2 * TRY_S + _RETRY_AFTER_S + 2.0
"""After so long a message is sent or was given up."""
_SECRET_NAMES = ("_KEY", "_TOKEN", "_SECRET", "_PASSWORD")
_MIN_SECRET = 8
"""A shorter part of an address is no secret, and hiding it would garble texts."""


class Delivery(NamedTuple):
    """What became of one message on one channel."""

    channel: str
    is_sent: bool
    text: str
    """Where it went, or why it did not."""


def deliver(
    message: Message, config: NotifyConfig, env: Mapping[str, str], tries: int = 2
) -> list[Delivery]:
    """Send a message over all channels that were chosen, side by side; returns what became of it,
    in at most CLOSE_LIMIT_S."""
    channels = [CHANNELS[name] for name in dict.fromkeys(config.to)]
    secrets = list_secrets(CHANNELS.values(), env)
    message = make_message(  # an error of the user's may hold what its program was given
        message.event,
        message.name,
        hide_secrets(message.subject, secrets),
        [hide_secrets(line, secrets) for line in message.lines],
        _hide_in_facts(message.facts, secrets),
    )
    threads = [_SendThread(channel, message, config, env, tries) for channel in channels]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + CLOSE_LIMIT_S
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    return [
        delivery._replace(text=escape_controls(hide_secrets(delivery.text, secrets)))
        for delivery in (thread.delivery for thread in threads)
    ]


class _SendThread(threading.Thread):
    """A thread that nobody waits for: a server may send a byte now and then for ever."""

    def __init__(
        self,
        channel: Channel,
        message: Message,
        config: NotifyConfig,
        env: Mapping[str, str],
        tries: int,
    ) -> None:
        super().__init__(daemon=True, name=f"notify {channel.name}")
        self._arguments = (channel, message, config, env)
        self._tries = tries
        self.delivery = Delivery(channel.name, False, f"no answer within {TRY_S:g} s")

    def run(self) -> None:
        channel, message, config, env = self._arguments
        for number in range(1, self._tries + 1):
            try:
                if (fault := channel.find_fault(config, env)) is not None:
                    raise ChannelError(fault.what)
                self.delivery = Delivery(channel.name, True, channel.send(message, config, env))
                return
            except ChannelError as error:
                self.delivery = Delivery(channel.name, False, str(error))
                if not error.may_pass:
                    return
            except Exception as error:  # whatever it is, it must not be silent, or show an address
                self.delivery = Delivery(channel.name, False, type(error).__name__)
                return
            if number < self._tries:
                time.sleep(_RETRY_AFTER_S)


def list_secrets(channels: Iterable[Channel], env: Mapping[str, str]) -> list[str]:
    """Return what must appear nowhere, the longest first: passwords, and of addresses all but the
    host; and every variable whose name says that it is a secret, such as WANDB_API_KEY."""
    found = {
        value
        for name, value in env.items()
        if name.upper().endswith(_SECRET_NAMES) and len(value) >= _MIN_SECRET
    }
    for channel in channels:
        for variable in channel.secret_variables:
            value = env.get(variable, "")
            found.add(value)
            if "://" in value:
                parts = urlsplit(value)
                pieces = [*parts.path.split("/"), parts.query, parts.username, parts.password]
                found |= {piece for piece in pieces if piece and len(piece) >= _MIN_SECRET}
    return sorted(found - {""}, key=len, reverse=True)


def _hide_in_facts(facts: Any, secrets: Sequence[str]) -> Any:
    if isinstance(facts, str):
        return hide_secrets(facts, secrets)
    if isinstance(facts, Mapping):
        return {key: _hide_in_facts(value, secrets) for key, value in facts.items()}
    if isinstance(facts, list | tuple):
        return [_hide_in_facts(value, secrets) for value in facts]
    return facts


def hide_secrets(text: str, secrets: Sequence[str]) -> str:
    """Return a text with stars in the place of secrets."""
    for secret in secrets:
        text = text.replace(secret, "***")
    return text


def warn_of_failures(deliveries: Sequence[Delivery], warned: set[str]) -> None:
    """Print a warning for each channel that has failed for the first time."""
    for each in deliveries:
        if not each.is_sent and each.channel not in warned:
            warned.add(each.channel)
            start = "\r\x1b[K" if sys.stderr.isatty() else ""
            print(
                f"{start}warning: notify: {each.channel}: {each.text}", file=sys.stderr, flush=True
            )
