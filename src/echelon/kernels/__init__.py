"""Kernels of our own for NVIDIA GPUs, in Triton, which comes with torch's wheels for CUDA.

They are used where they are the difference between work that grows with a batch and work that
waits for the host; everywhere else, and where Triton is missing, torch's operators do the same.
"""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec

from torch import Tensor


@cache
def _has_triton() -> bool:
    return find_spec("triton") is not None


def can_use_kernels(tensor: Tensor) -> bool:
    return tensor.is_cuda and _has_triton()
