"""The last results of `echelon preflight`, kept for who looks at machines later."""

from __future__ import annotations

import contextlib
import os
import secrets
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from echelon.utils.cache_root import get_cache_root
from echelon.utils.files import read_json_object, write_json_atomically

_KEPT = 20


def record_preflight_results(
    document: Mapping[str, Any], run: str | None, env: Mapping[str, str]
) -> None:
    """Keep what `echelon preflight --json` prints, in the user's cache folder; the oldest go. A
    full disk must not end a job over it."""
    now = time.time()
    folder = _get_folder(env)
    with contextlib.suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
        name = f"{now:020.6f}-{secrets.token_hex(4)}.json"
        write_json_atomically(folder / name, {**document, "time": now, "run": run})
        for file in _list_files(env)[_KEPT:]:
            file.unlink(missing_ok=True)


def list_preflight_results(env: Mapping[str, str]) -> list[dict[str, Any]]:
    """Return the results that are kept, the newest first."""
    found = (read_json_object(file) for file in _list_files(env)[:_KEPT])
    return [document for document in found if document is not None]


def _list_files(env: Mapping[str, str]) -> list[Path]:
    """Return the files of results, the newest first."""
    with contextlib.suppress(OSError):
        names = sorted(os.listdir(_get_folder(env)), reverse=True)
        return [_get_folder(env) / name for name in names if name[:1].isdecimal()]
    return []


def _get_folder(env: Mapping[str, str]) -> Path:
    return get_cache_root(env) / "preflight"
