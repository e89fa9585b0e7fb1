"""What a host reports of itself before anything is started there.

The text of this file is sent to the host's Python, which may lack Echelon, so it needs nothing
else.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import shutil
import sys


def describe_host(
    cwd: str = "/", run: str = "/", token: str = "", entry: str = ""
) -> dict[str, object]:
    """Versions, devices and folders of this host."""
    return {
        "python": platform.python_version(),
        "executable": sys.executable,
        "driver": os.path.exists("/dev/nvidia0") or shutil.which("nvidia-smi") is not None,
        "torch": _read_installed_version("torch"),
        **_probe_echelon(),
        "cwd": os.path.isdir(cwd),
        "entry": not entry or os.path.isfile(entry),
        "shared": os.path.exists(token),
        "writable": os.access(_find_nearest_folder(run), os.W_OK | os.X_OK),
    }


def _read_installed_version(package: str) -> str | None:
    """Return the version that the installer recorded: importing torch would take seconds."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _probe_echelon() -> dict[str, object]:
    """Version of Echelon and number of visible devices."""
    try:
        from echelon import __version__
        from echelon.gpus import count_visible_gpus
    except ImportError:
        return {"echelon": None, "devices": 0}
    return {"echelon": __version__, "devices": count_visible_gpus(os.environ)}


def _find_nearest_folder(path: str) -> str:
    """Return the nearest folder above a path that exists."""
    while not os.path.isdir(path):
        path = os.path.dirname(path)
    return path


if __name__ == "__main__":
    # The mark of echelon.hosts.message_protocol, which may not be there to be imported.
    print("\x1e" + json.dumps(describe_host(*sys.argv[1:])), flush=True)
