"""Install Debian's Chromium and its driver, with which tests and benchmarks open pages.

    python3 scripts/install_chromium.py

Does nothing where both are there. Where they cannot be had it says why in one sentence, and ends
with 3.
"""

from __future__ import annotations

import sys

from debian_packages import install_missing

PACKAGE_OF = {"chromium": "chromium", "chromedriver": "chromium-driver"}
CANNOT_BE_HAD = 3

if __name__ == "__main__":
    if reason := install_missing(PACKAGE_OF, "to open pages with"):
        print(reason, file=sys.stderr)
        sys.exit(CANNOT_BE_HAD)
