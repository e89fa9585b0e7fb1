"""All ways on which messages are sent, by the names that are typed."""

from __future__ import annotations

from collections.abc import Mapping

from echelon.config.schema import NotifyConfig
from echelon.errors import EchelonError
from echelon.notify.channel import Channel
from echelon.notify.desktop import Desktop
from echelon.notify.mail import Mail
from echelon.notify.slack import Slack
from echelon.notify.webhook import Webhook

_ALL: tuple[Channel, ...] = (Webhook(), Mail(), Desktop(), Slack())
CHANNELS: dict[str, Channel] = {channel.name: channel for channel in _ALL}


def require_channels(config: NotifyConfig, env: Mapping[str, str]) -> None:
    """Raise all faults of the channels of a run, before it is started. No server is asked."""
    found = (CHANNELS[name].find_fault(config, env) for name in config.to)
    if faults := [fault for fault in found if fault is not None]:
        raise EchelonError(*faults)
