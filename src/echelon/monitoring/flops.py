"""What share of a GPU's arithmetic the model uses (MFU).

The floating-point operations of one batch are counted once, on a copy of the model that has shapes
and no numbers: nothing is computed, and no memory or random number is used. It is copied before the
replica wraps it, so what is counted is the model's own work, not what is computed twice to save
memory or in another order to be fast.
"""

from __future__ import annotations

import contextlib
import copy
import re
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from echelon.data.batches import Batch, BlockSlice
from echelon.experiment.definition import Experiment, default_predict

_META = torch.device("meta")

# Teraflops of dense matrix products by NVIDIA's data sheets: bf16 and fp16 (accumulated in
# float32), tf32, float32. Where a sheet gives figures for sparse matrices, half of them. The first
# name that is a word of a device's name counts: an A10G is no A10, an RTX A4000 no A40.
_PEAKS: dict[str, tuple[float, float | None, float]] = {
    "B200": (2250, 1125, 75),
    "H100 PCIe": (756, 378, 51),
    "H100 NVL": (835.5, 417.5, 60),
    "H100": (989.4, 494.7, 66.9),  # SXM; H200 and GH200 have the same cores
    "H200 NVL": (835.5, 417.5, 60),
    "H200": (989.4, 494.7, 66.9),
    "GH200": (989.4, 494.7, 66.9),
    "A100": (312, 156, 19.5),
    "L40S": (362, 183, 91.6),
    "L40": (181, 90.5, 90.5),
    "L4": (121, 60, 30.3),
    "A40": (149.7, 74.8, 37.4),
    "A6000": (154.8, 77.4, 38.7),
    "A10": (125, 62.5, 31.2),
    "RTX 4090": (165.2, 82.6, 82.6),
    "RTX 3090": (71, 35.6, 35.6),
    "V100-PCIE": (112, None, 14),
    "V100": (125, None, 15.7),
    "T4": (65, None, 8.1),
}


def get_peak_flops(device_name: str, precision: str) -> float | None:
    """Return the peak of a GPU in operations per second at a precision; None where it is not
    known. A slice of a GPU (MIG) has an unknown share of it, and so has a laptop's GPU."""
    if "MIG" in device_name or "Laptop" in device_name:
        return None
    known = (peaks for name, peaks in _PEAKS.items() if re.search(rf"\b{name}\b", device_name))
    found = next(known, None)
    if found is None:
        return None
    half, tf32, single = found
    of = {"bf16": half, "fp16": half, "tf32": tf32 or single, "float32": single}
    return 1e12 * of[precision]


class FlopsCounter:
    """Counts the operations of one batch, once, and turns a speed into MFU."""

    def __init__(self, experiment: Experiment, peak: float) -> None:
        self._peak = peak
        """Of all devices of the world together."""
        self._predict = experiment.predict or default_predict
        self._loss = experiment.loss
        self._model = _copy_to_meta(experiment.model)
        self._batch: Batch | None = None
        self.is_counted = False
        self.flops_per_sample: float | None = None

    def keep_shapes(self, batch: Batch | BlockSlice) -> None:
        """Keep the shapes of the first batch that has samples; all batches are alike."""
        if self._batch is None and batch.sample_count:
            shapes = tree_map_only(Tensor, lambda t: t.to("meta"), batch.data)
            self._batch = Batch(shapes, batch.sample_count)

    def ensure_counted(self) -> None:
        """Count, once. This takes a moment, because torch imports its compiler for it."""
        model, self._model = self._model, None
        self.is_counted = True
        if model is None or self._batch is None:
            return
        # A model that looks at its numbers cannot be counted: then there is no MFU.
        with contextlib.suppress(Exception), _RealTensorGuard():  # type: ignore[no-untyped-call]
            self.flops_per_sample = self._count(model, self._batch.data) / self._batch.sample_count

    def compute_mfu(self, samples_per_s: float) -> float | None:
        """Return the share of the peak that is used at this speed; None before or without a
        count."""
        return samples_per_s * self.flops_per_sample / self._peak if self.flops_per_sample else None

    def _count(self, model: nn.Module, data: Any) -> float:
        from torch.utils.flop_counter import FlopCounterMode

        counter = FlopCounterMode(display=False)
        with counter:
            output, target = self._predict(model, data)
            self._loss(output, target).backward()
        return float(counter.get_total_flops())


class _RealTensorGuard(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Raises where a real tensor would be moved to the meta device. What an experiment keeps
    outside its model, and moves to where a batch is, would have lost its values for the next
    step."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        moved = func is torch.ops.aten._to_copy.default and kwargs.get("device") == _META
        if moved and not args[0].is_meta:
            raise RuntimeError("a tensor outside the model is used with a batch of shapes")
        return func(*args, **kwargs)


def _copy_to_meta(model: nn.Module) -> nn.Module | None:
    """Return a copy of the model with shapes and without values; None if it cannot be copied."""
    memo: dict[int, Any] = {
        id(p): nn.Parameter(torch.empty_like(p, device="meta"), requires_grad=p.requires_grad)
        for p in model.parameters()
    }
    memo |= {id(b): torch.empty_like(b, device="meta") for b in model.buffers()}
    try:
        return copy.deepcopy(model, memo)
    except Exception:  # not every module can be copied
        return None
