"""What a host says where Echelon is not installed: sent to its Python, which has nothing else."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import shutil
import sys


def read_version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


print(
    json.dumps(
        {
            "python": platform.python_version(),
            "executable": sys.executable,
            "torch": read_version("torch"),
            "gpus": os.path.exists("/dev/nvidia0") or shutil.which("nvidia-smi") is not None,
        }
    )
)
