"""The models of gpu_models.py, compiled, each with its small batch.

PYTHONPATH=src:carried python3 benchmarks/gpu_models.py --compile
"""

from __future__ import annotations

import gpu_models
from common import Result


def measure() -> Result:
    return gpu_models.measure(is_compiled=True)
