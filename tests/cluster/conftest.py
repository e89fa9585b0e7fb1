"""Clusters are started by the first test that asks for one; see cluster/README.md."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import slurm_cluster
from command_line import CommandLine, open_command_line
from node_worlds import LONG, run_undisturbed
from slurm_cluster import ClusterSlot, TestCluster

from echelon.runs.run_folder import Run


@pytest.fixture(scope="session")
def slot() -> ClusterSlot:
    return ClusterSlot()


@pytest.fixture(scope="session")
def cluster(slot: ClusterSlot, used: list[TestCluster]) -> Iterator[TestCluster]:
    """Three hosts under Slurm, without accounting."""
    with _running(slot.make_kind(accounting=False), used) as started:
        yield started


@pytest.fixture(scope="session")
def accounted(slot: ClusterSlot, used: list[TestCluster]) -> Iterator[TestCluster]:
    """Another three, with accounting; both kinds run side by side."""
    with _running(slot.make_kind(accounting=True), used) as started:
        yield started


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The cluster with accounting takes long to make: its tests share one."""
    for item in items:
        fixtures = getattr(item, "fixturenames", ())
        if "accounted" in fixtures or item.name.endswith("[accounted]"):
            item.add_marker(pytest.mark.xdist_group("accounting"))


@pytest.fixture(autouse=True)
def _heal(used: list[TestCluster]) -> Iterator[None]:
    """Tests cut cables, kill nodes and restart the controller: the next one finds all whole."""
    yield
    for each in used:
        if each.broken:
            each.heal()


@pytest.fixture
def command_line(cluster: TestCluster, tmp_path: Path) -> Iterator[CommandLine]:
    """A place to type commands at."""
    with open_command_line(cluster, tmp_path) as opened:
        yield opened


@pytest.fixture(scope="session")
def clean_run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """The numbers of `node_worlds.SETTINGS` when nothing happens."""
    return run_undisturbed(tmp_path_factory.mktemp("clean"))


@pytest.fixture(scope="session")
def long_clean_run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """The same of more steps."""
    return run_undisturbed(tmp_path_factory.mktemp("clean"), *LONG)


@pytest.fixture(scope="session")
def used() -> list[TestCluster]:
    return []


@contextmanager
def _running(kind: slurm_cluster.ClusterKind, used: list[TestCluster]) -> Iterator[TestCluster]:
    """A developer's cluster is left running; one started here ends with the session."""
    was_up = slurm_cluster.is_up(kind)
    started = slurm_cluster.start(kind)
    used.append(started)
    yield started
    if not was_up:
        slurm_cluster.require(slurm_cluster.manage(kind, "down"))
