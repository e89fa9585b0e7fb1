"""Install Debian's zsh and fish, in which tests complete command lines.

    python3 scripts/install_shells.py

Does nothing where both are there. Where they cannot be had it says why in one sentence, and ends
with 3.
"""

from __future__ import annotations

import sys

from debian_packages import install_missing

PACKAGE_OF = {"zsh": "zsh", "fish": "fish"}
CANNOT_BE_HAD = 3

if __name__ == "__main__":
    if reason := install_missing(PACKAGE_OF, "to complete command lines in"):
        print(reason, file=sys.stderr)
        sys.exit(CANNOT_BE_HAD)
