"""torch.compile with a way back: where compiling fails, the plain function runs and the reason is
printed."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from echelon.errors import EchelonError, Fault
from echelon.runs.heartbeat import Heartbeat
from echelon.utils.trust import find_folder_trust_problem

_DEVELOPER_HINTS = ("Set TORCHDYNAMO", "While executing %")
"""Beginnings of lines that help only developers of torch."""


class CompiledFunction:
    """A function that is compiled at its first call, and again for other shapes.

    Any call may have to compile, for example the smaller last batch, so any call may fail inside
    torch. After such a failure the plain function is used for good.
    """

    def __init__(
        self, function: Callable[..., Any], heartbeat: Heartbeat, backend: Any = "inductor"
    ) -> None:
        if backend == "inductor":
            _require_trusted_kernel_cache()
        _compile_backward_eagerly()
        self._plain = function
        self._compiled = torch.compile(
            function, dynamic=False, backend=_HeartbeatSuspendingBackend(backend, heartbeat)
        )
        self._has_given_up = False

    def __call__(self, *args: Any, **named: Any) -> Any:
        if self._has_given_up:
            return self._plain(*args, **named)
        try:
            return self._compiled(*args, **named)
        except Exception as error:
            reason = _summarize_compile_error(error)
        # Outside the except clause: an error of the user's own code is then raised alone, and not
        # as a consequence of torch's error.
        result = self._plain(*args, **named)
        print(f"trainer.compile=true: not compiled: {reason}", file=sys.stderr)
        self._has_given_up = True
        return result


def _require_trusted_kernel_cache() -> None:
    """Raise EchelonError if somebody else can write where torch keeps what it has compiled.

    torch takes a folder in /tmp with an expected name, whoever made it, and runs what is in it.
    """
    from torch._inductor.runtime import runtime_utils

    chosen = os.environ.get("TORCHINDUCTOR_CACHE_DIR")
    folder = Path(chosen or runtime_utils.default_cache_dir())
    if problem := find_folder_trust_problem(folder):
        raise EchelonError(
            Fault(
                f"trainer.compile=true: {problem.what}",
                f"set TORCHINDUCTOR_CACHE_DIR to a folder of your own, or {problem.do}",
            )
        )


def _compile_backward_eagerly() -> None:
    """Makes torch compile the backward pass together with the forward pass.

    There a failure can be handled. In the middle of a backward pass it cannot: gradients of some
    layers are computed and others are already on their way to other ranks.
    """
    from torch._functorch import config

    if hasattr(config, "force_non_lazy_backward_lowering"):  # torch 2.9 and newer
        config.force_non_lazy_backward_lowering = True


@dataclass(frozen=True)
class _HeartbeatSuspendingBackend:
    """Suspends the heartbeat while torch compiles, so that the rank is not taken for hung.

    Equal objects share what they compiled, so the equal layers of a model are compiled once.
    """

    backend: Any
    heartbeat: Heartbeat

    def __call__(self, graph: Any, inputs: Any) -> Any:
        from torch._dynamo import lookup_backend

        # A large model takes minutes to compile. Older versions of torch compile the backward pass
        # only after the next beat, so that beat does not end the pause.
        self.heartbeat.suspend(beats=1)
        return lookup_backend(self.backend)(graph, inputs)


def _summarize_compile_error(error: Exception) -> str:
    """Return one line: torch names what failed in the first line of its message, and why in the
    second."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    lines = [line for line in lines if not line.startswith(_DEVELOPER_HINTS)]
    return f"{type(error).__name__}: {' '.join(lines[:2])}"[:300]
