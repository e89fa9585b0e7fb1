"""Memory ran out: what was requested, what was free, what uses the rest, and what to set.

torch's message has the first two. What uses the rest is counted here: parameters, gradients and the
optimizer's state have the same size in every step; activations grow with the samples that a process
computes at a time.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from echelon.config.schema import Config
from echelon.errors import EchelonError, ExitCode, Fault
from echelon.parallel.model_parallel import get_process_devices
from echelon.runs.run_folder import Run
from echelon.snapshot.layout import list_snapshots
from echelon.tracking.summary import format_run_argument, shorten_path
from echelon.utils.text import format_bytes
from echelon.world import World

if TYPE_CHECKING:
    from echelon.train.loop import Training

_UNITS = {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
_AMOUNT = r"([0-9.]+) (bytes|KiB|MiB|GiB|TiB)"
_REQUESTED = re.compile(r"tried to allocate " + _AMOUNT, re.IGNORECASE)
_FREE = re.compile(rf"total capacity of {_AMOUNT} of which {_AMOUNT} is free")
_FRAGMENTED = re.compile(rf"{_AMOUNT} is reserved by PyTorch but unallocated")
_VARIABLE = re.compile(r"PYTORCH_[A-Z_]*ALLOC_CONF")
_ALLOC_CONF = "PYTORCH_CUDA_ALLOC_CONF"
_MESSAGES = (
    "defaultcpuallocator: can't allocate memory",
    "defaultcpuallocator: not enough memory",
    "cuda error: out of memory",
    "cublas_status_alloc_failed",
)
"""Of the errors that torch has no class for."""
_LINE_BREAK = "\n        "


def find_out_of_memory(error: BaseException) -> BaseException | None:
    """Return the error itself, or the one among its causes, that says memory ran out; None
    otherwise."""
    current: BaseException | None = error
    while current is not None:
        text = str(current).lower()
        if isinstance(current, torch.OutOfMemoryError | MemoryError):
            return current
        if isinstance(current, RuntimeError) and any(sign in text for sign in _MESSAGES):
            return current
        current = current.__cause__
    return None


def explain_out_of_memory(
    error: BaseException, config: Config, world: World, run: Run | None, training: Training | None
) -> EchelonError:
    """In sentences: for the person whose model it is, who knows its traceback by heart."""
    on_gpu = get_process_devices(world)[0].type == "cuda"
    memory_use = MemoryUse.measure_training(training)
    is_evaluating = training is not None and training.evaluations.is_running
    is_check = training is not None and training.is_sanity_check
    what = [
        _describe_request(str(error), world, on_gpu),
        *(["it was the check of the evaluation before the first step"] if is_check else []),
        *memory_use.describe(_get_samples_per_pass(config, world), on_gpu),
    ]
    suggestions = list(_suggest_settings(config, world, memory_use, is_evaluating, on_gpu))
    if is_check:  # the batch of a step has nothing to do with it
        suggestions = [text for text in suggestions if not text.startswith("trainer.batch_size")]
    if unused := _find_fragmented_bytes(str(error)):
        what.append(f"{format_bytes(unused)} more lie in pieces too small")
        variable = found[0] if (found := _VARIABLE.search(str(error))) else _ALLOC_CONF
        suggestions.append(f"{variable}=expandable_segments:True before the command")
    advice = ["any of these needs less:", *suggestions] if suggestions else ["give it more memory"]
    if run is not None:
        setting, _ = next(_suggest_smaller_batches(config, world, is_evaluating), ("", ""))
        advice.append(_describe_newest_snapshot(run, training, setting))
    return EchelonError(Fault("; ".join(what), _LINE_BREAK.join(advice)), exit=ExitCode.FAILED)


# --- what was asked for, and what was there ---


def _describe_request(message: str, world: World, on_gpu: bool) -> str:
    """Return how much was requested and how much was free."""
    where = f"{world.devices[0]} of rank {world.rank}" if on_gpu else f"rank {world.rank}"
    tried = _parse_bytes(_REQUESTED.search(message))
    text = f"out of memory on {where}"
    if tried is not None:
        text += f": {format_bytes(tried)} were asked for"
    free, total = _read_free_and_total(message, on_gpu)
    if total is None or free is None:
        return text
    return f"{text}{',' if tried else ':'} {format_bytes(free)} of {format_bytes(total)} were free"


def _read_free_and_total(message: str, on_gpu: bool) -> tuple[float | None, float | None]:
    """Return free and total bytes. torch's message is preferred, because it was true when the
    request failed; the machine's memory is asked otherwise."""
    if found := _FREE.search(message):
        total, unit, free, free_unit = found.groups()
        return float(free) * _UNITS[free_unit], float(total) * _UNITS[unit]
    if on_gpu:
        return None, None
    import psutil

    memory = psutil.virtual_memory()
    return memory.available, memory.total


def _find_fragmented_bytes(message: str) -> float | None:
    """Return the bytes that are reserved in pieces too small to use, if they would have been
    enough."""
    unused, tried = (
        _parse_bytes(_FRAGMENTED.search(message)),
        _parse_bytes(_REQUESTED.search(message)),
    )
    return unused if unused and tried and unused >= tried else None


def _parse_bytes(found: re.Match[str] | None) -> float | None:
    return float(found[1]) * _UNITS[found[2]] if found else None


# --- what holds the rest ---


@dataclass(frozen=True)
class MemoryUse:
    """Bytes that this rank uses; all zero if the training was not built yet."""

    parameter_bytes: int = 0
    gradient_bytes: int = 0
    optimizer_bytes: int = 0
    data_bytes: int = 0
    peak_bytes: int = 0

    @classmethod
    def measure_training(cls, training: Training | None) -> MemoryUse:
        """Return the memory use of a training as it is now."""
        if training is None:
            return cls()
        model, device = training.experiment.model, training.device
        trained = [p for p in model.parameters() if p.requires_grad]
        data = getattr(training.source, "tensors", ())
        return cls(
            parameter_bytes=_count_bytes(model.parameters()),
            gradient_bytes=_count_bytes(trained),
            optimizer_bytes=_count_bytes(_iterate_tensors(training.experiment.optimizer.state)),
            data_bytes=_count_bytes(t for t in data if t.device == device),
            peak_bytes=torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0,
        )

    @property
    def constant_bytes(self) -> int:
        """What is needed whatever the batch size is."""
        return self.parameter_bytes + self.gradient_bytes + self.optimizer_bytes + self.data_bytes

    def describe(self, samples_per_pass: int, on_gpu: bool) -> Iterator[str]:
        """Yield what uses the memory, as parts of a sentence."""
        if not self.parameter_bytes:
            return
        parts = {"parameters": self.parameter_bytes, "gradients": self.gradient_bytes}
        parts |= {"optimizer state": self.optimizer_bytes, "data": self.data_bytes}
        rest = self.peak_bytes - self.constant_bytes
        if on_gpu and rest > 0:
            parts[
                f"activations of {_format_samples(samples_per_pass)} at a time, "
                "and what else a step needs"
            ] = rest
        text = ", ".join(f"{name} {format_bytes(count)}" for name, count in parts.items() if count)
        yield f"used by {text}"
        if not on_gpu:
            yield f"a step computes {_format_samples(samples_per_pass)} at a time"


def _format_samples(count: int) -> str:
    return f"{count:,} samples" if count != 1 else "1 sample"


def _iterate_tensors(tree: Any) -> Iterator[Tensor]:
    """Yield the tensors in nested dicts, such as the state of an optimizer."""
    if isinstance(tree, Tensor):
        yield tree
    elif isinstance(tree, dict):
        for value in tree.values():
            yield from _iterate_tensors(value)


def _count_bytes(tensors: Any) -> int:
    """Return the bytes of tensors; of a sharded tensor, those of this rank."""
    return sum(getattr(t, "_local_tensor", t).nbytes for t in tensors)


def _get_samples_per_pass(config: Config, world: World) -> int:
    """Return the largest number of samples that a process computes at a time."""
    return math.ceil(config.trainer.batch_size / world.size / config.trainer.accumulate)


# --- what to do ---


def _suggest_settings(
    config: Config, world: World, memory_use: MemoryUse, is_evaluating: bool, on_gpu: bool
) -> Iterator[str]:
    """Yield settings that need less memory, the most helpful first. Smaller batches do not make
    a large model smaller, so for one they come later."""
    trainer, replica = config.trainer, config.replica
    large_model = (
        not memory_use.parameter_bytes or memory_use.constant_bytes > memory_use.peak_bytes / 2 > 0
    )
    smaller = [way for _, way in _suggest_smaller_batches(config, world, is_evaluating)]
    if is_evaluating or not large_model:
        yield from smaller
    if replica.devices > 1:
        yield f"replica.devices={2 * replica.devices} (each holds less of the model)"
    elif not replica.is_sharded and (on_gpu or world.size > 1):
        several = "" if world.size > 1 else " on several GPUs"
        yield f"replica.kind=fsdp{several} (each holds a shard of the model)"
    elif (shards := replica.count_shards(world.size)) < world.size:
        more = replace(replica, shards=shards + 1).count_shards(world.size)
        yield f"replica.shards={more} (each holds a smaller shard of the model)"
    if large_model and not is_evaluating:
        yield from smaller
    if trainer.precision in ("float32", "tf32") and on_gpu:
        yield "trainer.precision=bf16 (in a new run: the numbers change)"
    if trainer.batch_size > world.size:
        half = max(world.size, trainer.batch_size // 2)
        yield f"trainer.batch_size={half} (in a new run: the numbers change)"


def _suggest_smaller_batches(
    config: Config, world: World, is_evaluating: bool
) -> Iterator[tuple[str, str]]:
    """Yield settings with which this very run can go on, each with its explanation."""
    trainer = config.trainer
    if is_evaluating:
        each = trainer.eval_batch_size or trainer.batch_size
        if each > 1:
            yield (fewer := f"trainer.eval_batch_size={each // 2}"), fewer
        return
    if _get_samples_per_pass(config, world) > 1:
        more = f"trainer.accumulate={2 * trainer.accumulate}"
        yield more, f"{more} (the numbers stay)"
    if not config.replica.checkpoint:
        again = "replica.checkpoint=true"
        yield again, f"{again} (a third more computation)"


def _describe_newest_snapshot(run: Run, training: Training | None, setting: str) -> str:
    """Return what can be resumed and the command for it. Rank 0 waits for a save that is under
    way."""
    if training is not None and training.writer is not None:
        training.heartbeat.suspend()
        training.writer.wait()
    snapshots = list_snapshots(run.snapshots_folder)
    again = f"echelon resume {format_run_argument(run)} {setting}".rstrip()
    if snapshots:
        description = f"the last snapshot, {shorten_path(snapshots[-1])}, is intact"
    elif training is not None and training.is_sanity_check:
        description = "nothing was trained yet, so nothing is lost"
    elif training is not None and training.saved_step:  # by rank 0, which may still write it
        description = f"the first snapshot, of step {training.saved_step}, is on its way"
    else:
        description = "no snapshot yet"
    return f"{description}: {again}"
