"""The folder of this user in which everything is kept that can be made again."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path


def get_cache_root(environ: Mapping[str, str]) -> Path:
    """Return the folder of all caches: ECHELON_CACHE, else `echelon` in the XDG cache folder."""
    if override := environ.get("ECHELON_CACHE"):
        return Path(override).absolute()
    xdg = environ.get("XDG_CACHE_HOME", "")
    # The XDG specification says that relative paths are to be ignored.
    home = Path(xdg) if xdg.startswith("/") else Path(environ.get("HOME") or Path.home(), ".cache")
    return home.absolute() / "echelon"
