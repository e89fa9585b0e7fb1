"""The precision of the forward pass and the loss.

Weights, gradients and the optimizer's state stay float32 with every setting of `trainer.precision`.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch

from echelon.experiment.definition import Experiment

HALF_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


class Precision:
    """Applies `trainer.precision`: float32, tf32, bf16 or fp16."""

    def __init__(self, name: str, device: torch.device) -> None:
        self.name = name
        self.device = device
        self.half_dtype = HALF_DTYPES.get(name)

    def configure(self, experiment: Experiment) -> None:
        """Sets what is set once for a run: tf32 for all matrix products on GPUs, a scaler for
        fp16."""
        if self.device.type == "cuda":
            torch.set_float32_matmul_precision("highest" if self.name == "float32" else "high")
        if self.name == "fp16" and experiment.scaler is None:
            experiment.scaler = torch.amp.GradScaler(self.device.type)

    def autocast(self) -> AbstractContextManager[object]:
        """Return the context for a forward pass and its loss.

        Autocast's cache is off: a cached cast would be the one of the step at which a CUDA graph
        was captured, and every replay would use those old weights.
        """
        if self.half_dtype is None:
            return nullcontext()
        return torch.autocast(self.device.type, self.half_dtype, cache_enabled=False)
