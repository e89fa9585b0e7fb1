"""launch=slurm: the script, what the job gets, what it leaves, and what Slurm refuses."""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path

import pytest
from command_line import START_S, CommandLine
from command_runner import EXAMPLES, is_a_sentence_and_a_hint, until
from slurm_cluster import TestCluster

from echelon.cli import run_and_report_faults, run_command
from echelon.errors import ExitCode

pytestmark = [pytest.mark.slow, pytest.mark.cluster]

TELL = (
    'echo "$RANK of $WORLD_SIZE on $(hostname)"; '
    'echo "$GLOO_SOCKET_IFNAME $NCCL_SOCKET_IFNAME"; '
    'echo "devices $CUDA_VISIBLE_DEVICES"; '
    'echo "port $MASTER_PORT"; '
    'echo "$FROM_SETUP"\n'
)


def test_two_jobs_at_once_are_what_their_dry_runs_said(command_line: CommandLine) -> None:
    """The first one on two nodes with two GPUs each, where rank 3 fails; the second on one node."""
    words = (
        *("run", "launch=slurm", "launch.nodes=2", "launch.gpus_per_node=2", "run.name=a"),
        *("launch.sbatch=['--comment=hello','--exclusive=user']", "launch.cpus_per_node=2"),
        """launch.setup=['export FROM_SETUP="a  b"','mkdir -p made']""",
    )
    told = "until grep -qs 'a  b' runs/a/logs/rank-$n.log; do sleep 0.1; done"  # their last words
    fail = f"if test $RANK = 3; then for n in 0 1 2; do {told}; done; exit 7; fi"
    program = ("--", "bash", "-c", TELL + fail)
    planned = json.loads(command_line.type(*words, "--dry-run", "--json", *program).out)
    assert not (command_line.folder / "runs").exists()
    following = command_line.start(*words, "--wait", *program)
    second = ("run", "launch=slurm", "run.name=b", "launch.interface=lo", "--", "bash", "-c", TELL)
    submitted = command_line.type(*second)
    assert submitted.code == ExitCode.OK, submitted.err
    job_b = command_line.job("b")
    assert submitted.out.startswith(f"job {job_b}: run b in {command_line.run('b').folder}\n")

    run, job = command_line.run(), command_line.job()
    assert run.script_file.read_text() == planned["script"]
    assert planned["commands"] == [["sbatch", "--parsable", str(run.script_file)]]
    ranks = [place["rank"] for place in planned["places"]]
    assert [place["devices"] for place in planned["places"]] == [["cuda:0"], ["cuda:1"]] * 2
    done = following.wait()
    assert done.left == []

    # Its exit status is the program's, to us and to Slurm.
    assert done.code == 7
    command_line.cluster.wait_for_job(job, "FAILED")
    told = command_line.cluster.slurm("scontrol", "show", "job", job)
    assert "ExitCode=7:0" in told
    assert "Comment=hello" in told
    hosts = _hosts(command_line, told)
    assert f"rank 3 on {hosts[1]} failed: exited with code 7" in done.out

    # A log of every rank and of every node, though there was no folder for them.
    for rank in ranks:
        text = run.get_rank_log_file(rank).read_text()
        port = 20_000 + int(job) % 10_000
        mine = [f"{rank} of 4 on {hosts[rank // 2]}", "eth0 eth0", "devices 0,1", f"port {port}"]
        assert text.splitlines()[:5] == [*mine, "a  b"]
    assert [run.get_node_log_file(node).exists() for node in range(3)] == [True, True, False]
    assert (command_line.folder / "made").exists()  # the script runs where the command was typed

    # The other one had a port of its own, and its script runs by hand.
    command_line.cluster.wait_for_job(job_b, "COMPLETED")
    command_line.cluster.slurm(
        "sbatch", "--wait", str(command_line.run("b").script_file), cwd=command_line.folder
    )
    lines = command_line.run("b").get_rank_log_file(0).read_text().splitlines()
    assert len(lines) == 10
    assert lines[1] == lines[6] == "lo lo"
    ports = {line for line in lines if line.startswith("port")} | {f"port {port}"}
    assert len(ports) == 3


def _hosts(command_line: CommandLine, told: str) -> list[str]:
    listed = told.partition(" NodeList=")[2].split()[0]
    return command_line.cluster.slurm("scontrol", "show", "hostnames", listed).split()


def test_a_port_in_use_is_reported(command_line: CommandLine) -> None:
    first, second, _ = command_line.cluster.nodes
    where = f"launch.sbatch=['--hold','--nodelist={first},{second}']"
    words = ("train", "launch=slurm", "launch.nodes=2", where, "run.name=a", "--wait")
    following = command_line.start(*words)
    job = command_line.job()
    port = 20_000 + int(job) % 10_000
    address = command_line.cluster.addresses[first]
    listen = f"import socket; s = socket.create_server(('{address}', {port})); print(1, flush=True)"
    hold = "while s.accept(): pass"
    taken = command_line.program(sys.executable, "-c", f"{listen}\n{hold}", on=first)
    until(lambda: taken.read_output() == "1\n", START_S, "the port is taken")
    command_line.cluster.slurm("scontrol", "release", job)
    until(lambda: following.process.poll() is not None, START_S, "the job ends")
    taken.end()
    done = following.wait()
    assert done.code == ExitCode.RENDEZVOUS
    assert f"node 0 cannot listen at {first}:{port}: address already in use" in done.out
    assert "Traceback" not in done.out
    command_line.require_nothing_left()


def test_the_example_script_on_one_node_and_on_two(command_line: CommandLine) -> None:
    examples = command_line.folder / "examples"
    shutil.copytree(EXAMPLES, examples, ignore=shutil.ignore_patterns("logs", "runs"))
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    at = ("sbatch", "--wait", "--parsable", f"--chdir={examples}")
    script = str(examples / "sbatch_run.sh")
    jobs = [command_line.program(*at, *n, script, PATH=path) for n in ([], ["-N", "2"])]
    for how_many, started in zip(("one process", "2 processes"), jobs, strict=True):
        done = started.wait()
        log = examples / "logs" / f"{done.out.strip()}.log"  # nobody had made the folder
        assert done.code == 0, log.read_text()
        assert f"on {how_many} (cpu)" in log.read_text()
        assert "finished" in log.read_text()
        assert done.left == []


# --- what Slurm refuses ---


@pytest.mark.parametrize(
    ("word", "says"),
    [
        ("launch.nodes=9", "Requested node configuration is not available"),
        ("launch.partition=no-such", "invalid partition specified: no-such"),
        ("launch.gpus_per_node=5", "Requested node configuration is not available"),
        ("launch.sbatch=['--mem=1000T']", "Requested node configuration is not available"),
        ("launch.sbatch=['--no-such-option']", "unrecognized option '--no-such-option'"),
        ("launch.time=soon", "Invalid --time specification"),
    ],
)
def test_what_slurm_refuses_leaves_nothing(
    word: str,
    says: str,
    cluster: TestCluster,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SLURM_CONF", str(cluster.slurm_conf))
    assert (
        run_and_report_faults(lambda: run_command(["train", "launch=slurm", "run.name=a", word]))
        == ExitCode.USAGE
    )
    told = capsys.readouterr().err
    assert is_a_sentence_and_a_hint(told), told
    assert "Slurm does not take the job" in told
    assert says in told
    assert _list_jobs_of(tmp_path, cluster) == []
    assert list(tmp_path.iterdir()) == []


def _list_jobs_of(folder: Path, cluster: TestCluster) -> list[str]:
    """Those that were submitted from there; others come and go."""
    lines = cluster.slurm("squeue", "-h", "-t", "all", "-o", "%i|%Z").splitlines()
    return [line for line in lines if line.partition("|")[2] == str(folder)]


@pytest.mark.parametrize(
    ("asks", "gets"),
    [
        ("gpus-per-node", "TresPerNode=gres:gpu:2"),
        ("gpus-per-task", "TresPerTask=gres:gpu:2"),
        ("gres", "TresPerNode=gres:gpu:2"),
    ],
)
def test_gpus_are_asked_for_as_the_cluster_wants(
    asks: str, gets: str, command_line: CommandLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(command_line.folder)
    monkeypatch.setenv("SLURM_CONF", str(command_line.cluster.slurm_conf))
    words = ["launch=slurm", "launch.gpus_per_node=2", "launch.sbatch=['--hold']", "run.name=a"]
    assert (
        run_and_report_faults(lambda: run_command(["train", *words, f"launch.gpu_request={asks}"]))
        == ExitCode.OK
    )
    assert gets in command_line.cluster.slurm("scontrol", "show", "job", command_line.job())
