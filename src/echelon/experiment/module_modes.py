"""Switches a model between training and eval mode, and keeps modes that an experiment chose
itself."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

ModuleModes = list[tuple[nn.Module, bool]]
"""Modules from the outside in, and whether each is in training mode."""


@contextmanager
def use_eval_mode(model: nn.Module) -> Iterator[None]:
    """Puts the model in eval mode, and afterwards every module in the mode that it had before."""
    before = _read_modes(model)
    model.eval()
    try:
        yield
    finally:
        _restore_modes(before)


def enter_train_mode(model: nn.Module) -> None:
    """Puts the model in training mode, except for frozen parts that the experiment put in eval
    mode.

    Models from a hub often arrive in eval mode as a whole; these are switched. A frozen module that
    is in eval mode inside a model in training mode was put there on purpose, and stays.
    """
    frozen = [m for m in model.modules() if not m.training and _is_frozen(m)]
    frozen_modes = [_read_modes(m) for m in frozen] if model.training else []
    model.train()
    for modes in frozen_modes:
        _restore_modes(modes)


def _is_frozen(module: nn.Module) -> bool:
    """Return whether a module has parameters and none of them is trained."""
    parameters = list(module.parameters())
    return bool(parameters) and not any(p.requires_grad for p in parameters)


def _read_modes(model: nn.Module) -> ModuleModes:
    """Return the mode of every module, from the outermost inwards."""
    return [(module, module.training) for module in model.modules()]


def _restore_modes(modes: ModuleModes) -> None:
    """Sets the modes by calling each module's own `train`, which may do more than set a flag.

    `train` also sets all modules inside, so the order must be from the outermost inwards.
    """
    for module, training in modes:
        if module.training != training:
            module.train(training)
