"""Checks of the lengths and sizes that a user's loop gives to its session."""

from __future__ import annotations

from echelon.config.schema import TrainerConfig
from echelon.errors import EchelonError, Fault


def require_positive(**given: int | None) -> None:
    """Raise a fault for every number that is given and is not 1 or more."""
    faults = [
        Fault(f"{name}={value}", f"give {name} of 1 or more")
        for name, value in given.items()
        if value is not None and (not isinstance(value, int) or value < 1)
    ]
    if faults:
        raise EchelonError(*faults)


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
