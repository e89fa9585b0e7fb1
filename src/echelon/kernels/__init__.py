"""Triton kernels for NVIDIA GPUs. Triton is installed with torch's wheels for CUDA.

They exist where torch's operators would make the work grow with a table instead of the batch, or
make the host wait. Everywhere else, and where Triton is missing, torch's operators compute the
same.
"""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec

from torch import Tensor


@cache
def _has_triton() -> bool:
    return find_spec("triton") is not None


def can_use_kernels(tensor: Tensor) -> bool:
    """Return whether the kernels work on this tensor: it is on a GPU, and Triton is installed."""
    return tensor.is_cuda and _has_triton()
