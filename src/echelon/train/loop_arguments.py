"""Checks of the lengths and sizes that a user's loop gives to its session."""

from __future__ import annotations

import math
from numbers import Real

from torch import Tensor

from echelon.config.schema import TrainerConfig
from echelon.errors import EchelonError, Fault


def require_positive(**given: int | None) -> None:
    """Raise a fault for every number that is given and is not 1 or more."""
    faults = [
        Fault(f"{name}={value!r}", f"give {name} as a whole number of 1 or more")
        for name, value in given.items()
        if value is not None and (not isinstance(value, int) or value < 1)
    ]
    if faults:
        raise EchelonError(*faults)


def require_clip(clip: float, step: int) -> None:
    """Raise where gradients cannot be clipped to this norm: torch takes any number, and a negative
    one would turn them round."""
    if not isinstance(clip, (int, float)) or not clip > 0:
        raise EchelonError(
            Fault(
                f"session.step is given clip={clip!r} in step {step}",
                "give the largest norm, such as clip=1.0, or clip=math.inf to measure alone",
            )
        )


def read_count(count: float | Tensor, step: int) -> float | Tensor:
    """Return what the mean of a loss is over as a number; on a GPU it stays a tensor, as reading it
    would make the GPU wait."""
    number = count.detach() if isinstance(count, Tensor) else count
    if isinstance(number, Tensor) and number.numel() == 1:
        if number.device.type != "cpu":
            return number.reshape(())
        number = number.item()
    if not isinstance(number, Real) or not 0 <= number < math.inf:
        what = f"a tensor of shape {tuple(number.shape)}" if isinstance(number, Tensor) else number
        raise EchelonError(
            Fault(
                f"session.backward is given count={what} in step {step}",
                "give the number of things that the mean is over",
            )
        )
    return float(number)


def require_no_lost_settings(trainer: TrainerConfig, call: str, **given: int | None) -> None:
    """Raise a fault for every setting in whose place the loop gives another number to `call`, so
    that it would have no effect in silence."""
    numbers = {name: value for name, value in given.items() if value is not None}
    replaced = set(numbers)
    if replaced & {"epochs", "steps"}:
        replaced |= {"epochs", "steps"}  # each of them says how long the loop is
    text = ", ".join(f"{name}={value}" for name, value in numbers.items())
    usual = TrainerConfig()
    faults = [
        Fault(
            f"trainer.{name}={getattr(trainer, name)} has no effect, as the loop gives {text} to "
            f"{call}",
            "leave the setting out, or leave it to the setting: call it without this argument",
        )
        for name in sorted(replaced)
        if getattr(trainer, name) not in (getattr(usual, name), numbers.get(name))
    ]
    if faults:
        raise EchelonError(*faults)
