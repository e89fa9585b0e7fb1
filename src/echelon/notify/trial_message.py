"""`echelon notify test`: one message over the chosen channels, and what became of it."""

from __future__ import annotations

import getpass
import json
import socket
from collections.abc import Mapping

from echelon.config.schema import Config
from echelon.errors import EchelonError, ExitCode, Fault
from echelon.notify.deliver import deliver
from echelon.notify.message import make_message


def send_test_message(config: Config, env: Mapping[str, str], as_json: bool) -> int:
    """Send a test message, and print what happened on each channel; returns 0 if all took it."""
    if not config.notify.to:
        raise EchelonError(
            Fault(
                "no channel is chosen",
                "echelon notify test notify=[mail,slack], or write notify: [mail] into "
                "~/.config/echelon/echelon.yaml",
            )
        )
    host = socket.gethostname()
    lines = [f"Sent by {getpass.getuser()} from {host}.", "News of your runs will come this way."]
    message = make_message("test", "test", f"test message of echelon on {host}", lines)
    deliveries = deliver(message, config.notify, env, tries=1)
    if as_json:
        found = [each._asdict() for each in deliveries]
        print(json.dumps({"version": 1, "channels": found}, indent=2))
    else:
        width = max(len(each.channel) for each in deliveries)
        for each in deliveries:
            state = "sent to" if each.is_sent else "FAILED:"
            print(f"{each.channel:<{width}}  {state} {each.text}")
    return ExitCode.OK if all(each.is_sent for each in deliveries) else ExitCode.FAILED
