"""Credentials: from the environment, or from the files that the stores' own tools write.

obstore reads the variables itself, and knows roles of machines, containers and web identities.
What it does not read, AWS's own files, is read here. Nothing of it is kept, logged or sent on.
"""

from __future__ import annotations

import configparser
import contextlib
import socket
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import urlsplit

from echelon.object_store.store_errors import ObjectStoreError, StoreProblem
from echelon.object_store.urls import ObjectUrl

_AWS_SOURCES = (
    *("AWS_ACCESS_KEY_ID", "AWS_WEB_IDENTITY_TOKEN_FILE", "AWS_SKIP_SIGNATURE"),
    *("AWS_CONTAINER_CREDENTIALS_RELATIVE_URI", "AWS_CONTAINER_CREDENTIALS_FULL_URI"),
)
_GOOGLE_SOURCES = (
    *("GOOGLE_APPLICATION_CREDENTIALS", "GOOGLE_SERVICE_ACCOUNT", "GOOGLE_SERVICE_ACCOUNT_PATH"),
    *("GOOGLE_SERVICE_ACCOUNT_KEY", "GOOGLE_BEARER_TOKEN", "GOOGLE_SKIP_SIGNATURE"),
)
_METADATA_TIMEOUT_S = 2.0
_FROM_PROFILE = {
    "aws_access_key_id": "access_key_id",
    "aws_secret_access_key": "secret_access_key",
    "aws_session_token": "session_token",
    "region": "region",
    "endpoint_url": "endpoint",
}


def find_aws_config(url: ObjectUrl, environ: Mapping[str, str]) -> dict[str, str]:
    """Return what obstore is to be told beside what it reads from the environment. Raises where
    there are no credentials anywhere."""
    profile = _read_aws_profile(environ)
    has_key = bool(environ.get("AWS_ACCESS_KEY_ID"))
    config = {
        ours: profile[theirs]
        for theirs, ours in _FROM_PROFILE.items()
        if theirs in profile and not (has_key and ("key" in ours or "token" in ours))
    }
    if environ.get("AWS_REGION") or environ.get("AWS_DEFAULT_REGION"):
        config.pop("region", None)
    if any(environ.get(name) for name in ("AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3")):
        config.pop("endpoint", None)
    if "access_key_id" not in config and not any(map(environ.get, _AWS_SOURCES)):
        endpoint = environ.get("AWS_METADATA_ENDPOINT", "http://169.254.169.254")
        if not _is_reachable(endpoint):
            raise ObjectStoreError(
                StoreProblem.NO_CREDENTIALS,
                f"{url} cannot be read: no credentials were found",
                "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE for a profile "
                "of ~/.aws/credentials; for a public bucket AWS_SKIP_SIGNATURE=true",
            )
    return config


def check_google_credentials(url: ObjectUrl, environ: Mapping[str, str]) -> None:
    """Raise where there are no credentials anywhere."""
    home = environ.get("HOME", "")
    kept = Path(home, ".config/gcloud/application_default_credentials.json")
    if any(map(environ.get, _GOOGLE_SOURCES)) or kept.is_file():
        return
    if not _is_reachable(f"http://{environ.get('GCE_METADATA_HOST', 'metadata.google.internal')}"):
        raise ObjectStoreError(
            StoreProblem.NO_CREDENTIALS,
            f"{url} cannot be read: no credentials were found",
            "set GOOGLE_APPLICATION_CREDENTIALS to a key file, or call `gcloud auth "
            "application-default login`; for a public bucket GOOGLE_SKIP_SIGNATURE=true",
        )


def _read_aws_profile(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the settings of the chosen profile in AWS's two files."""
    folder = Path(environ.get("HOME") or "/", ".aws")
    name = environ.get("AWS_PROFILE") or "default"
    found: dict[str, str] = {}
    for variable, file, section in (
        ("AWS_CONFIG_FILE", "config", name if name == "default" else f"profile {name}"),
        ("AWS_SHARED_CREDENTIALS_FILE", "credentials", name),
    ):
        path = Path(environ.get(variable) or folder / file)
        # A value may hold anything, and a message of the parser would show the line.
        parser = configparser.RawConfigParser()
        with contextlib.suppress(OSError, configparser.Error, UnicodeDecodeError):
            parser.read_string(path.read_text(encoding="utf-8"))
        if parser.has_section(section):
            found |= dict(parser.items(section))
    return found


def _is_reachable(endpoint: str) -> bool:
    """Return whether a machine's own credential service answers. Asking it without one would take
    a minute of retries."""
    parts = urlsplit(endpoint)
    try:
        address = (parts.hostname or "", parts.port or 80)
        socket.create_connection(address, _METADATA_TIMEOUT_S).close()
    except (OSError, ValueError):
        return False
    return True
