"""torch.compile, where it works; where it does not, the function as it is, and the reason said."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch


class Compiled:
    """Is compiled by its first call. Only that call may fail in a way that is torch's."""

    def __init__(self, function: Callable[..., Any], backend: Any = "inductor") -> None:
        self._plain = function
        self._now: Callable[..., Any] = self._first
        self._compiled = torch.compile(function, dynamic=False, backend=backend)

    def __call__(self, *args: Any, **named: Any) -> Any:
        return self._now(*args, **named)

    def _first(self, *args: Any, **named: Any) -> Any:
        try:
            result = self._compiled(*args, **named)
        except Exception as error:
            result = self._plain(*args, **named)  # wrong code of the user says so here
            print(f"trainer.compile=true: not compiled: {_reason(error)}", file=sys.stderr)
            self._now = self._plain
            return result
        self._now = self._compiled
        return result


def _reason(error: Exception) -> str:
    """torch says who failed in the first line, and why in the second."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {' '.join(lines[:2])}"[:300]
