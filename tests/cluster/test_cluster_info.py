"""`echelon cluster` and `echelon setup cluster` on real clusters, here and over ssh."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from command_line import CommandLine, open_command_line
from command_runner import until
from slurm_cluster import LIMIT_S, TestCluster
from sshd import start_sshd

from echelon.errors import ExitCode

pytestmark = [pytest.mark.slow, pytest.mark.cluster]


def ask(command_line: CommandLine, *words: str) -> Any:
    """What `echelon cluster --json` says."""
    done = command_line.type("cluster", "--json", *words)
    assert done.code == ExitCode.OK, done.output
    return json.loads(done.out)


def test_its_figures_are_those_of_slurm_and_say_what_starts_sooner(
    command_line: CommandLine,
) -> None:
    """While a job of 20 minutes has all GPUs of one type, and one waits for it."""
    cluster = command_line.cluster
    cluster.wait_until_empty()
    first = cluster.nodes[0]
    words = ("--parsable", "-o", "/dev/null", f"--chdir={command_line.folder}", "-t", "20")
    gpus = ("--gpus-per-node=l40s:4", "--mem=1000", "--wrap", "sleep 1000")
    running = cluster.slurm("sbatch", *words, *gpus).strip()
    cluster.wait_for_job(running, "RUNNING")
    cluster.slurm("sbatch", *words, *gpus)

    found = until(
        lambda: (a := ask(command_line))["partitions"][0]["waiting"] == 1 and a, LIMIT_S, "it waits"
    )
    main = {p["name"]: p for p in found["partitions"]}["main"]
    assert (main["default"], main["usable"]) == (True, True)
    allocated, idle, _, total = map(
        int, cluster.slurm("sinfo", "-h", "-p", "main", "-o", "%C").strip().split("/")
    )
    assert main["cpus"] == {"free": idle, "total": total}
    assert allocated == 1
    states = cluster.slurm("sinfo", "-h", "-N", "-p", "main", "-o", "%T").split()
    for state in ("idle", "mixed"):
        assert main["nodes"][state] == states.count(state)
    assert main["gpus"] == [
        {"type": "a100", "free": 8, "total": 8},
        {"type": "l40s", "free": 0, "total": 4},
    ]

    # A job for these GPUs waits, though the other type is free.
    job = ("launch.gpus_per_node=l40s:4", "launch.time=30:00", "launch.partition=high")
    told = ask(command_line, *job)["job"]
    tested = cluster.slurm("sinfo", "-h", "-o", "%n", "-n", first)
    assert (told["nodes"], told["partition"]) == (tested.split()[0], "high")
    assert 0 < told["wait_s"] <= 1260
    sooner = {each["settings"][0]: each["wait_s"] for each in told["sooner"]}
    assert sooner["launch.gpus_per_node=a100:4"] == 0
    shown = command_line.type("cluster", *job).out
    assert "launch.gpus_per_node=a100:4  now on " in shown
    assert "estimates of Slurm's" in shown

    # Nothing was submitted, and what cannot start has Slurm's words.
    assert len(cluster.slurm("squeue", "-h").splitlines()) == 2
    never = ask(command_line, "launch.nodes=9")["job"]
    assert never["start"] is None
    assert "Requested node configuration is not available" in never["reason"]


def test_a_file_of_defaults_over_ssh_is_one_that_slurm_takes(
    command_line: CommandLine, tmp_path: Path
) -> None:
    cluster, host = command_line.cluster, command_line.cluster.nodes[0]
    # A login that says something first.
    greet = "ForceCommand echo Welcome; eval $SSH_ORIGINAL_COMMAND\n"
    more = f"SetEnv SLURM_CONF={cluster.slurm_conf}\n{greet}"
    ssh = ("--ssh", f"ssh -F {cluster.ssh_config} -p 2231")
    with start_sshd(cluster, host, [2231], 'exec "$@"', tmp_path, more):
        shown = command_line.type("setup", "cluster", host, *ssh, "--dry-run", SLURM_CONF="/none")
        assert shown.code == ExitCode.OK, shown.output
        done = command_line.type("setup", "cluster", host, *ssh, SLURM_CONF="/none")
        assert done.code == ExitCode.OK, done.output
        free = command_line.type("cluster", host, "launch.nodes=2", *ssh, SLURM_CONF="/none")
        assert free.code == ExitCode.OK, free.output
    file = command_line.folder / "echelon.yaml"
    assert file.read_text() == shown.out
    launch = yaml.safe_load(shown.out)["launch"]
    assert (launch["partition"], launch["gpus_per_node"], launch["time"]) == ("main", 1, "4:00:00")
    assert "8 a100, 4 l40s" in shown.out
    assert "keeps no accounting" in shown.out
    with_defaults = (
        r"a job with launch\.nodes=2, and .*launch\.partition=main.* of echelon\.yaml, would"
    )
    assert re.search(with_defaults, free.out), free.out
    taken = command_line.type("run", "launch=slurm", "mode=plain", "--wait", "--", "true")
    assert taken.code == ExitCode.OK, taken.output

    closed = command_line.type("cluster", host, "--ssh", f"ssh -F {cluster.ssh_config} -p 2231")
    assert closed.code == ExitCode.NOT_READY
    assert f"{host} cannot be reached" in closed.err


def test_accounts_and_limits_are_in_the_file(accounted: TestCluster, tmp_path: Path) -> None:
    slurm = accounted.slurm
    slurm("sacctmgr", "-i", "add", "account", "lab")
    slurm("sacctmgr", "-i", "add", "qos", "long", "priority=10", "maxwall=2-00:00:00")
    slurm("sacctmgr", "-i", "add", "user", "root", "account=lab")
    limits = ("qos=normal,long", "defaultqos=normal", "maxwall=03:00:00", "maxjobs=5")
    try:
        where = ("modify", "user", "where", "name=root", "account=lab", "set")
        slurm("sacctmgr", "-i", *where, *limits)
        slurm("sacctmgr", "-i", "modify", "user", "root", "set", "defaultaccount=lab")
        with open_command_line(accounted, tmp_path) as command_line:
            done = command_line.type("setup", "cluster", "--dry-run", "--json")
        found = json.loads(done.out)
    finally:
        slurm("sacctmgr", "-i", "modify", "user", "root", "set", "defaultaccount=root")
        slurm("sacctmgr", "-i", "delete", "user", "root", "account=lab")
        slurm("sacctmgr", "-i", "delete", "account", "lab")
        slurm("sacctmgr", "-i", "delete", "qos", "long")
    assert found["accounting"]
    assert found["settings"] == {
        **{"launch.partition": "main", "launch.account": "lab", "launch.gpus_per_node": 1},
        **{"launch.time": "3:00:00", "launch.max_parallel": 5},
    }
    assert "long (priority 10, at most 2-00:00:00)" in " ".join(
        found["text"].replace("#", "").split()
    )
