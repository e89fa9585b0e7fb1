"""Clusters are started by the first test that asks for one; see cluster/README.md."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import slurm_cluster
from command_line import CommandLine, open_command_line


@pytest.fixture(scope="session")
def cluster(used: list[slurm_cluster.TestCluster]) -> Iterator[slurm_cluster.TestCluster]:
    """Three hosts under Slurm, without accounting."""
    with _running(slurm_cluster.PLAIN, used) as started:
        yield started


@pytest.fixture(scope="session")
def accounted(used: list[slurm_cluster.TestCluster]) -> Iterator[slurm_cluster.TestCluster]:
    """Another three, with accounting; both kinds run side by side."""
    with _running(slurm_cluster.ACCOUNTED, used) as started:
        yield started


@pytest.fixture
def healthy(used: list[slurm_cluster.TestCluster]) -> Iterator[None]:
    """For tests that cut cables or kill nodes: the next test finds them whole."""
    yield
    for each in used:
        if each.broken:
            each.heal()


@pytest.fixture
def command_line(cluster: slurm_cluster.TestCluster, tmp_path: Path) -> Iterator[CommandLine]:
    """A place to type commands at."""
    with open_command_line(cluster, tmp_path) as opened:
        yield opened


@pytest.fixture(scope="session")
def used() -> list[slurm_cluster.TestCluster]:
    return []


@contextmanager
def _running(
    kind: slurm_cluster.ClusterKind, used: list[slurm_cluster.TestCluster]
) -> Iterator[slurm_cluster.TestCluster]:
    """A developer's cluster is left running; one started here ends with the session."""
    was_up = slurm_cluster.is_up(kind)
    started = slurm_cluster.start(kind)
    used.append(started)
    yield started
    if not was_up:
        slurm_cluster.require(slurm_cluster.manage(kind, "down"))
