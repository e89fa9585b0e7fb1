"""Which modules train and which only evaluate, where an experiment has chosen that itself."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

ModuleModes = list[tuple[nn.Module, bool]]
"""Modules from the outside in, and whether each is in training mode."""


@contextmanager
def use_eval_mode(model: nn.Module) -> Iterator[None]:
    """In eval mode, and afterwards every module in the mode it had."""
    before = _read_modes(model)
    model.eval()
    try:
        yield
    finally:
        _restore_modes(before)


def enter_train_mode(model: nn.Module) -> None:
    """All in training mode, as models from elsewhere come in eval mode; but what is frozen and in
    eval mode inside a model that trains was put there, and stays as it is."""
    frozen = [m for m in model.modules() if not m.training and _is_frozen(m)]
    frozen_modes = [_read_modes(m) for m in frozen] if model.training else []
    model.train()
    for modes in frozen_modes:
        _restore_modes(modes)


def _is_frozen(module: nn.Module) -> bool:
    parameters = list(module.parameters())
    return bool(parameters) and not any(p.requires_grad for p in parameters)


def _read_modes(model: nn.Module) -> ModuleModes:
    return [(module, module.training) for module in model.modules()]


def _restore_modes(modes: ModuleModes) -> None:
    """By their own `train`, which may do more than set a flag; it sets what is inside, too."""
    for module, training in modes:
        if module.training != training:
            module.train(training)
