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

MARKER = ".echelon-env.json"
"""Written last: an environment without it was never finished."""


def cache(environ: Mapping[str, str]) -> Path:
    if own := environ.get("ECHELON_CACHE"):
        return Path(own).absolute()
    xdg = environ.get("XDG_CACHE_HOME", "")
    # The specification has relative ones ignored.
    home = Path(xdg) if xdg.startswith("/") else Path(environ.get("HOME") or Path.home(), ".cache")
    return home.absolute() / "echelon"


def environments(environ: Mapping[str, str]) -> Path:
    return cache(environ) / "envs"


@dataclass(frozen=True)
class Place:
    """One environment's paths. What is about it stands beside it, as what builds an environment
    wants an empty place."""

    folder: Path

    @property
    def marker(self) -> Path:
        return self.folder / MARKER

    def _beside(self, suffix: str) -> Path:
        if self.folder.name == ".venv":
            return self.folder.parent / ".echelon" / f"venv.{suffix}"
        return self.folder.with_name(f"{self.folder.name}.{suffix}")

    @property
    def lock(self) -> Path:
        """Held by who builds or removes it."""
        return self._beside("lock")

    @property
    def use(self) -> Path:
        """Shared by the jobs that run in it; its time of change is the last use."""
        return self._beside("use")

    @property
    def log(self) -> Path:
        """What the last build said; kept when it failed."""
        return self._beside("log")

    @property
    def building(self) -> Path:
        """There while a build is under way, or after one that broke off."""
        return self._beside("building")

    @property
    def inputs(self) -> Path:
        """A folder for what is given to pip or uv; may hold secrets of the requirements."""
        return self._beside("inputs")

    def prepare(self) -> None:
        """The folder that all of these are in."""
        self.lock.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        if self.lock.parent.name == ".echelon":
            (self.lock.parent / ".gitignore").write_text("*\n", encoding="utf-8")

    def made(self) -> dict[str, Any]:
        """What the marker says; nothing where there is no finished environment."""
        return read_json_object(self.marker) or {}

    def python(self) -> Path:
        return self.folder / "bin" / "python"

    def stands(self, key: str) -> bool:
        """Finished, for this key, and its interpreter was not taken away since."""
        return self.made().get("key") == key and os.access(self.python(), os.X_OK)


def unwritable(path: Path, error: OSError) -> EchelonError:
    return EchelonError(
        Fault(
            f"{path} cannot be written: {describe_os_error(error)}",
            "free some space or ask for the permission, or set ECHELON_CACHE to another folder",
        )
    )
