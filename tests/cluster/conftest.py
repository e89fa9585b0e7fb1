"""Clusters are started by the first test that asks for one; see cluster/README.md."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import bed
import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "spine"))  # its subjects, faults and helpers
sys.path.insert(0, str(Path(__file__).parents[1] / "gpus"))  # machines with GPUs
import desk as desks


@pytest.fixture(scope="session")
def cluster(used: list[bed.Cluster]) -> Iterator[bed.Cluster]:
    """Three hosts under Slurm, without accounting."""
    with _running(bed.PLAIN, used) as started:
        yield started


@pytest.fixture(scope="session")
def accounted(used: list[bed.Cluster]) -> Iterator[bed.Cluster]:
    """Another three, with accounting; both kinds run side by side."""
    with _running(bed.ACCOUNTED, used) as started:
        yield started


@pytest.fixture
def healthy(used: list[bed.Cluster]) -> Iterator[None]:
    """For tests that cut cables or kill nodes: the next test finds them whole."""
    yield
    for each in used:
        if each.broken:
            each.heal()


@pytest.fixture
def desk(cluster: bed.Cluster, tmp_path: Path) -> Iterator[desks.Desk]:
    """A place to type commands at."""
    with desks.opened(cluster, tmp_path) as opened:
        yield opened


@pytest.fixture(scope="session")
def used() -> list[bed.Cluster]:
    return []


@contextmanager
def _running(kind: bed.Kind, used: list[bed.Cluster]) -> Iterator[bed.Cluster]:
    """A developer's cluster is left running; one started here ends with the session."""
    was_up = bed.is_up(kind)
    started = bed.start(kind)
    used.append(started)
    yield started
    if not was_up:
        bed.require(bed.manage(kind, "down"))
