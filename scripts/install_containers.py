"""Install Debian's podman, with runc, and Charliecloud, in whose containers tests train.

    python3 scripts/install_containers.py

Does nothing where they are there. Where they cannot be had it says why in one sentence, and ends
with 3.
"""

from __future__ import annotations

import sys

from debian_packages import install_missing

PACKAGE_OF = {"podman": "podman", "runc": "runc", "ch-run": "charliecloud"}
CANNOT_BE_HAD = 3

if __name__ == "__main__":
    if reason := install_missing(PACKAGE_OF, "to start containers with"):
        print(reason, file=sys.stderr)
        sys.exit(CANNOT_BE_HAD)
