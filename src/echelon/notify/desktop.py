"""The desktop of this machine, by the program notify-send."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Mapping

from echelon.config.schema import NotifyConfig
from echelon.errors import Fault
from echelon.notify.channel import TRY_S, ChannelError
from echelon.notify.message import Message

_PROGRAM = "notify-send"
_SESSION_VARIABLES = ("DISPLAY", "WAYLAND_DISPLAY")


class Desktop:
    """A bubble on the screen, where a person is logged in."""

    name = "desktop"
    secret_variables: tuple[str, ...] = ()

    def find_fault(self, config: NotifyConfig, env: Mapping[str, str]) -> Fault | None:
        if not any(env.get(name) for name in _SESSION_VARIABLES):
            return Fault(
                "notify has desktop, but there is no desktop session here "
                f"({' and '.join(_SESSION_VARIABLES)} are not set)",
                "choose another of webhook, mail, slack",
            )
        if shutil.which(_PROGRAM, path=env.get("PATH")) is None:
            return Fault(
                f"notify has desktop, but {_PROGRAM} is not installed",
                "apt install libnotify-bin, or choose another of webhook, mail, slack",
            )
        return None

    def send(self, message: Message, config: NotifyConfig, env: Mapping[str, str]) -> str:
        words = [_PROGRAM, "--app-name=echelon", "--", message.subject, message.text]
        try:
            done = subprocess.run(
                words,
                env=dict(env),
                capture_output=True,
                encoding="utf-8",
                errors="replace",
                timeout=TRY_S,
                check=False,
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise ChannelError(f"{_PROGRAM}: {type(error).__name__}") from None
        if done.returncode:
            lines = done.stderr.strip().splitlines()
            raise ChannelError(f"{_PROGRAM}: {lines[-1] if lines else done.returncode}")
        return "this desktop"
