"""Describes a Python as far as packages can depend on it.

This file is also run as a script by the interpreter in question, which has none of our packages and
may be old. So it uses the standard library alone, and no newer syntax.
"""

from __future__ import annotations

import json
import os
import platform
import sys
import sysconfig
from typing import Any


def describe_interpreter() -> dict[str, Any]:
    """Return the fields of `interpreter.Interpreter`, except its executable, as plain data."""
    try:
        libc = os.confstr("CS_GNU_LIBC_VERSION")
    except (ValueError, OSError):
        libc = "".join(platform.libc_ver())
    # A venv's python is a symbolic link; its target is what may disappear or be replaced.
    base = os.path.realpath(getattr(sys, "_base_executable", None) or sys.executable)
    return {
        "version": ".".join(map(str, sys.version_info[:3])),
        "build": sys.version,
        "implementation": sys.implementation.name,
        "base": base,
        "prefix": sys.prefix,
        "platform": sysconfig.get_platform(),
        "machine": platform.machine(),
        "libc": libc or "",
    }


if __name__ == "__main__":
    print(json.dumps(describe_interpreter()))
