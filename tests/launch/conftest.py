"""What tests of lost ranks compare with."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
from lost_ranks import run_clean


@pytest.fixture(scope="session")
def clean_runs(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Return the run of a function of `faulty_loops.py`, with more words, that nothing happens to.
    It is made once."""
    return cache(lambda *words: run_clean(tmp_path_factory.mktemp("clean"), *words))
