"""When a schedule of the experiment's own is stepped, and how long it is: whether it fits the
training, and which length holds after a resume."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch.optim import lr_scheduler

from echelon.errors import EchelonError, Fault

_LENGTHS = {
    lr_scheduler.StepLR: "step_size",
    lr_scheduler.CosineAnnealingLR: "T_max",
    lr_scheduler.CosineAnnealingWarmRestarts: "T_0",
    lr_scheduler.PolynomialLR: "total_iters",
}
"""What a schedule counts its steps with. LinearLR and ConstantLR are left out: they are warm-ups of
a few steps."""
_LENGTH_ATTRIBUTES = (
    *(*_LENGTHS.values(), "milestones", "total_steps"),
    *("_schedule_phases", "_milestones"),  # what OneCycleLR and SequentialLR make of theirs
)


def waits_for_metric(schedule: Any) -> bool:
    """Return whether a schedule is stepped after an evaluation, with a number of it."""
    return isinstance(schedule, lr_scheduler.ReduceLROnPlateau)


def load_schedule_state(schedule: Any, state: Mapping[str, Any]) -> None:
    """Loads how far a schedule has come. Its length is the one that the experiment gives now, as it
    may train longer than before; torch's own loading would bring back the old one."""
    lengths = [
        (part, {k: v for k, v in vars(part).items() if k in _LENGTH_ATTRIBUTES})
        for part in _iter_schedules(schedule)
    ]
    schedule.load_state_dict(state)
    for part, given in lengths:
        vars(part).update(given)


def require_long_schedule(schedule: Any, total_steps: int) -> None:
    """Raises a fault where a schedule of the experiment's own would fail before the last step."""
    for part in _iter_schedules(schedule):
        if isinstance(part, lr_scheduler.OneCycleLR) and part.total_steps < total_steps:
            raise EchelonError(
                Fault(
                    f"the experiment's schedule, a OneCycleLR, ends after {part.total_steps} "
                    f"steps, but the training makes {total_steps}",
                    "take a parameter `training` in the experiment function, and give "
                    "total_steps=training.count_total_steps(len(train_data))",
                )
            )


def find_epoch_schedule_notes(schedule: Any, epochs: int, epoch_steps: int) -> Iterator[str]:
    """Yields a warning for each schedule whose length looks like epochs, as it is stepped after
    every optimizer step."""
    if epoch_steps < 2:
        return
    for part in _iter_schedules(schedule):
        name = _LENGTHS.get(type(part))
        length = getattr(part, name) if name else None
        if isinstance(part, lr_scheduler.MultiStepLR) and part.milestones:
            name, length = "milestones", max(part.milestones)
        if length is not None and 1 < length <= epochs:
            yield (
                f"warning: the experiment's schedule, a {type(part).__name__} with {name} up to "
                f"{length}, is stepped after every step, not every epoch of {epoch_steps}: so it "
                f"ends within the first {length} steps. In steps that is "
                f"{length * epoch_steps}; see training.count_epoch_steps in "
                "help(echelon.TrainingInfo)"
            )


def _iter_schedules(schedule: Any) -> Iterator[Any]:
    """Yields a schedule and those that it consists of."""
    if schedule is not None:
        yield schedule
        for part in getattr(schedule, "_schedulers", ()):
            yield from _iter_schedules(part)
