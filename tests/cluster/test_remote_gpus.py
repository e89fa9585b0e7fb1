"""`echelon gpus` of other machines, over real sshd and through a real Slurm."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from command_line import CommandLine
from command_runner import until
from fake_nvml import NOBODY_HERE, FakeDriver, gpu, process

from echelon.errors import ExitCode

pytestmark = [pytest.mark.slow, pytest.mark.cluster]


def test_hosts_over_ssh(command_line: CommandLine) -> None:
    """They have no driver, and say so; one that is not there is a row too."""
    first, second, *_ = command_line.cluster.nodes
    ssh = f"ssh -F {command_line.cluster.ssh_config}"
    done = command_line.type("gpus", "--hosts", f"{first},{second},gone", "--ssh", ssh)
    assert (done.code, done.out) == (ExitCode.NO_GPU, "")
    here, there, gone = done.err.splitlines()
    assert here == f"{first}: no GPU: there is no NVIDIA driver (libnvidia-ml.so.1 is not found)"
    assert there.startswith(f"{second}: no GPU: there is no NVIDIA driver")
    assert gone.startswith("gone: no GPU: cannot be reached: ssh: ")


def test_nodes_of_my_jobs(command_line: CommandLine, tmp_path: Path) -> None:
    assert command_line.type("gpus", "--slurm").code == ExitCode.NOT_FOUND, "no job, no node"
    driver = FakeDriver(
        tmp_path / "driver", gpu(0, use=11), gpu(1), process(NOBODY_HERE, on=1, gib=7)
    )
    job = command_line.cluster.slurm(
        "sbatch", "--parsable", "-N2", "-o/dev/null", "--wrap", "sleep 300"
    )
    number = job.strip()
    try:
        running = ("squeue", "-h", "-j", number, "-t", "RUNNING", "-o", "%i")
        until(lambda: command_line.cluster.slurm(*running).strip(), 300, "running")
        hosts = command_line.hosts(number)
        done = command_line.type(
            "gpus", "--slurm", "--json", LD_LIBRARY_PATH=str(driver.library.parent)
        )
    finally:
        command_line.cluster.slurm("scancel", number)
    assert done.code == ExitCode.OK, done.err
    nodes = json.loads(done.out)["nodes"]
    assert [node["host"] for node in nodes] == hosts
    assert [[g["use_percent"] for g in node["gpus"]] for node in nodes] == [[11, 0], [11, 0]]


def test_a_partition(command_line: CommandLine) -> None:
    ssh = f"ssh -F {command_line.cluster.ssh_config}"
    name = command_line.cluster.slurm("sinfo", "-h", "-o", "%R").split()[0]
    done = command_line.type("gpus", "--slurm", name, "--ssh", ssh)
    assert done.code == ExitCode.NO_GPU
    assert [line.split(":")[0] for line in done.err.splitlines()] == sorted(
        command_line.cluster.nodes
    )
    unknown = command_line.type("gpus", "--slurm", f"{name}x")
    assert unknown.code == ExitCode.NOT_FOUND
    assert f"did you mean '{name}'?" in unknown.err
