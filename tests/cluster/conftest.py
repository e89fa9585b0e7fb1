"""Clusters are started by the first test that asks for one; see cluster/README.md."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import command_line as desks
import pytest
import slurm_cluster


@pytest.fixture(scope="session")
def cluster(used: list[slurm_cluster.Cluster]) -> Iterator[slurm_cluster.Cluster]:
    """Three hosts under Slurm, without accounting."""
    with _running(slurm_cluster.PLAIN, used) as started:
        yield started


@pytest.fixture(scope="session")
def accounted(used: list[slurm_cluster.Cluster]) -> Iterator[slurm_cluster.Cluster]:
    """Another three, with accounting; both kinds run side by side."""
    with _running(slurm_cluster.ACCOUNTED, used) as started:
        yield started


@pytest.fixture
def healthy(used: list[slurm_cluster.Cluster]) -> Iterator[None]:
    """For tests that cut cables or kill nodes: the next test finds them whole."""
    yield
    for each in used:
        if each.broken:
            each.heal()


@pytest.fixture
def desk(cluster: slurm_cluster.Cluster, tmp_path: Path) -> Iterator[desks.Desk]:
    """A place to type commands at."""
    with desks.opened(cluster, tmp_path) as opened:
        yield opened


@pytest.fixture(scope="session")
def used() -> list[slurm_cluster.Cluster]:
    return []


@contextmanager
def _running(
    kind: slurm_cluster.Kind, used: list[slurm_cluster.Cluster]
) -> Iterator[slurm_cluster.Cluster]:
    """A developer's cluster is left running; one started here ends with the session."""
    was_up = slurm_cluster.is_up(kind)
    started = slurm_cluster.start(kind)
    used.append(started)
    yield started
    if not was_up:
        slurm_cluster.require(slurm_cluster.manage(kind, "down"))
