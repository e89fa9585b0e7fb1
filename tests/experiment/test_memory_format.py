"""`trainer.channels_last`: another order in memory, the same numbers."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from echelon.config.schema import TrainerConfig
from echelon.experiment.memory_format import apply_memory_format, is_faster_channels_last

CPU = torch.device("cpu")


def make_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 2))


def test_filters_and_what_they_give_have_their_channels_last() -> None:
    plain, model = make_model(), make_model()
    apply_memory_format(model, TrainerConfig(channels_last=True), CPU, is_rank_0=True)
    pictures = torch.randn(2, 3, 8, 8)
    assert model[0](pictures).is_contiguous(memory_format=torch.channels_last)
    torch.testing.assert_close(model(pictures), plain(pictures))


@pytest.mark.parametrize(
    ("model", "precision", "expected"),
    [
        (make_model(), "bf16", True),
        (make_model(), "float32", False),
        (make_model().to(memory_format=torch.channels_last), "bf16", False),  # type: ignore[call-overload]
        (nn.Linear(2, 2), "bf16", False),
        (nn.Conv2d(8, 8, 3, groups=8), "bf16", False),
    ],
)
def test_where_it_would_be_faster(model: nn.Module, precision: str, expected: bool) -> None:
    assert is_faster_channels_last(model, precision) is expected
