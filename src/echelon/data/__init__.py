"""Which sample each rank takes when, and the batches made of them.

echelon.data.stream   data without a length, cut into shards
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from echelon.data.sharded_stream import stream

__all__ = ["stream"]

_MODULE_OF = {"stream": "echelon.data.sharded_stream"}


def __getattr__(name: str) -> Any:
    """Imports a public name at its first use (PEP 562)."""
    if name in _MODULE_OF:
        return getattr(import_module(_MODULE_OF[name]), name)
    raise AttributeError(f"module 'echelon.data' has no attribute {name!r}")
