"""`trainer.ema`: the exponential moving average of the weights, which is what is evaluated."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn


def _group_keys(state: Mapping[str, Any], parameters: Mapping[int, Tensor]) -> list[list[str]]:
    """Return the keys of each parameter in the state of its model."""
    keys: dict[int, list[str]] = {number: [] for number in parameters}
    for key, value in state.items():
        if id(value) in keys:
            keys[id(value)].append(key)
    return list(keys.values())


class WeightAverage:
    """The average of a model's parameters, moved by `1 - decay` towards them after every step.

    Weights are equal on all ranks after a step, so every rank averages for itself and all averages
    are equal. Buffers, such as running averages of batch norms, are the model's own.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        self._decay = decay
        parameters = {id(p): p for p in model.parameters() if p.is_floating_point()}
        self._keys = _group_keys(model.state_dict(keep_vars=True), parameters)
        """The keys of each weight; one that layers share has several."""
        self._weights: list[Tensor] = [p.detach() for p in parameters.values()]
        self._averages: list[Tensor] = []

    def begin(self) -> None:
        """Begins with the weights as they are now, unless an average was restored."""
        if not self._averages:
            self._averages = [weight.clone() for weight in self._weights]

    def update(self) -> None:
        """Moves the average towards the weights."""
        torch._foreach_lerp_(self._averages, self._weights, 1.0 - self._decay)

    @contextmanager
    def use_averages(self) -> Iterator[None]:
        """Puts the averages in the place of the weights, and brings both back."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    def _swap(self) -> None:
        """Exchanges weights and averages in place: DDP and CUDA graphs know the addresses."""
        for weight, average in zip(self._weights, self._averages, strict=True):
            kept = weight.clone()
            weight.copy_(average)
            average.copy_(kept)

    def state_dict(self) -> dict[str, Tensor]:
        """Return the average by the keys that the weights have in the model's state."""
        pairs = zip(self._keys, self._averages, strict=True)
        return {key: average for keys, average in pairs for key in keys}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues with an average; raises KeyError where a weight has none."""
        self._averages = [
            state[keys[0]].to(weight.device, copy=True)
            for keys, weight in zip(self._keys, self._weights, strict=True)
        ]
