"""A webhook: the message as JSON, to an address of the user's."""

from __future__ import annotations

from collections.abc import Mapping

from echelon.config.schema import NotifyConfig
from echelon.errors import Fault
from echelon.notify.http_post import find_url_fault, post_json
from echelon.notify.message import Message

URL_VARIABLE = "ECHELON_WEBHOOK_URL"


class Webhook:
    """POST with a documented body, whose `version` says which one it is."""

    name = "webhook"
    secret_variables: tuple[str, ...] = (URL_VARIABLE,)

    def find_fault(self, config: NotifyConfig, env: Mapping[str, str]) -> Fault | None:
        return find_url_fault(self.name, URL_VARIABLE, env)

    def send(self, message: Message, config: NotifyConfig, env: Mapping[str, str]) -> str:
        return post_json(env[URL_VARIABLE], message.to_json())
