"""Which wheel of torch runs on a machine, given its driver and its GPUs.

A driver runs what was built for its own CUDA version and for earlier ones. Within a major version
it also runs what was built for a later minor one, unless something is compiled at run time.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

_HOST = "https://download.pytorch.org/whl"

Version = tuple[int, int]


class TorchWheel(NamedTuple):
    """A build of torch: its tag in the index, its CUDA and the compute capabilities it supports."""

    tag: str
    cuda: Version
    min_capability: Version
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
"""The builds that have a torch version which Echelon supports, the newest last.

From the matrix in PyTorch's RELEASE.md of September 2026. cu118 ends with torch 2.7, cu121 with
2.5, cu124 with 2.6, cu128 with 2.11; cu132 begins with 2.12; cu126 stays for capabilities below
7.5."""


def make_install_command(driver: Version | None, capabilities: Sequence[Version] = ()) -> str:
    """Return the pip command for the newest wheel that fits the driver and all of these devices.

    Without a driver it is the one for the CPU; empty if no wheel fits.
    """
    if driver is None:
        return _make_pip_command("cpu")
    matching = [
        wheel
        for wheel in WHEELS
        if wheel.cuda <= driver
        and all(wheel.min_capability <= c <= wheel.max_capability for c in capabilities)
    ]
    return _make_pip_command(matching[-1].tag) if matching else ""


def _make_pip_command(tag: str) -> str:
    return f"pip install --force-reinstall torch --index-url {_HOST}/{tag}"


def find_oldest_cuda(capabilities: Sequence[Version]) -> Version | None:
    """Return the oldest CUDA version whose wheel supports all of these devices."""
    return next(
        (
            wheel.cuda
            for wheel in WHEELS
            if all(wheel.min_capability <= c <= wheel.max_capability for c in capabilities)
        ),
        None,
    )


def is_built_for(archs: Sequence[str], capability: Version) -> bool:
    """Return whether one of the architectures (``sm_90``, ``compute_80``) runs on a device.

    Machine code (``sm``) runs within its major version, from its minor version on. PTX
    (``compute``) is compiled at run time for any later device.
    """
    return any(_can_run_arch(arch, capability) for arch in archs)


def _can_run_arch(arch: str, capability: Version) -> bool:
    match = re.fullmatch(r"(sm|compute)_(\d+)(\d)([af]?)", arch)
    if match is None:
        return False
    built = (int(match[2]), int(match[3]))
    if match[4] == "a":  # architecture-specific: runs on no other device
        return built == capability
    if match[1] == "compute":
        return built <= capability
    return built[0] == capability[0] and built <= capability


def parse_version(text: str | None) -> Version | None:
    """Return ``(12, 8)`` for ``12.8`` and for ``12.8.1+cpu``; None if there is no version."""
    match = re.match(r"(\d+)\.(\d+)", text or "")
    return (int(match[1]), int(match[2])) if match else None
