"""Whether wandb would find a key, told without importing wandb, and without ever showing one."""

from __future__ import annotations

import configparser
import contextlib
import netrc
import os
import re
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import urlsplit

_SERVER = "https://api.wandb.ai"
_KEY = re.compile(r"([^-]*-)?[\w-]{40,}|[\w-]+\.[\w-]+\.[\w-]+", re.ASCII)
"""Forty characters and more, perhaps with a prefix; or a token of three parts."""


def problem(env: Mapping[str, str]) -> str | None:
    """What is wrong with the key that wandb would use; None if nothing is."""
    if key := env.get("WANDB_API_KEY", "").strip():
        return None if _KEY.fullmatch(key) else "WANDB_API_KEY does not have the form of a key"
    if env.get("WANDB_IDENTITY_TOKEN_FILE"):
        return None
    settings = _settings(env)
    if settings.get("api_key"):
        return None
    server = env.get("WANDB_BASE_URL") or settings.get("base_url") or _SERVER
    host = urlsplit(server).netloc.rpartition("@")[2]  # a password may stand before
    found = _in_netrc(env, host)
    if found is None:
        return f"there is no key for {host}"
    return None if _KEY.fullmatch(found) else f"the key for {host} does not have the form of one"


def _settings(env: Mapping[str, str]) -> dict[str, str]:
    """Of `wandb login` and `wandb init`."""
    home = Path(env.get("WANDB_CONFIG_DIR") or _home() / ".config" / "wandb")
    parser = configparser.ConfigParser(interpolation=None)
    with contextlib.suppress(configparser.Error, OSError, UnicodeDecodeError):
        parser.read([home / "settings", Path("wandb") / "settings"])
    return dict(parser["default"]) if parser.has_section("default") else {}


def _in_netrc(env: Mapping[str, str], host: str) -> str | None:
    given = env.get("NETRC")
    names = [Path(given)] if given else [_home() / ".netrc", _home() / "_netrc"]
    for path in names:
        with contextlib.suppress(OSError, netrc.NetrcParseError, UnicodeDecodeError):
            if found := netrc.netrc(path).authenticators(host):
                return found[2] or None
    return None


def _home() -> Path:
    """Or a folder that is not there, for a user without one, as in some containers."""
    return Path(os.path.expanduser("~"))
