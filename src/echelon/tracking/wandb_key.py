"""The API key that wandb would use, found without importing wandb and never displayed."""

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


def find_key_problem(env: Mapping[str, str]) -> str | None:
    """Return what is wrong with the key that wandb would use; None if nothing is."""
    if env.get("WANDB_IDENTITY_TOKEN_FILE") and not env.get("WANDB_API_KEY", "").strip():
        return None
    server, key, where = _find_key(env)
    if key is None:
        return f"there is no key for {parse_server_host(server)}"
    return None if _KEY.fullmatch(key) else f"{where} does not have the form of a key"


def read_credentials(env: Mapping[str, str]) -> tuple[str, str] | None:
    """Return the server's address and the key, for requests of our own; None without a key. It
    must never be printed or written."""
    server, key, _ = _find_key(env)
    return (server.rstrip("/"), key) if key is not None and _KEY.fullmatch(key) else None


def _find_key(env: Mapping[str, str]) -> tuple[str, str | None, str]:
    """Return the server, the key or None, and where the key was found, for a message."""
    settings = _read_wandb_settings(env)
    server = env.get("WANDB_BASE_URL") or settings.get("base_url") or _SERVER
    if given := env.get("WANDB_API_KEY", "").strip():
        return server, given, "WANDB_API_KEY"
    if kept := settings.get("api_key"):
        return server, kept, "the key of `wandb login`"
    host = parse_server_host(server)
    return server, _read_netrc_key(env, host), f"the key for {host}"


def parse_server_host(server: str) -> str:
    """Return the host of a server's address, without a user name and password before it."""
    return urlsplit(server).netloc.rpartition("@")[2]


def _read_wandb_settings(env: Mapping[str, str]) -> dict[str, str]:
    """Return the settings of `wandb login` and `wandb init`."""
    home = Path(env.get("WANDB_CONFIG_DIR") or _get_home() / ".config" / "wandb")
    parser = configparser.ConfigParser(interpolation=None)
    with contextlib.suppress(configparser.Error, OSError, UnicodeDecodeError):
        parser.read([home / "settings", Path("wandb") / "settings"])
    return dict(parser["default"]) if parser.has_section("default") else {}


def _read_netrc_key(env: Mapping[str, str], host: str) -> str | None:
    """Return the key for a host in ~/.netrc; None without one."""
    given = env.get("NETRC")
    names = [Path(given)] if given else [_get_home() / ".netrc", _get_home() / "_netrc"]
    for path in names:
        with contextlib.suppress(OSError, netrc.NetrcParseError, UnicodeDecodeError):
            if found := netrc.netrc(path).authenticators(host):
                return found[2] or None
    return None


def _get_home() -> Path:
    """Return the home folder, or a path that does not exist for a user without one, as in some
    containers."""
    return Path(os.path.expanduser("~"))
