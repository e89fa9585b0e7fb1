"""How fast a run trains, and what its steps spend their time on.

Samples/s and ms/step are of all steps. The split of a step is of sampled steps, about twenty a
second, so that it costs next to nothing: a timestamp is recorded at each border of such a step. The
wait for data is that of all steps on a CPU. On a GPU the timestamps are events in its stream, read
when they have completed; the host never waits for them.

    asked ─ data ─ given ─ compute ─ own ─ communication ─ reduced ─ optimizer ─ stepped

`own` is when the last of this rank's own gradients is there, and `reduced` when those of all ranks
are averaged. Between them is the communication that the backward pass did not hide, and the wait
for slower ranks. A step that is captured as one CUDA graph has no borders inside.
"""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
from torch import Tensor

from echelon.config.schema import Config
from echelon.data.batches import Batch, BlockSlice
from echelon.experiment.definition import Experiment
from echelon.monitoring.stragglers import OwnTime, RecordStraggler, StragglerMonitor
from echelon.parallel.model_parallel import get_process_devices
from echelon.parallel.process_group import RankGroup
from echelon.snapshot.gpu_copy import read_peak_bytes

if TYPE_CHECKING:
    from echelon.monitoring.flops import FlopsCounter

_WARMUP_STEPS = 3
"""The first steps allocate memory and choose kernels: they say nothing of the others."""
_SAMPLE_EVERY_S = 0.05
_MAX_STEPS_BETWEEN_SAMPLES = 1023
_GOLDEN_RATIO = 0.6180339887498949
"""Its multiples, modulo 1, are spread evenly, and in step with nothing."""
_MAX_PENDING = 64
"""Sampled steps that wait to be read, where lines of metrics are rare."""
_MEMORY_EVERY_S = 1.0
_COUNT_FLOPS_AFTER_S = 3.0
"""A short run is not to wait for its operations to be counted."""


class StepTimestamps:
    """When one step passed its borders."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._on_gpu = device.type == "cuda"
        self._times: dict[str, Any] = {}
        self.record("asked")

    def record(self, border: str) -> None:
        """Record that the step is at this border now."""
        if not self._on_gpu:
            self._times[border] = time.perf_counter()
        elif not torch.cuda.is_current_stream_capturing():  # there it would be noted, not passed
            event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            event.record(torch.cuda.current_stream(self._device))
            self._times[border] = event

    def watch_backward(self, loss: Tensor) -> None:
        """Record when the backward pass of this loss is complete on this rank, before DDP's own
        callback waits for the other ranks. Callbacks run in the order in which they were queued,
        and the hook of the loss is the first to queue one."""
        loss.register_hook(self._queue_callback)  # type: ignore[no-untyped-call]

    def _queue_callback(self, grad: Tensor) -> None:
        engine = torch.autograd.Variable._execution_engine
        engine.queue_callback(lambda: self.record("own"))

    def has_completed(self) -> bool:
        """Return whether all timestamps can be read without waiting."""
        last = self._times.get("stepped")
        return last is not None and (not self._on_gpu or bool(last.query()))

    def compute_split(self) -> StepSplit:
        """Return the times between the borders that were recorded."""
        computed = "own" if "own" in self._times else "reduced"
        return StepSplit(
            self._compute_elapsed_ms("asked", "given"),
            self._compute_elapsed_ms("given", computed),
            self._compute_elapsed_ms("own", "reduced"),
            self._compute_elapsed_ms("reduced", "stepped"),
        )

    def _compute_elapsed_ms(self, start: str, end: str) -> float | None:
        a, b = self._times.get(start), self._times.get(end)
        if a is None or b is None:
            return None
        return float(a.elapsed_time(b)) if self._on_gpu else 1e3 * (b - a)


class StepSplit(NamedTuple):
    """Milliseconds of a step; None: not known."""

    data: float | None
    compute: float | None
    communication: float | None
    optimizer: float | None


def create_speed_monitor(
    experiment: Experiment, config: Config, group: RankGroup, record_straggler: RecordStraggler
) -> SpeedMonitor:
    """Return the monitor of this rank. Call it before anything wraps the model, because
    operations are counted on a copy of it. `record_straggler` is called on rank 0."""
    world = group.world
    devices = list(get_process_devices(world))
    flops = None
    if world.rank == 0 and devices[0].type == "cuda":
        from echelon.monitoring.flops import FlopsCounter, get_peak_flops

        name = torch.cuda.get_device_name(devices[0])
        peak = get_peak_flops(name, config.trainer.precision)
        flops = FlopsCounter(experiment, peak * len(devices) * world.size) if peak else None
    stragglers = StragglerMonitor(group, config.launch, record_straggler)
    return SpeedMonitor(devices, flops, stragglers if world.size > 1 else None)


class SupportsStepTimer(Protocol):
    """A replica that records timestamps within its step while ``step_timer`` is set."""

    step_timer: StepTimestamps | None


class SpeedMonitor:
    """Measures the speed of one rank."""

    def __init__(
        self,
        devices: list[torch.device],
        flops: FlopsCounter | None = None,
        stragglers: StragglerMonitor | None = None,
    ) -> None:
        self._devices = devices
        self._on_gpu = devices[0].type == "cuda"
        self._flops = flops
        self._stragglers = stragglers
        self._skip = self._skipped = _WARMUP_STEPS
        self._sampled_at = time.perf_counter()
        self._sample_count = 0
        self._waited_s, self._waited_steps = 0.0, 0
        self._pending: list[StepTimestamps] = []
        self._begun = time.monotonic()
        self._interval_start = (self._begun, 0, 0)
        self._memory_at = 0.0

    def restart_interval(self, step: int, samples: int) -> None:
        """Begin a new interval: what was done since the last line was not training."""
        self._interval_start = (time.monotonic(), step, samples)

    def exclude_time(self, seconds: float) -> None:
        """Leave so many seconds out of the present interval: they were not training."""
        then, step, samples = self._interval_start
        self._interval_start = (then + seconds, step, samples)

    def sample_batches(
        self, batches: Iterable[Batch | BlockSlice], replica: SupportsStepTimer
    ) -> Iterator[Batch | BlockSlice]:
        """Yield the batches; now and then the step of one is sampled."""
        iterator = iter(batches)
        while True:
            timestamps = None
            if self._skip:
                self._skip -= 1
            else:
                timestamps = StepTimestamps(self._devices[0])
            asked_s = time.perf_counter()
            batch = next(iterator, None)
            if batch is None:
                return
            self._waited_s += time.perf_counter() - asked_s
            self._waited_steps += 1
            if self._flops is not None:
                self._flops.keep_shapes(batch)
            if timestamps is None:
                yield batch
                continue
            timestamps.record("given")
            replica.step_timer = timestamps
            yield batch
            replica.step_timer = None
            self._add_sample(timestamps)

    def _add_sample(self, timestamps: StepTimestamps) -> None:
        """Keep a sample, and decide how many steps pass until the next.

        That follows from the mean duration of a step, not from that of the sampled one: after a
        quick step more of them would be left out, and what is seen would be too quick. The number
        varies, because steps may take turns: each of two loader processes gives every second batch.
        """
        now = time.perf_counter()
        mean_s = (now - self._sampled_at) / (self._skipped + 1)
        self._sampled_at = now
        self._sample_count += 1
        spread = 0.5 + self._sample_count * _GOLDEN_RATIO % 1
        steps = int(spread * _SAMPLE_EVERY_S / max(mean_s, 1e-6))
        self._skip = self._skipped = min(_MAX_STEPS_BETWEEN_SAMPLES, steps)
        self._pending = [*self._pending[-_MAX_PENDING:], timestamps]

    def measure_interval(self, step: int, samples: int) -> dict[str, float]:
        """Return the speed metrics since the last call. What was not measured since then is left
        out."""
        now, (start, last_step, last_samples) = time.monotonic(), self._interval_start
        self._interval_start = (now, step, samples)
        seconds = max(1e-9, now - start)
        metrics: dict[str, float] = {
            "samples_per_s": round((samples - last_samples) / seconds, 1),
            "step_ms": round(1e3 * seconds / max(1, step - last_step), 4),
        }
        if (
            self._flops is not None
            and (mfu := self._compute_mfu(now, metrics["samples_per_s"])) is not None
        ):
            metrics["mfu"] = round(mfu, 4)
        if self._pending:
            metrics |= self._read_samples()
        if not self._on_gpu and self._waited_steps and "data_ms" in metrics:
            # Batches are late in turns where several processes load them, so all are counted. A GPU
            # need not wait where the host does.
            metrics["data_ms"] = round(1e3 * self._waited_s / self._waited_steps, 4)
            self._waited_s, self._waited_steps = 0.0, 0
        if self._stragglers is not None:
            metrics |= self._stragglers.compare_ranks(now)
        if now >= self._memory_at:
            self._memory_at = now + _MEMORY_EVERY_S
            metrics["memory_gb"] = round(self._get_peak_memory_bytes() / 1e9, 3)
        return metrics

    def _compute_mfu(self, now: float, samples_per_s: float) -> float | None:
        assert self._flops is not None
        if not self._flops.is_counted and now >= self._begun + _COUNT_FLOPS_AFTER_S:
            self._flops.ensure_counted()
            self.restart_interval(*self._interval_start[1:])
        return self._flops.compute_mfu(samples_per_s)

    def _read_samples(self) -> dict[str, float]:
        splits = [moments.compute_split() for moments in self._pending if moments.has_completed()]
        self._pending = [moments for moments in self._pending if not moments.has_completed()]
        if self._stragglers is not None:
            self._stragglers.add_steps(_get_own_time(split) for split in splits)
        metrics = {}
        for part in StepSplit._fields:
            values = [v for split in splits if (v := getattr(split, part)) is not None]
            if values:
                metrics[f"{part}_ms"] = round(sum(values) / len(values), 4)
        return metrics

    def _get_peak_memory_bytes(self) -> int:
        """Return the most this process ever used: of its fullest GPU, or of the machine without
        one."""
        if self._on_gpu:
            return max(read_peak_bytes(device) for device in self._devices)
        unit = 1 if sys.platform == "darwin" else 1024
        return unit * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def _get_own_time(split: StepSplit) -> OwnTime | None:
    """Return what a rank took before it waited for any other; None if it is not known. A sharded
    model waits inside its computation, and a captured step has no borders."""
    if split.data is None or split.compute is None:
        return None
    return OwnTime(split.data, 0.0 if split.communication is None else split.compute)
