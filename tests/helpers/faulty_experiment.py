"""An experiment that fails as its settings say: rank r, in this phase, at step s, with f."""

from __future__ import annotations

import ctypes
import glob
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn

import echelon
from echelon.data.toy import make_linear_data


@dataclass
class Settings:
    fault: str = ""
    on: int = 0
    """The rank that fails."""
    at: int = 5
    """The step it fails in, for the phases that have one."""
    phase: str = "step"
    once: str = ""
    """A file that remembers that the fault has happened, so that a restart goes on."""
    after: str = ""
    """What it waits for before it fails, such as a snapshot, written while the steps go on."""
    unbuildable: str = ""
    """A file with which nothing can be built."""
    transient: bool = False
    """Whether an error is one that goes away by itself."""
    rows: int = 1
    """Size of the model, to make snapshots of a size."""
    pause_s: float = 0.0
    """So long does a step take at least, for those who want to see it run."""
    missing_pause_s: float | None = None
    """So long while a rank is lost, if not `pause_s`: the replacement then comes before the end on
    a busy machine too."""
    pause_until: str = ""
    """A file: once it is there, nothing is left to see, and no step waits."""


def _error() -> NoReturn:
    raise ValueError("injected error")


def _loop() -> NoReturn:
    while True:
        pass


def _sleep_for_ever() -> NoReturn:
    while True:
        time.sleep(60)


def _hold_lock() -> NoReturn:
    """Wait in native code that does not release the lock of the interpreter, not for a signal."""
    c, semaphore = ctypes.PyDLL(None), ctypes.create_string_buffer(64)
    c.sem_init(semaphore, 0, 0)
    while True:
        c.sem_wait(semaphore)


def _kill(number: int, who: Callable[[], int] = os.getpid) -> Callable[[], None]:
    return lambda: os.kill(who(), number)


def _kill_keeper(who: Callable[[], int]) -> Callable[[], None]:
    """And wait to be ended: the few steps that are left would be done before anybody looks."""

    def kill() -> None:
        os.kill(who(), signal.SIGKILL)
        threading.Event().wait(60)

    return kill


def _agent() -> int:
    text = Path(f"/proc/{os.getppid()}/stat").read_text()
    return int(text.rpartition(")")[2].split()[1])


FAULTS: dict[str, Callable[[], Any]] = {
    "error": _error,
    "exit 1": lambda: sys.exit(1),
    "exit 0": lambda: sys.exit(0),
    "os._exit 3": lambda: os._exit(3),
    "kill": _kill(signal.SIGKILL),
    "segv": lambda: ctypes.string_at(0),
    "stop": _kill(signal.SIGSTOP),
    "loop": _loop,
    "sleep": _sleep_for_ever,
    "hold lock": _hold_lock,
    "kill agent": _kill_keeper(_agent),
    "kill fork server": _kill_keeper(os.getppid),
    "slow": lambda: time.sleep(0.6),
    "wait": lambda: None,  # for `after`, and no more
    "miscompute": lambda: None,  # from then on: see `Trap.spoil`
    "": lambda: None,
}


class Trap:
    """Springs once, in its phase."""

    def __init__(self, cfg: Settings) -> None:
        self.cfg = cfg
        self.steps = 0
        self.is_miscomputing = False
        self.set = bool(cfg.fault) and int(os.environ.get("RANK", _typed_rank())) == cfg.on
        if cfg.once and Path(cfg.once).exists():
            self.set = False

    def reach(self, phase: str) -> None:
        if not self.set or phase != self.cfg.phase:
            return
        if phase != "build" and self.steps < self.cfg.at:
            return
        self.set = False
        if self.cfg.once:
            Path(self.cfg.once).touch()
        while self.cfg.after and not glob.glob(self.cfg.after):
            time.sleep(0.01)
        if self.cfg.transient:
            raise echelon.TransientError("injected")
        self.is_miscomputing = self.cfg.fault == "miscompute"
        FAULTS[self.cfg.fault]()

    def spoil(self, output: Tensor) -> Tensor:
        """As a faulty device would: one bit of a gradient is another one, and nothing is said."""
        if self.is_miscomputing and output.requires_grad:
            output.register_hook(flip_bit)  # type: ignore[no-untyped-call]
        return output

    def pause(self) -> None:
        missing_s = self.cfg.missing_pause_s
        pause_s = missing_s if missing_s is not None and _is_rank_missing() else self.cfg.pause_s
        until = time.monotonic() + pause_s
        while (left_s := until - time.monotonic()) > 0 and not self._is_seen():
            time.sleep(min(left_s, 0.1))

    def _is_seen(self) -> bool:
        return bool(self.cfg.pause_until) and Path(self.cfg.pause_until).exists()

    def delay(self) -> None:
        if self.set and self.cfg.phase == "every-evaluation":
            FAULTS[self.cfg.fault]()


def flip_bit(numbers: Tensor, bit: int = 30) -> Tensor:
    """Return float32 numbers with another bit in the first one; bit 30 is the largest of its
    exponent."""
    spoiled = numbers.detach().clone()
    spoiled.view(-1)[:1].view(torch.int32).bitwise_xor_(1 << bit)
    return spoiled


def _typed_rank() -> str:
    return next((w.partition("=")[2] for w in sys.argv if w.startswith("rank=")), "0")


def _is_rank_missing() -> bool:
    size = dist.get_world_size() if dist.is_initialized() else 1
    return size < int(os.environ.get("WORLD_SIZE", "1"))


class Model(nn.Linear):
    trap: Trap

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.trap.steps += 1
            self.trap.reach("step")
            self.trap.pause()
        else:
            self.trap.reach("evaluation")
            self.trap.delay()
        return self.trap.spoil(super().forward(x)[:, :1])

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        self.trap.reach("save")
        return super().state_dict(*args, **kwargs)


def experiment(cfg: Settings) -> echelon.Experiment:
    trap = Trap(cfg)
    trap.reach("build")
    if cfg.unbuildable and Path(cfg.unbuildable).exists():
        raise ValueError("there is nothing to build it of")
    model = Model(8, cfg.rows)
    model.trap = trap
    x, y = make_linear_data(96, 8, 0.1, 0)
    return echelon.Experiment(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.05),
        loss=lambda output, target: _loss(output, target, cfg, trap),
        train_data=(x[:80], y[:80]),
        eval_data=(x[80:], y[80:]),
    )


def _loss(output: Tensor, target: Tensor, cfg: Settings, trap: Trap) -> Tensor:
    loss = nn.functional.mse_loss(output, target)
    if cfg.phase == "nan" and trap.set and trap.steps == cfg.at:
        return loss * float("nan")
    return loss


if __name__ == "__main__":
    echelon.main(experiment)
