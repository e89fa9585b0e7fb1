"""How fast a run trains, and what its steps spend their time on.

Samples/s and ms/step are of all steps. Their split is of sampled ones, at most twenty a second, so
that it costs next to nothing: a moment is noted at each border of such a step. On a GPU the moments
are events in its stream, read when they have passed: nobody ever waits for them.

    asked ─ data ─ given ─ compute ─ own ─ communication ─ reduced ─ optimizer ─ stepped

`own` is when the last of this rank's own gradients is there, and `reduced` when those of all ranks
are averaged: between them lies the communication that the backward pass did not hide, and the wait
for slower ranks. A step that is captured as one CUDA graph has no borders within.
"""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from echelon.config.schema import Config
from echelon.data.batches import Batch, Cut
from echelon.train.experiment import Experiment
from echelon.train.flops import Flops, peak_flops
from echelon.train.group import Group
from echelon.train.stages import devices_of
from echelon.train.stragglers import Own, Stragglers

_FIRST = 3
"""The first steps allocate memory and choose kernels: they say nothing of the others."""
_SAMPLE_EVERY_S = 0.05
_MOST_BETWEEN = 1023
_KEPT = 64
"""Sampled steps that wait to be read, where lines of metrics are rare."""
_MEMORY_EVERY_S = 1.0
_COUNT_AFTER_S = 3.0
"""A short run is not to wait for its operations to be counted."""


class Moments:
    """When one step passed its borders."""

    def __init__(self, device: torch.device) -> None:
        self.begun = time.perf_counter()
        self._device = device
        self._on_gpu = device.type == "cuda"
        self._at: dict[str, Any] = {}
        self.put("asked")

    def put(self, border: str) -> None:
        if not self._on_gpu:
            self._at[border] = time.perf_counter()
        elif not torch.cuda.is_current_stream_capturing():  # there it would be noted, not passed
            event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            event.record(torch.cuda.current_stream(self._device))
            self._at[border] = event

    def watch(self, loss: Tensor) -> None:
        """Note when its backward pass is through, before DDP's own callback waits for the others:
        callbacks are called in the order of their wishes, and the loss is first of all."""
        loss.register_hook(self._ask_to_be_called)  # type: ignore[no-untyped-call]

    def _ask_to_be_called(self, grad: Tensor) -> None:
        engine = torch.autograd.Variable._execution_engine
        engine.queue_callback(lambda: self.put("own"))

    def passed(self) -> bool:
        last = self._at.get("stepped")
        return last is not None and (not self._on_gpu or bool(last.query()))

    def split(self) -> Split:
        """What lies between borders that were noted."""
        computed = "own" if "own" in self._at else "reduced"
        return Split(
            self._ms("asked", "given"),
            self._ms("given", computed),
            self._ms("own", "reduced"),
            self._ms("reduced", "stepped"),
        )

    def _ms(self, start: str, end: str) -> float | None:
        a, b = self._at.get(start), self._at.get(end)
        if a is None or b is None:
            return None
        return float(a.elapsed_time(b)) if self._on_gpu else 1e3 * (b - a)


class Split(NamedTuple):
    """Milliseconds of a step; None: not known."""

    data: float | None
    compute: float | None
    communication: float | None
    optimizer: float | None


def speed_of(experiment: Experiment, config: Config, group: Group) -> Speed:
    """Before anything wraps the model, as operations are counted on a copy."""
    world = group.world
    devices = list(devices_of(world))
    flops = None
    if world.rank == 0 and devices[0].type == "cuda":
        name = torch.cuda.get_device_name(devices[0])
        peak = peak_flops(name, config.trainer.precision)
        flops = Flops(experiment, peak * len(devices) * world.size) if peak else None
    return Speed(devices, flops, Stragglers(group) if world.size > 1 else None)


class Sampled(Protocol):
    """A replica: it notes the borders within its step where moments are given."""

    sampled: Moments | None


class Speed:
    """Of one rank."""

    def __init__(
        self,
        devices: list[torch.device],
        flops: Flops | None = None,
        stragglers: Stragglers | None = None,
    ) -> None:
        self._devices = devices
        self._on_gpu = devices[0].type == "cuda"
        self._flops = flops
        self._stragglers = stragglers
        self._skip = _FIRST
        self._pending: list[Moments] = []
        self._begun = time.monotonic()
        self._since = (self._begun, 0, 0)
        self._memory_at = 0.0

    def restart(self, step: int, samples: int) -> None:
        """What was done since the last line was no training."""
        self._since = (time.monotonic(), step, samples)

    def leave_out(self, seconds: float) -> None:
        """So much of the time since the last line was no training."""
        then, step, samples = self._since
        self._since = (then + seconds, step, samples)

    def feed(self, batches: Iterable[Batch | Cut], replica: Sampled) -> Iterator[Batch | Cut]:
        """The batches; now and then one whose step is sampled."""
        every = iter(batches)
        while True:
            sampled = None
            if self._skip:
                self._skip -= 1
            else:
                sampled = Moments(self._devices[0])
            batch = next(every, None)
            if batch is None:
                return
            if self._flops is not None:
                self._flops.see(batch)
            if sampled is None:
                yield batch
                continue
            sampled.put("given")
            replica.sampled = sampled
            yield batch
            replica.sampled = None
            self._keep(sampled)

    def _keep(self, sampled: Moments) -> None:
        taken = time.perf_counter() - sampled.begun
        self._skip = min(_MOST_BETWEEN, int(_SAMPLE_EVERY_S / max(taken, 1e-6)))
        self._pending = [*self._pending[-_KEPT:], sampled]

    def line(self, step: int, samples: int) -> dict[str, float]:
        """Since the last one. What was not measured since then is not in it."""
        now, (then, last_step, last_samples) = time.monotonic(), self._since
        self._since = (now, step, samples)
        seconds = max(1e-9, now - then)
        told: dict[str, float] = {
            "samples_per_s": round((samples - last_samples) / seconds, 1),
            "step_ms": round(1e3 * seconds / max(1, step - last_step), 4),
        }
        if self._flops is not None and (mfu := self._mfu(now, told["samples_per_s"])) is not None:
            told["mfu"] = round(mfu, 4)
        if self._pending:
            told |= self._read()
        if self._stragglers is not None:
            told |= self._stragglers.compare(now)
        if now >= self._memory_at:
            self._memory_at = now + _MEMORY_EVERY_S
            told["memory_gb"] = round(self._memory_bytes() / 1e9, 3)
        return told

    def _mfu(self, now: float, samples_per_s: float) -> float | None:
        assert self._flops is not None
        if not self._flops.counted and now >= self._begun + _COUNT_AFTER_S:
            self._flops.count()
            self.restart(*self._since[1:])
        return self._flops.mfu(samples_per_s)

    def _read(self) -> dict[str, float]:
        splits = [moments.split() for moments in self._pending if moments.passed()]
        self._pending = [moments for moments in self._pending if not moments.passed()]
        if self._stragglers is not None:
            self._stragglers.note(_own(split) for split in splits)
        told = {}
        for part in Split._fields:
            values = [v for split in splits if (v := getattr(split, part)) is not None]
            if values:
                told[f"{part}_ms"] = round(sum(values) / len(values), 4)
        return told

    def _memory_bytes(self) -> int:
        """The most this process ever held: of its fullest device, or of the machine."""
        if self._on_gpu:
            return max(torch.cuda.max_memory_allocated(device) for device in self._devices)
        unit = 1 if sys.platform == "darwin" else 1024
        return unit * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def _own(split: Split) -> Own | None:
    """What a rank took before it waited for anybody. A sharded model waits within its computation,
    and a captured step says nothing at all."""
    if split.data is None or split.compute is None:
        return None
    return Own(split.data, 0.0 if split.communication is None else split.compute)
