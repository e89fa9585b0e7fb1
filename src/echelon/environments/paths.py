"""Where environments are, and what stands beside one."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from echelon.errors import EchelonError, Fault
from echelon.utils.files import read_json_object
from echelon.utils.os_errors import describe_os_error

MARKER_NAME = ".echelon-env.json"
"""Written last: an environment without it was never finished."""


def cache_root(environ: Mapping[str, str]) -> Path:
    if override := environ.get("ECHELON_CACHE"):
        return Path(override).absolute()
    xdg = environ.get("XDG_CACHE_HOME", "")
    # The specification has relative ones ignored.
    home = Path(xdg) if xdg.startswith("/") else Path(environ.get("HOME") or Path.home(), ".cache")
    return home.absolute() / "echelon"


def environments_root(environ: Mapping[str, str]) -> Path:
    return cache_root(environ) / "envs"


@dataclass(frozen=True)
class EnvironmentPaths:
    """One environment's paths. What is about it stands beside it, as what builds an environment
    wants an empty place."""

    folder: Path

    @property
    def marker(self) -> Path:
        return self.folder / MARKER_NAME

    def _sibling(self, suffix: str) -> Path:
        if self.folder.name == ".venv":
            return self.folder.parent / ".echelon" / f"venv.{suffix}"
        return self.folder.with_name(f"{self.folder.name}.{suffix}")

    @property
    def lock(self) -> Path:
        """Held by who builds or removes it."""
        return self._sibling("lock")

    @property
    def use_lock(self) -> Path:
        """Shared by the jobs that run in it; its time of change is the last use."""
        return self._sibling("use")

    @property
    def log(self) -> Path:
        """What the last build said; kept when it failed."""
        return self._sibling("log")

    @property
    def building_marker(self) -> Path:
        """There while a build is under way, or after one that broke off."""
        return self._sibling("building")

    @property
    def inputs(self) -> Path:
        """A folder for what is given to pip or uv; may hold secrets of the requirements."""
        return self._sibling("inputs")

    def make_parent(self) -> None:
        """The folder that all of these are in."""
        self.lock.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        if self.lock.parent.name == ".echelon":
            (self.lock.parent / ".gitignore").write_text("*\n", encoding="utf-8")

    def read_marker(self) -> dict[str, Any]:
        """What the marker says; nothing where there is no finished environment."""
        return read_json_object(self.marker) or {}

    def python(self) -> Path:
        return self.folder / "bin" / "python"

    def is_ready(self, key: str) -> bool:
        """Finished, for this key, and its interpreter was not taken away since."""
        return self.read_marker().get("key") == key and os.access(self.python(), os.X_OK)


def unwritable_error(path: Path, error: OSError) -> EchelonError:
    return EchelonError(
        Fault(
            f"{path} cannot be written: {describe_os_error(error)}",
            "free some space or ask for the permission, or set ECHELON_CACHE to another folder",
        )
    )
