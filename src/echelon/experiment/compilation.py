"""torch.compile, where it works; where it does not, the function as it is, and the reason said."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from echelon.runs.heartbeat import Heartbeat

_DEVELOPER_HINTS = ("Set TORCHDYNAMO", "While executing %")
"""Lines for who mends torch."""


class CompiledFunction:
    """Is compiled by its first call, and again for other shapes, such as of the last batch: any
    call may fail in a way that is torch's."""

    def __init__(
        self, function: Callable[..., Any], pulse: Heartbeat, backend: Any = "inductor"
    ) -> None:
        _compile_backward_eagerly()
        self._plain = function
        self._compiled = torch.compile(
            function, dynamic=False, backend=_HeartbeatBackend(backend, pulse)
        )
        self._has_given_up = False

    def __call__(self, *args: Any, **named: Any) -> Any:
        if self._has_given_up:
            return self._plain(*args, **named)
        try:
            return self._compiled(*args, **named)
        except Exception as error:
            reason = _summarize_compile_error(error)
        # Wrong code of the user says so here, and not as a consequence of torch's error.
        result = self._plain(*args, **named)
        print(f"trainer.compile=true: not compiled: {reason}", file=sys.stderr)
        self._has_given_up = True
        return result


def _compile_backward_eagerly() -> None:
    """With the forward pass, where a failure can be answered: amid a backward pass, gradients of
    some layers are there and those of others on their way to other ranks."""
    from torch._functorch import config

    if hasattr(config, "force_non_lazy_backward_lowering"):  # torch 2.9 and newer
        config.force_non_lazy_backward_lowering = True


@dataclass(frozen=True)
class _HeartbeatBackend:
    """Nobody is called hung who compiles. Equal ones share what they compiled: layers are alike."""

    backend: Any
    pulse: Heartbeat

    def __call__(self, graph: Any, inputs: Any) -> Any:
        from torch._dynamo import lookup_backend

        # A large model takes minutes; an older torch compiles the backward pass after the beat.
        self.pulse.suspend(beats=1)
        return lookup_backend(self.backend)(graph, inputs)


def _summarize_compile_error(error: Exception) -> str:
    """torch says who failed in the first line, and why in the second, or how to hear more."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    lines = [line for line in lines if not line.startswith(_DEVELOPER_HINTS)]
    return f"{type(error).__name__}: {' '.join(lines[:2])}"[:300]
