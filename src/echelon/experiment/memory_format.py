"""The order in which a model keeps the pixels of pictures in memory: `trainer.channels_last`.

Tensor cores read pictures with their channels last. Filters in that order are enough: what a
convolution makes of any picture has the order of its filter, and so on through the model.
"""

from __future__ import annotations

import sys

import torch
from torch import nn

from echelon.config.schema import TrainerConfig
from echelon.experiment.precision import HALF_DTYPES

_CONVOLUTIONS = (nn.Conv2d, nn.ConvTranspose2d)


def apply_memory_format(
    model: nn.Module, trainer: TrainerConfig, device: torch.device, is_rank_0: bool
) -> None:
    """Puts the filters of a model into the order that is asked for; says where another order would
    be faster."""
    if trainer.channels_last:
        model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    elif is_rank_0 and device.type == "cuda" and is_faster_channels_last(model, trainer.precision):
        print(
            "the model has convolutions: with trainer.channels_last=true a step may take half the "
            "time",
            file=sys.stderr,
        )


def is_faster_channels_last(model: nn.Module, precision: str) -> bool:
    """Return whether tensor cores would have to turn pictures around for this model."""
    filters = [m.weight for m in model.modules() if isinstance(m, _CONVOLUTIONS) and m.groups == 1]
    return precision in HALF_DTYPES and any(
        not weight.is_contiguous(memory_format=torch.channels_last) for weight in filters
    )
