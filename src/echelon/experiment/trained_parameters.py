"""Which parameters of a model are trained. Code of the user may freeze and thaw them at any step:
in a schedule, in a hook, or in the forward pass itself."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from operator import attrgetter

from torch import nn
from torch.optim import Optimizer

from echelon.experiment.optimizer_step import list_trained_parameters

_MAX_NAMES = 5
"""Parameters that a message names."""

_is_trained = attrgetter("requires_grad")


class TrainedParameters:
    """The parameters with a gradient, as they were when `refresh` was called last."""

    def __init__(self, model: nn.Module, optimizer: Optimizer) -> None:
        self._model, self._optimizer = model, optimizer
        self.refresh()

    def refresh(self) -> None:
        """Looks at all parameters anew."""
        parameters = list(self._model.parameters())
        self.trained = [p for p in parameters if p.requires_grad]
        self.frozen = [p for p in parameters if not p.requires_grad]
        self.optimized = list_trained_parameters(self._optimizer)
        """Those of them that the optimizer trains."""

    def have_changed(self) -> bool:
        """Return whether any parameter was frozen or thawed since. Asked in every step, so it is
        one pass without a line of Python for each parameter."""
        return not all(map(_is_trained, self.trained)) or any(map(_is_trained, self.frozen))

    def list_frozen_since(self) -> list[nn.Parameter]:
        """Return the parameters that were trained and are frozen now."""
        return [p for p in self.trained if not p.requires_grad]

    def list_thawed_since(self) -> list[nn.Parameter]:
        """Return the parameters that were frozen and are trained now."""
        return [p for p in self.frozen if p.requires_grad]


def read_trained_flags(model: nn.Module) -> dict[str, bool]:
    """Return for every parameter by name whether it is trained."""
    return {name: p.requires_grad for name, p in model.named_parameters()}


def find_changed_flags(model: nn.Module, built: Mapping[str, bool]) -> dict[str, bool]:
    """Return by name the parameters that were frozen or thawed since `read_trained_flags`, and
    whether they are trained now."""
    flags = read_trained_flags(model)
    return {name: flag for name, flag in flags.items() if flag != built.get(name, flag)}


def set_trained_flags(model: nn.Module, flags: Mapping[str, bool]) -> None:
    """Freezes and thaws the parameters with these names; a name that is gone is left out."""
    for name, p in model.named_parameters():
        if name in flags:
            p.requires_grad_(flags[name])


def format_parameter_names(model: nn.Module, parameters: Iterable[nn.Parameter]) -> str:
    """Return the names of parameters for a sentence, such as "the parameters a, b and 3 more"."""
    wanted = {id(p) for p in parameters}
    names = [name for name, p in model.named_parameters() if id(p) in wanted]
    more = f" and {len(names) - _MAX_NAMES} more" if len(names) > _MAX_NAMES else ""
    return f"the parameters {', '.join(names[:_MAX_NAMES])}{more}" if names else "some parameters"
