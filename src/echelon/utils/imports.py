"""Importing modules that make very many objects."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def pause_garbage_collection() -> Iterator[None]:
    """Collect no garbage inside, where torch is imported.

    torch and torch._dynamo make a million objects that stay. Python's collector looks at them again
    and again while they are made, and that is a fifth of the import's time.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
