"""Slack: an incoming webhook of a channel. Mattermost and Rocket.Chat take the same body."""

from __future__ import annotations

from collections.abc import Mapping

from echelon.config.schema import NotifyConfig
from echelon.errors import Fault
from echelon.notify.http_post import find_url_fault, post_json
from echelon.notify.message import Message

URL_VARIABLE = "ECHELON_SLACK_URL"


class Slack:
    """The subject in bold, and the lines."""

    name = "slack"
    secret_variables: tuple[str, ...] = (URL_VARIABLE,)

    def find_fault(self, config: NotifyConfig, env: Mapping[str, str]) -> Fault | None:
        return find_url_fault(self.name, URL_VARIABLE, env)

    def send(self, message: Message, config: NotifyConfig, env: Mapping[str, str]) -> str:
        text = f"*{_escape(message.subject).replace('*', '∗')}*\n{_escape(message.text)}"
        return post_json(env[URL_VARIABLE], {"text": text})


def _escape(text: str) -> str:
    """Return a text in which nothing is a link, a channel or everybody: <!channel>."""
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
