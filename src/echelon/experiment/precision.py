"""The precision of the computation. Weights, gradients and the optimizer stay float32."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch

from echelon.experiment.definition import Experiment

HALF_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


class Precision:
    def __init__(self, name: str, device: torch.device) -> None:
        self.name = name
        self.device = device
        self.half_dtype = HALF_DTYPES.get(name)

    def configure(self, experiment: Experiment) -> None:
        """Set what is set once for a run: tf32 for all matrix products, a scaler for fp16."""
        if self.device.type == "cuda":
            torch.set_float32_matmul_precision("highest" if self.name == "float32" else "high")
        if self.name == "fp16" and experiment.scaler is None:
            experiment.scaler = torch.amp.GradScaler(self.device.type)

    def autocast(self) -> AbstractContextManager[object]:
        """For a forward pass and its loss.

        Weights are cast anew each time: a cast that was kept would be of the step that a CUDA graph
        was captured at.
        """
        if self.half_dtype is None:
            return nullcontext()
        return torch.autocast(self.device.type, self.half_dtype, cache_enabled=False)
