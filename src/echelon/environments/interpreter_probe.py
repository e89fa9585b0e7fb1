"""What a Python is, as far as packages can tell.

Also run as a script by the interpreter in question, which has nothing of ours: the standard
library alone, in words that an old one understands.
"""

from __future__ import annotations

import json
import os
import platform
import sys
import sysconfig
from typing import Any


def describe_interpreter() -> dict[str, Any]:
    try:
        libc = os.confstr("CS_GNU_LIBC_VERSION")
    except (ValueError, OSError):
        libc = "".join(platform.libc_ver())
    # A venv's python is a link; what it links to is what would be gone or replaced.
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
