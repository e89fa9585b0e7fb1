"""launch=slurm with types of GPUs, features, reservations, several partitions, and other runs to
wait for: what Slurm makes of it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from command_line import CommandLine
from command_runner import until
from slurm_cluster import LIMIT_S, TestCluster

from echelon.errors import ExitCode
from echelon.launch.slurm.version import parse_slurm_version

pytestmark = [pytest.mark.slow, pytest.mark.cluster]

RUN = ("run", "launch=slurm", "mode=plain")
"""Once per node, left alone: what runs is a shell, which starts at once."""


@contextmanager
def reserved(cluster: TestCluster, name: str, node: str) -> Iterator[None]:
    """A reservation of a node for this user."""
    words = ("starttime=now", "duration=30", "users=root", f"nodes={node}")
    cluster.slurm("scontrol", "create", "reservation", f"reservationname={name}", *words)
    try:
        yield
    finally:
        cluster.slurm("scontrol", "delete", f"reservation={name}")


def test_an_odd_job_gets_what_it_asked_for(command_line: CommandLine) -> None:
    cluster = command_line.cluster
    second = cluster.nodes[1]
    words = (
        *("launch.exclusive=true", "launch.constraint=infiniband", "launch.partition=high,main"),
        *("launch.reservation=course", "launch.gpus_per_node=a100:2", "launch.time=10:00"),
        *("launch.signal_lead_s=60", "launch.deadline=now+1hour"),
    )
    tell = "echo $(hostname) $CUDA_VISIBLE_DEVICES"
    cluster.wait_until_empty()
    with reserved(cluster, "course", second):
        done = command_line.type(*RUN, "run.name=a", *words, "--wait", "--", "sh", "-c", tell)
        job = command_line.job()
        told = cluster.slurm("scontrol", "show", "job", job)
        cluster.wait_for_job(job, "COMPLETED")
    assert done.code == ExitCode.OK, done.output
    assert command_line.run().get_rank_log_file(0).read_text() == f"{second} 0,1\n"
    for fact in (
        *("OverSubscribe=NO", "Features=infiniband", "Reservation=course", "TimeLimit=00:10:00"),
        *("TresPerNode=gres:gpu:a100:2", f"NodeList={second}", "Deadline=", "NumCPUs=4"),
    ):
        assert fact in told, told


def test_slurm_refuses_before_anything_is_written(command_line: CommandLine) -> None:
    for word in ("gpus_per_node=h100:1", "constraint=nowhere", "licenses=none:1", "partition=x,y"):
        done = command_line.type(*RUN, f"launch.{word}", "--", "true")
        assert done.code == ExitCode.USAGE, word
        assert "error: Slurm does not take the job: " in done.err
    version = parse_slurm_version(command_line.cluster.slurm("sbatch", "--version"))
    new = command_line.type(*RUN, "launch.sbatch=['--consolidate-segments']", "--", "true")
    if version is not None and version < (25, 11):
        assert f"Slurm 25.11 and later, but here is Slurm {version}" in new.err
    assert not (command_line.folder / "runs").exists()


def test_a_run_waits_for_another_one(command_line: CommandLine, tmp_path: Path) -> None:
    """Of two, one ends well and one fails; three runs and an array wait for them."""
    cluster, go = command_line.cluster, tmp_path / "go"
    wait = f"until test -e {go}; do sleep 0.1; done; exit "

    def queue(name: str, code: int, *words: str) -> str:
        text = f"{wait}{code}"
        done = command_line.type(*RUN, f"run.name={name}", *words, "--", "sh", "-c", text)
        assert done.code == ExitCode.OK, done.output
        return command_line.job(name)

    well, bad = queue("well", 0), queue("bad", 3)
    after_well = queue("after-well", 0, "launch.after=well,afterany:bad")
    after_bad = queue("after-bad", 0, f"launch.after={bad}")
    array = command_line.type(
        *("train", "launch=slurm", "-m", "lr=0.1,0.2", "trainer.epochs=0", "run.name=many"),
        f"launch.after=afterany:{command_line.run('bad').folder}",
    )
    assert array.code == ExitCode.OK, array.output
    assert f"--dependency=afterok:{well},afterany:{bad}\n" in (
        command_line.run("after-well").script_file.read_text()
    )
    assert cluster.slurm("squeue", "-h", "-j", after_well, "-o", "%T %r").split() == [
        *("PENDING", "Dependency"),
    ]
    names = ("after-well", "after-bad", "many-1")

    def read_notes() -> list[str]:
        listed = json.loads(command_line.type("jobs", "--json").out)
        notes = {job["run"]: job["note"] for job in listed}
        return [notes[name] for name in names]

    until(lambda: read_notes() == ["Dependency"] * 3, LIMIT_S, "Slurm has looked at all of them")
    cluster.slurm("scancel", command_line.job("many-0").partition("_")[0])
    go.touch()
    cluster.wait_for_job(after_well, "COMPLETED")
    cluster.wait_for_job(after_bad, "CANCELLED")
    shown = command_line.type("show", "after-bad")
    assert "cancelled" in shown.out
    assert "what it waited for did not end well (launch.after)" in shown.out

    said = command_line.type(*RUN, "launch.after=bad", "--", "true")
    assert said.code == ExitCode.USAGE
    assert "run bad is failed" in said.err
    assert "launch.after=afterany:bad" in said.err
    by_job = command_line.type(*RUN, f"launch.after={after_bad}_7", "--", "true")
    assert by_job.code == ExitCode.NOT_FOUND
    assert "Slurm knows no job" in by_job.err
    over = command_line.type(*RUN, "launch.after=well", "--dry-run", "--", "true")
    assert "run well is finished already, so nothing is waited for" in over.err
    assert "--dependency" not in over.out


def test_a_submitted_command_waits_too(command_line: CommandLine, tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    (source / "experiment_configurations.txt").write_text("python -c 'print(1)'\n")
    hold = command_line.type(*RUN, "launch.sbatch=['--hold']", "run.name=a", "--", "true")
    assert hold.code == ExitCode.OK, hold.output
    words = ("submit", "--source", str(source), "mode=plain", "launch.after=a", "--name", "b")
    done = command_line.type(*words, "launch.exclusive=true", limit_s=LIMIT_S)
    assert done.code == ExitCode.OK, done.output
    script = command_line.run("b").script_file.read_text()
    assert f"#SBATCH --dependency=afterok:{command_line.job()}\n" in script
    assert "#SBATCH --exclusive\n" in script
