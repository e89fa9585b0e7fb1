"""`trainer.profile=N`: what happens in N steps, as a trace of every rank and a table of rank 0.

The steps before them let kernels be chosen and memory be allocated. When they are over the profile
is written and training continues.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from echelon.errors import EchelonError, Fault
from echelon.tracking.summary import shorten_path

WARMUP_STEPS = 5
_MAX_ROWS = 8
_NAME_WIDTH = 44


def find_profile_fault(steps: int, total_steps: int) -> Fault | None:
    """Return the fault of a run that is too short for its profile; None if it is long enough."""
    if WARMUP_STEPS + steps <= total_steps:
        return None
    most = total_steps - WARMUP_STEPS
    return Fault(
        f"trainer.profile={steps}, after {WARMUP_STEPS} steps to warm up, but the run has "
        f"{total_steps} steps",
        f"set trainer.profile to {most} or less" if most > 0 else "train longer, or leave it out",
    )


def create_profiler(
    steps: int | None, step: int, total_steps: int, folder: Path, rank: int, device: torch.device
) -> StepProfiler | None:
    """Return the profiler of a run that is at ``step``, or None if none is wanted. A resumed run
    with too few steps left continues without one, since that is not worth an error."""
    if steps is None:
        return None
    if step == 0 and (fault := find_profile_fault(steps, total_steps)):
        raise EchelonError(fault)
    if find_profile_fault(steps, total_steps - step):
        if rank == 0 and step < total_steps:
            _print_message(
                f"trainer.profile={steps}: only {total_steps - step} steps are left, no profile"
            )
        return None
    return StepProfiler(steps, step, folder, rank, device)


class StepProfiler:
    """Records a trace of some steps after a warm-up, with torch's profiler, and then stops."""

    def __init__(
        self, steps: int, step: int, folder: Path, rank: int, device: torch.device
    ) -> None:
        self._first, self._last = step + WARMUP_STEPS + 1, step + WARMUP_STEPS + steps
        self._folder, self._rank, self._on_gpu = folder, rank, device.type == "cuda"
        self._profiler: Any = None

    def advance(self, step: int) -> float:
        """Call after each step. Returns the seconds that starting the profile or writing it
        took, which are not training time."""
        begun = time.monotonic()
        if step == self._first - 2:
            self._start()  # in the step before the first it warms itself up
        elif self._profiler is not None:
            self._profiler.step()
            if step == self._last:
                self._stop()
        else:
            return 0.0
        return time.monotonic() - begun

    def discard_profile(self) -> None:
        """Discard a profile that the run ended within. torch would crash at the end of the
        process otherwise, and whoever stops a run does not wait for a trace."""
        if self._profiler is not None:
            self._profiler.on_trace_ready = None
            self._stop()
            if self._rank == 0:
                _print_message(
                    f"the run ended within steps {self._first} to {self._last}: no profile"
                )

    def _start(self) -> None:
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # else it tells the screen that it starts
        from torch.profiler import ProfilerActivity, profile, schedule

        kinds = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if self._on_gpu else [])]
        active = self._last - self._first + 1
        self._profiler = profile(
            activities=kinds,
            schedule=schedule(wait=0, warmup=1, active=active, repeat=1),
            on_trace_ready=self._write,
            acc_events=True,
        )
        self._profiler.start()

    def _stop(self) -> None:
        self._profiler.stop()
        self._profiler = None

    def _write(self, profiler: Any) -> None:
        """Write the trace; on rank 0 also print where it is. A full disk costs the trace, not
        the training."""
        file = self._folder / f"steps-{self._first}-{self._last}-rank-{self._rank}.json.gz"
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            profiler.export_chrome_trace(str(file))
        except OSError as error:
            _print_message(f"warning: no trace: {error}")
            return
        if self._rank == 0:
            steps = f"steps {self._first} to {self._last}"
            _print_message(
                f"profiled {steps}: {shorten_path(file)} (open it in https://ui.perfetto.dev)"
            )
            _print_message(render_costliest_operators(profiler.key_averages(), self._on_gpu))


def render_costliest_operators(operators: Iterable[Any], on_gpu: bool) -> str:
    """Return a table of the operators that take the most time by themselves."""
    key = "self_device_time_total" if on_gpu else "self_cpu_time_total"
    found = [o for o in operators if not o.key.startswith("ProfilerStep")]
    total = sum(getattr(o, key) for o in found) or 1.0
    found = sorted(found, key=lambda o: -getattr(o, key))[:_MAX_ROWS]
    where = "GPU" if on_gpu else "CPU"
    lines = [f"  {'OPERATOR':<{_NAME_WIDTH}}{'CALLS':>8}{where + ' MS':>12}{'SHARE':>8}"]
    for o in found:
        name = o.key if len(o.key) < _NAME_WIDTH else o.key[: _NAME_WIDTH - 2] + "…"
        micro = getattr(o, key)
        lines.append(
            f"  {name:<{_NAME_WIDTH}}{o.count:>8,}{micro / 1e3:>12,.3f}{micro / total:>8.1%}"
        )
    return "\n".join(lines)


def _print_message(text: str) -> None:
    print(text, file=sys.stderr)
