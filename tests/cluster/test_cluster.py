"""The test cluster itself: what other tests build on."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import slurm_cluster
from slurm_cluster import EMPTY_S, ClusterSlot, TestCluster, wait_until

pytestmark = [pytest.mark.slow, pytest.mark.cluster]

STAYS = f"sleep 1739.{os.getpid()}"
"""Nobody else's: jobs of other tests may just be ending."""


def test_slurm_sees_three_nodes_with_their_gpus(cluster: TestCluster) -> None:
    lines = cluster.slurm("sinfo", "-h", "-N", "-p", "main", "-o", "%N %c %G %t").splitlines()
    facts = [line.rsplit(" ", 1) for line in lines]
    kinds = ("l40s", "a100", "a100")
    assert [node for node, _ in facts] == [
        f"{node} 4 gpu:{kind}:4" for node, kind in zip(cluster.nodes, kinds, strict=True)
    ]
    assert {state for _, state in facts} <= {"idle", "mix", "alloc", "comp"}


def test_a_job_runs_on_two_hosts(cluster: TestCluster, tmp_path: Path) -> None:
    wrap = ["--wait", "-N2", "-o", "out", "--wrap", "srun hostname"]
    cluster.slurm("sbatch", *wrap, cwd=tmp_path)
    names = (tmp_path / "out").read_text().split()
    assert len(set(names)) == 2
    assert set(names) <= set(cluster.nodes)


def test_jobs_beside_each_other_get_different_gpus(cluster: TestCluster, tmp_path: Path) -> None:
    wrap = "echo $CUDA_VISIBLE_DEVICES; while ! test -e go; do sleep 0.1; done"
    words = ["-w", cluster.nodes[0], "--gpus-per-node=2", "--wrap", wrap]
    outputs = [tmp_path / "a", tmp_path / "b"]
    for output in outputs:
        cluster.slurm("sbatch", "-o", str(output), *words, cwd=tmp_path)
    wait_until(lambda: all(output.exists() and output.read_text() for output in outputs))
    (tmp_path / "go").touch()
    assert sorted(output.read_text() for output in outputs) == ["0,1\n", "2,3\n"]


def test_ssh_needs_no_question_from_outside_or_between_hosts(cluster: TestCluster) -> None:
    for node in cluster.nodes:
        assert cluster.ssh(node, "hostname").stdout.split() == [node]
    first, second, _ = cluster.nodes
    inner = cluster.ssh(first, "ssh", "-F", str(cluster.ssh_config), second, "hostname")
    assert inner.stdout.split() == [second]


def test_ssh_refuses_a_host_that_pretends(cluster: TestCluster) -> None:
    first, second, _ = cluster.nodes
    done = cluster.ssh(first, "-o", f"HostKeyAlias={second}", "true")
    assert "Host key verification failed" in done.stderr


def test_a_cut_cable_cuts_one_host_off(cluster: TestCluster) -> None:
    first, second, third = cluster.nodes
    assert _reaches(cluster, first, second)
    cluster.link(second, "down")
    assert not _reaches(cluster, first, second)
    assert _reaches(cluster, first, third)
    cluster.link(second, "up")
    wait_until(lambda: _reaches(cluster, first, second))


def _reaches(cluster: TestCluster, here: str, there: str) -> bool:
    probe = f"exec 3<>/dev/tcp/{cluster.addresses[there]}/22"
    return cluster.on(here, "timeout", "2", "bash", "-c", probe).returncode == 0


def test_healing_mends_cables_and_nodes(cluster: TestCluster) -> None:
    first, second, third = cluster.nodes
    cluster.link(first, "down")
    cluster.kill_node(second)
    cluster.heal()
    assert _reaches(cluster, third, first)
    assert cluster.slurm("srun", "-w", second, "hostname").split() == [second]


def test_a_slow_cable_still_carries(cluster: TestCluster) -> None:
    cluster.netem(cluster.nodes[0], "rate 1mbit")
    shaped = cluster.on(cluster.nodes[0], "tc", "qdisc", "show", "dev", "eth0").stdout
    assert "rate 1Mbit" in shaped
    assert cluster.ssh(cluster.nodes[0], "hostname").stdout.split() == [cluster.nodes[0]]


def test_a_killed_node_comes_back(cluster: TestCluster, tmp_path: Path) -> None:
    node = cluster.nodes[-1]
    words = ["--parsable", "-w", node, "-o", "/dev/null", "--wrap", "exec sleep 7654"]
    job = cluster.slurm("sbatch", "--no-requeue", *words, cwd=tmp_path).strip()
    wait_until(lambda: ["sleep", "7654"] in cluster.processes(node).values())
    cluster.kill_node(node)
    assert cluster.processes(node) == {}
    assert cluster.ssh(node, "true").returncode != 0
    cluster.start_node(node)
    assert cluster.ssh(node, "true").returncode == 0
    assert cluster.slurm("srun", "-w", node, "hostname").split() == [node]
    cluster.slurm("scancel", job)


def test_a_job_outlives_the_controller(cluster: TestCluster, tmp_path: Path) -> None:
    go = tmp_path / "go"
    wrap = f"while ! test -e {go}; do sleep 0.1; done; echo done"
    job = cluster.slurm("sbatch", "--parsable", "-o", "out", "--wrap", wrap, cwd=tmp_path).strip()
    cluster.wait_for_job(job, "RUNNING")
    cluster.restart_controller()
    assert cluster.job_state(job) == "RUNNING"
    go.touch()
    cluster.wait_for_job(job, "COMPLETED")
    assert (tmp_path / "out").read_text() == "done\n"


def test_a_spare_job_gives_way(cluster: TestCluster, tmp_path: Path) -> None:
    everything = ["-N3", "--exclusive", "--parsable", "-o", "/dev/null", "--wrap"]
    cluster.wait_until_empty()
    low = ["-p", "spare", *everything, "srun sleep 1000"]
    spare = cluster.slurm("sbatch", *low, cwd=tmp_path).strip()
    cluster.wait_for_job(spare, "RUNNING")
    # Both want every node for themselves: that this one ends is the proof. The other ends by
    # SIGTERM, or is queued again and may be running by now.
    high = ["--wait", "-p", "high", *everything, "true"]
    cluster.slurm("sbatch", *high, cwd=tmp_path, limit_s=EMPTY_S)
    cluster.slurm("scancel", spare)


def test_without_accounting_sacct_says_so(cluster: TestCluster) -> None:
    assert "accounting storage is disabled" in slurm_cluster.run(["sacct"], cluster.env, 30).stderr


def test_with_accounting_sacct_knows_a_job(accounted: TestCluster, tmp_path: Path) -> None:
    words = ["--parsable", "--wait", "-o", "/dev/null", "--wrap", "exit 3"]
    submitted = slurm_cluster.run(["sbatch", *words], accounted.env, 60, tmp_path)
    query = ["sacct", "-X", "-n", "-P", "-j", submitted.stdout.strip(), "-o", "State,ExitCode"]
    wait_until(lambda: accounted.slurm(*query).split() == ["FAILED|3:0"])


def test_a_network_in_use_is_refused(cluster: TestCluster, spare_folder: Path) -> None:
    kind = slurm_cluster.ClusterKind(spare_folder, ("--prefix", "other", "--net", _net_of(cluster)))
    done = slurm_cluster.manage(kind, "up", *kind.options)
    assert done.returncode == slurm_cluster.EXIT_CANNOT_BE_MADE
    assert "in use" in done.stderr
    assert not spare_folder.exists()


def _net_of(cluster: TestCluster) -> str:
    return cluster.addresses[cluster.nodes[0]].rpartition(".")[0]


def test_a_cluster_that_cannot_be_made_skips_unless_required(
    monkeypatch: pytest.MonkeyPatch, spare_folder: Path
) -> None:
    kind = slurm_cluster.ClusterKind(spare_folder, ("--prefix", "NOT A NAME"))
    monkeypatch.delenv("ECHELON_REQUIRE_CLUSTER", raising=False)
    with pytest.raises(pytest.skip.Exception, match="--prefix has to be"):
        slurm_cluster.start(kind)
    monkeypatch.setenv("ECHELON_REQUIRE_CLUSTER", "1")
    with pytest.raises(pytest.fail.Exception, match="--prefix has to be"):
        slurm_cluster.start(kind)


def test_down_spares_a_folder_that_holds_something_else(spare_folder: Path) -> None:
    spare_folder.mkdir()
    (spare_folder / "thesis").touch()
    assert (
        slurm_cluster.manage(slurm_cluster.ClusterKind(spare_folder), "up").returncode
        == slurm_cluster.EXIT_CANNOT_BE_MADE
    )
    slurm_cluster.manage(slurm_cluster.ClusterKind(spare_folder), "down")
    assert (spare_folder / "thesis").exists()


@pytest.mark.parametrize("lost", [False, True], ids=["", "folder_lost"])
def test_down_leaves_nothing(slot: ClusterSlot, spare_folder: Path, lost: bool) -> None:
    prefix = "gone" + chr(ord("a") + slot.number)
    options = ("--prefix", prefix, "--net", f"10.213.{100 + slot.number}")
    kind = slurm_cluster.ClusterKind(spare_folder, options)
    short = slurm_cluster.start(kind)
    assert all(_traces(spare_folder, prefix).values())
    try:
        stays = f"{STAYS} & setsid {STAYS} & wait"
        short.slurm("sbatch", "-o", "/dev/null", "--wrap", stays, cwd=Path("/"))
        wait_until(lambda: len(short.processes(short.nodes[0])) >= 2)
        if lost:
            shutil.rmtree(spare_folder)
    finally:
        assert slurm_cluster.manage(kind, "down").returncode == 0
    assert not spare_folder.exists()
    assert not any(_traces(spare_folder, prefix).values())


def _traces(folder: Path, prefix: str) -> dict[str, list[str]]:
    """What of a cluster is seen outside its folder. Others come and go meanwhile."""
    processes = subprocess.check_output(["ps", "-eo", "args"], text=True).splitlines()
    return {
        "devices": [each.name for each in Path("/sys/class/net").glob(f"ech-{prefix}*")],
        "namespaces": [each.name for each in Path("/run/netns").glob(f"{prefix}*")],
        "hosts": [each for each in Path("/etc/hosts").read_text().splitlines() if prefix in each],
        "processes": [each for each in processes if str(folder) in each or each == STAYS],
    }


@pytest.fixture
def spare_folder() -> Iterator[Path]:
    """Short, as sockets in it need."""
    with tempfile.TemporaryDirectory(prefix="ech-") as folder:
        yield Path(folder, "bed")
