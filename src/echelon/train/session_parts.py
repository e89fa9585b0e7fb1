"""What a user's loop trains, as parts of its snapshots: modules, optimizers, and whatever else has
a state."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from echelon.errors import EchelonError, ExitCode, Fault
from echelon.experiment.optimizer_flags import OptimizerFlags, match_state_layout
from echelon.experiment.schedule_length import load_schedule_state
from echelon.experiment.sparse_parameters import find_sparse_tables
from echelon.experiment.trained_parameters import (
    find_changed_flags,
    read_trained_flags,
    set_trained_flags,
)
from echelon.parallel.process_group import RankGroup, broadcast_buffers
from echelon.snapshot.finite_check import are_all_finite
from echelon.snapshot.staging_buffer import find_unsavable_values
from echelon.snapshot.state import (
    find_differing_state,
    find_extra_state_faults,
    require_equal_state,
)
from echelon.train.train_data import STREAM_PART

RNG_PART = "rng"
"""The part of a snapshot with the random numbers of all ranks."""
_OWN_PARTS = {RNG_PART: "the random numbers", STREAM_PART: "the positions of a stream"}


class SessionParts:
    """The parts by name, in the order in which they came.

    A part is restored when it comes, if the run continues from a snapshot: one rank has it, and the
    others receive it.
    """

    def __init__(
        self,
        group: RankGroup,
        load_part: Callable[[str], Any],
        info: Mapping[str, Any],
        takes_new_settings: bool,
    ) -> None:
        """`load_part`, a collective, returns a part of the snapshot, and `info` is that of it, or
        empty. `takes_new_settings` is set for a snapshot that a person gave by its path: then
        learning rates and the like that the loop has changed since win over those in the
        snapshot."""
        self._group, self.load_part = group, load_part
        self._saved_parts: list[str] = info.get("parts", [])
        self._step = int(info.get("step", 0))
        self._saved_settings: Mapping[str, Any] = info.get("optimizer_settings", {})
        self._saved_changes: Mapping[str, Mapping[str, bool]] = info.get("changed_parameters", {})
        self._built_flags: dict[str, dict[str, bool]] = {}
        """Of every module, which parameters were trained when the loop began."""
        self._takes_new_settings = takes_new_settings
        self.optimizer_settings: dict[str, list[dict[str, Any]]] = {}
        """The settings of every group of every optimizer, as the loop has built them."""
        self._parts: dict[str, Any] = {}
        self.own_names: dict[int, str] = {}
        """By id, the names of parts that an experiment has named."""
        self.optimizer_flags: dict[int, OptimizerFlags] = {}
        """By the id of an optimizer, what was chosen for this machine and belongs in no
        snapshot."""
        self.equal_state: Mapping[str, Any] = {}
        """Parts that have to be equal on all ranks whenever they are saved."""
        self._modules: list[nn.Module] = []
        self.parameter_ids: set[int] = set()
        self.optimizer: torch.optim.Optimizer | None = None
        """The first one."""
        self.is_complete = False
        """Whether the loop has begun, so that nothing can be added."""
        self._has_warned = False
        """Whether the user knows that ranks have registered different state."""

    def add_module(self, module: nn.Module) -> None:
        """Add a module: its weights are the same on every rank from here on."""
        if self._group.world.size > 1 and (tables := find_sparse_tables(module)):
            raise EchelonError(
                Fault(
                    f"{next(iter(tables))} has sparse gradients, which a loop of your own trains "
                    "on one process alone",
                    "make the embedding with sparse=False, or return an echelon.Experiment",
                )
            )
        self.add_part("model", module)
        self._modules.append(module)
        self.parameter_ids |= {id(p) for p in module.parameters()}
        broadcast_buffers([p.detach() for p in module.parameters()])
        broadcast_buffers(list(module.buffers()))

    def list_buffers(self) -> list[Tensor]:
        """Return the buffers of all modules, which are rank 0's after every iteration and in every
        evaluation. Listed anew, as a module may have put other tensors in their place."""
        return [buffer for _, module in self._iter_modules() for buffer in module.buffers()]

    def add_part(self, name: str, part: Any, is_numbered: bool = True) -> None:
        """Add a part of the snapshots, and restore it if there is one.

        Parts of one kind are numbered from the second on: model, model-2.
        """
        if self.is_complete:
            raise EchelonError(
                Fault(
                    f"{name} comes to the session after its loop has begun",
                    "prepare and register everything before session.batches",
                )
            )
        if any(part is known for known in self._parts.values()):
            raise EchelonError(
                Fault(
                    f"the session is given the same {type(part).__name__} twice",
                    "prepare and register every part once",
                )
            )
        name = self.own_names.get(id(part), name)
        count = sum(known.partition("-")[0] == name for known in self._parts)
        if count and not is_numbered:
            raise EchelonError(
                Fault(f"{name} is registered twice", "give every part a name of its own")
            )
        if name in _OWN_PARTS:
            raise EchelonError(
                Fault(f"{name} is the name of {_OWN_PARTS[name]}", "give the part another name")
            )
        if self.optimizer is None and isinstance(part, torch.optim.Optimizer):
            self.optimizer = part
        key = f"{name}-{count + 1}" if count else name
        self._parts[key] = part
        if isinstance(part, torch.optim.Optimizer):
            self.optimizer_settings[key] = _read_group_settings(part)
        if key in self._saved_parts:
            _load_part(key, part, self.load_part(key), self._step)
            if self._takes_new_settings and isinstance(part, torch.optim.Optimizer):
                self._apply_new_settings(key, part)

    def _apply_new_settings(self, key: str, optimizer: torch.optim.Optimizer) -> None:
        """Set what the loop builds otherwise than when the snapshot was saved."""
        before = self._saved_settings.get(key, [])
        for group, old, new in zip(
            optimizer.param_groups, before, self.optimizer_settings[key], strict=False
        ):
            changed = {name: value for name, value in new.items() if old.get(name) != value}
            if "initial_lr" in changed and self._group.world.rank == 0:
                print(
                    f"warning: the schedule of {key} goes on with the learning rates of the "
                    f"snapshot, not with lr={changed['initial_lr']:g}; leave it out of "
                    "session.prepare to begin a new one",
                    file=sys.stderr,
                )
            group.update({n: tuple(v) if isinstance(v, list) else v for n, v in changed.items()})

    def begin_loop(self) -> None:
        """Check that all ranks have the same parts and that these can be saved, and freeze and thaw
        parameters as the loop had done it before the snapshot. Nothing can be added from here on.
        """
        self._require_same()
        self._require_known_types()
        self.is_complete = True
        for key, module in self._iter_modules():
            self._built_flags[key] = read_trained_flags(module)
            set_trained_flags(module, self._saved_changes.get(key, {}))

    def find_changed_parameters(self) -> dict[str, dict[str, bool]]:
        """Return by module and name the parameters that the loop has frozen or thawed, and whether
        they are trained now."""
        changed = {
            key: find_changed_flags(module, self._built_flags[key])
            for key, module in self._iter_modules()
        }
        return {key: flags for key, flags in changed.items() if flags}

    def _require_known_types(self) -> None:
        """Raise where a snapshot could not hold what a part keeps, before anything is trained."""
        faults = []
        for key, part in self._parts.items():
            if isinstance(part, nn.Module):
                faults += find_extra_state_faults(part, key)
            elif not isinstance(part, torch.optim.Optimizer):
                faults += find_unsavable_values(part.state_dict(), (key,))
        if faults:
            raise EchelonError(*faults)

    def _iter_modules(self) -> Iterator[tuple[str, nn.Module]]:
        """Yield the parts that are modules, registered ones included."""
        for key, part in self._parts.items():
            if isinstance(part, nn.Module):
                yield key, part

    def _require_same(self) -> None:
        """Raise where ranks have different parts, or other ones than the snapshot."""
        names = list(self._parts)
        of_ranks = self._group.gather_json(names)
        others = [(rank, other) for rank, other in enumerate(of_ranks) if other != names]
        if different := self._group.broadcast_json(others[:1]):
            [(rank, other)] = different
            raise EchelonError(
                Fault(
                    f"rank {rank} has the parts {', '.join(other)}, and not those of rank 0",
                    "prepare and register the same parts in the same order on every rank",
                )
            )
        if self._saved_parts and sorted(self._saved_parts) != sorted(names):
            gone = [n for n in self._saved_parts if n not in names]
            new = [n for n in names if n not in self._saved_parts]
            raise EchelonError(
                *(
                    Fault(
                        f"the snapshot of step {self._step} has the part {n}, the session does not",
                        "prepare and register what the run was begun with",
                    )
                    for n in gone
                ),
                *(
                    Fault(
                        f"the session has the part {n}, the snapshot of step {self._step} does not",
                        "start anew with it: trainer.resume=never",
                    )
                    for n in new
                ),
            )

    def load_rng_rows(self) -> Tensor | None:
        """Return the random states of the ranks that saved the snapshot; None without one."""
        if not self._saved_parts:
            return None
        rows: Tensor = self.load_part(RNG_PART)["ranks"]
        return rows

    def collect_state(self) -> dict[str, Any]:
        """Return the state of every part."""
        state = {name: part.state_dict() for name, part in self._parts.items()}
        for name, part in self._parts.items():
            if (flags := self.optimizer_flags.get(id(part))) is not None:
                state[name] = flags.make_portable_state(state[name])
        return state

    @property
    def names(self) -> list[str]:
        """The names of the parts."""
        return list(self._parts)

    def require_savable(self, step: int) -> None:
        """Raise on all ranks where the state cannot be saved for all: a weight that is not finite
        could never be resumed."""
        require_equal_state(self.equal_state, self._group)
        self._require_equal_schedules(step)
        self._warn_of_unequal_state(step)
        bad = [
            name
            for module in self._modules
            for name, parameter in module.named_parameters()
            if not are_all_finite([parameter.detach()])
        ]
        if self._group.is_any_true(bool(bad)):
            names = ", ".join(bad[:3]) or "weights of another rank"
            raise EchelonError(
                Fault(
                    f"the state after step {step} is not finite ({names}) and was not saved",
                    "continue from the snapshot before with a smaller learning rate, or find the "
                    "batch: torch.autograd.set_detect_anomaly(True)",
                )
            )

    def _require_equal_schedules(self, step: int) -> None:
        """Raise on all ranks where a schedule differs between them, and so do their weights."""
        schedules = {
            key: part
            for key, part in self._parts.items()
            if isinstance(part, torch.optim.lr_scheduler.LRScheduler)
        }
        if differing := find_differing_state(schedules, self._group):
            raise EchelonError(
                *(
                    Fault(
                        f"{key}, a {type(schedules[key]).__name__}, differs between the ranks "
                        f"after step {step}, so they train with different learning rates",
                        "step it equally often on every rank, and with a number that all of them "
                        "have: schedule.step(session.gather(losses).mean())",
                    )
                    for key in differing
                ),
                exit=ExitCode.FAILED,
            )

    def _warn_of_unequal_state(self, step: int) -> None:
        """Say once on rank 0 that a registered part differs between the ranks. It may be meant, as
        with an average that contains the statistics of batch norms."""
        registered = {
            key: part
            for key, part in self._parts.items()
            if key not in self.equal_state
            and not isinstance(
                part,
                (nn.Module, torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler),
            )
        }
        if self._has_warned or not (names := find_differing_state(registered, self._group)):
            return
        self._has_warned = True
        if self._group.world.rank == 0:
            print(
                f"warning: {', '.join(names)} differs between the ranks after step {step}, and a "
                "snapshot keeps rank 0's for all of them: a resumed run will not go on as this one",
                file=sys.stderr,
            )


def _load_part(key: str, part: Any, state: Any, step: int) -> None:
    """Give a part its state; what does not fit becomes a fault."""
    try:
        state = _move_like(state, part.state_dict())
        if isinstance(part, torch.optim.lr_scheduler.LRScheduler):
            load_schedule_state(part, state)  # as long as it is built now, if it trains longer
        else:
            part.load_state_dict(state)
        if isinstance(part, torch.optim.Optimizer):
            match_state_layout(part)
    except Exception as error:
        first = " ".join(str(error).split())[:300]
        raise EchelonError(
            Fault(
                f"{key} ({type(part).__name__}) cannot be restored from the snapshot of step "
                f"{step}: {first}",
                "build it as it was, or start anew: trainer.resume=never",
            )
        ) from error


def _read_group_settings(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """Return the plain numbers and flags of every group, as JSON gives them back."""
    groups = [
        {
            name: value
            for name, value in group.items()
            if name != "params" and isinstance(value, (int, float, str, list, tuple))
        }
        for group in optimizer.param_groups
    ]
    plain: list[dict[str, Any]] = json.loads(json.dumps(groups))
    return plain


def _move_like(state: Any, example: Any) -> Any:
    """Return the state with its tensors on the devices that those of the example are on: a part
    that only keeps what it is given would otherwise find itself on the CPU."""
    if isinstance(state, Tensor) and isinstance(example, Tensor):
        return state.to(example.device)
    if isinstance(state, dict) and isinstance(example, dict):
        return {k: _move_like(v, example.get(k)) for k, v in state.items()}
    return state
