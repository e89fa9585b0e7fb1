"""One POST of JSON, to the address that was set and to no other."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Mapping
from http.client import HTTPException
from typing import IO, Any
from urllib.parse import urlsplit

from echelon import __version__
from echelon.errors import Fault
from echelon.notify.channel import TRY_S, ChannelError

_MAX_ANSWER_BYTES = 4096
_HTTP_REDIRECTS = range(300, 400)
_HTTP_TOO_MANY_REQUESTS = 429


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """A server that redirects could send a message, which may name what nobody else should read,
    anywhere."""

    def redirect_request(
        self, req: Any, fp: IO[bytes], code: int, msg: str, headers: Any, newurl: str
    ) -> None:
        return None


def find_url_fault(channel: str, variable: str, env: Mapping[str, str]) -> Fault | None:
    """Return what is wrong with the address in a variable, without showing it."""
    url = env.get(variable, "")
    if not url:
        return Fault(
            f"notify has {channel}, but {variable} is not set",
            f"put {variable}=https://… into the environment, or into the file of launch.secrets",
        )
    try:
        parts = urlsplit(url)
        is_address = parts.scheme in ("http", "https") and bool(parts.hostname)
        _ = parts.port
    except ValueError:
        is_address = False
    if not is_address or not url.isascii() or not url.isprintable() or " " in url:
        return Fault(
            f"{variable} is not an address of a web server",
            "set it to https://HOST/…, without quotes and blanks",
        )
    return None


def post_json(url: str, body: Mapping[str, Any]) -> str:
    """Send a JSON body, and return the host. Raises ChannelError, which names the host alone: the
    rest of an address is often a secret."""
    host = urlsplit(url).hostname or ""
    request = urllib.request.Request(
        url,
        json.dumps(body).encode(),
        {"Content-Type": "application/json", "User-Agent": f"echelon/{__version__}"},
        method="POST",
    )
    opener = urllib.request.build_opener(_NoRedirect)
    try:
        with opener.open(request, timeout=TRY_S) as answer:
            answer.read(_MAX_ANSWER_BYTES)
    except urllib.error.HTTPError as error:
        error.close()
        raise _explain_status(host, error.code) from None
    except urllib.error.URLError as error:
        raise ChannelError(f"{host}: {_describe(error.reason)}", may_pass=True) from None
    except (OSError, HTTPException) as error:
        raise ChannelError(f"{host}: {_describe(error)}", may_pass=True) from None
    return host


def _explain_status(host: str, code: int) -> ChannelError:
    if code in _HTTP_REDIRECTS:
        return ChannelError(f"{host} redirects ({code}), which is not followed; set its address")
    may_pass = code >= 500 or code == _HTTP_TOO_MANY_REQUESTS
    return ChannelError(f"{host} answered {code}", may_pass)


def _describe(reason: object) -> str:
    """Return why there was no answer, without an address that could be in the text."""
    if isinstance(reason, TimeoutError):
        return f"no answer within {TRY_S:g} s"
    if isinstance(reason, OSError) and reason.strerror:
        return reason.strerror
    return type(reason).__name__
