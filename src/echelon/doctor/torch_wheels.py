"""Which of torch's wheels runs here: by the CUDA that the driver supports, and by the devices.

A driver runs what was built for its own CUDA and for all before it; within a major version also
what was built for a somewhat later one, so long as nothing has to be compiled at run time.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

_HOST = "https://download.pytorch.org/whl"

Version = tuple[int, int]


class TorchWheel(NamedTuple):
    tag: str
    cuda: Version
    min_capability: Version
    """Compute capability."""
    max_capability: Version


WHEELS = (
    TorchWheel("cu118", (11, 8), (5, 0), (9, 0)),
    TorchWheel("cu121", (12, 1), (5, 0), (9, 0)),
    TorchWheel("cu124", (12, 4), (5, 0), (9, 0)),
    TorchWheel("cu126", (12, 6), (5, 0), (9, 0)),
    TorchWheel("cu128", (12, 8), (7, 5), (12, 1)),
    TorchWheel("cu130", (13, 0), (7, 5), (12, 1)),
    TorchWheel("cu132", (13, 2), (7, 5), (12, 1)),
)
"""Those that have a torch which Echelon takes, by the matrix in PyTorch's RELEASE.md of September
2026. cu118 ends with torch 2.7, cu121 with 2.5, cu124 with 2.6, cu128 with 2.11; cu132 begins with
2.12; cu126 is kept for devices below 7.5."""


def make_install_command(driver: Version | None, capabilities: Sequence[Version] = ()) -> str:
    """The newest wheel for this driver and all of these devices; without a driver, one for the
    CPU; empty where there is none."""
    if driver is None:
        return _make_pip_command("cpu")
    fitting = [
        wheel
        for wheel in WHEELS
        if wheel.cuda <= driver
        and all(wheel.min_capability <= c <= wheel.max_capability for c in capabilities)
    ]
    return _make_pip_command(fitting[-1].tag) if fitting else ""


def _make_pip_command(tag: str) -> str:
    return f"pip install --force-reinstall torch --index-url {_HOST}/{tag}"


def find_oldest_cuda(capabilities: Sequence[Version]) -> Version | None:
    """The oldest CUDA whose wheels know all of these devices."""
    fitting = [
        w.cuda
        for w in WHEELS
        if all(w.min_capability <= c <= w.max_capability for c in capabilities)
    ]
    return fitting[0] if fitting else None


def is_built_for(archs: Sequence[str], capability: Version) -> bool:
    """Machine code runs on its own major version from its minor one on; PTX is compiled on any
    later device."""
    return any(_runs_on(arch, capability) for arch in archs)


def _runs_on(arch: str, capability: Version) -> bool:
    match = re.fullmatch(r"(sm|compute)_(\d+)(\d)([af]?)", arch)
    if match is None:
        return False
    built = (int(match[2]), int(match[3]))
    if match[4] == "a":  # of one architecture alone
        return built == capability
    if match[1] == "compute":
        return built <= capability
    return built[0] == capability[0] and built <= capability


def parse_version(text: str | None) -> Version | None:
    """12.8 of "12.8" and of "12.8.1"."""
    match = re.match(r"(\d+)\.(\d+)", text or "")
    return (int(match[1]), int(match[2])) if match else None
