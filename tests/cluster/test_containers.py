"""Runs in containers on the cluster: Charliecloud and podman under Slurm, Charliecloud over ssh."""

from __future__ import annotations

import secrets
import sys
from pathlib import Path

import pytest
from command_line import REGRESSION, START_S, CommandLine, curve
from command_runner import until
from container_images import (
    make_image,
    make_podman_variables,
    make_settings,
    require_containers,
    require_runs,
)
from sshd import HIDE, start_sshd

from echelon.errors import ExitCode

pytestmark = [pytest.mark.slow, pytest.mark.cluster]

NUMBERS = (
    *(REGRESSION, "trainer.batch_size=6", "trainer.save.epochs=null", "trainer.log_steps=1"),
    *("trainer.evaluate.epochs=null", "launch.threads=1", "run.name=a"),
)
LONG, SHORT = "trainer.steps=1000000", "trainer.steps=12"


def prepare(command_line: CommandLine, tmp_path: Path, runtime: str) -> tuple[str, ...]:
    require_containers()
    image = make_image(tmp_path)
    if runtime == "podman":
        command_line.variables |= make_podman_variables(tmp_path)
    require_runs(image, runtime, command_line.variables)
    return make_settings(image, runtime)


def test_two_nodes_of_slurm_in_containers_save_and_queue_again(
    command_line: CommandLine, tmp_path: Path
) -> None:
    container = prepare(command_line, tmp_path, "charliecloud")
    words = ("launch=slurm", "launch.nodes=2", "launch.procs=1", *NUMBERS, LONG, *container)
    done = command_line.type("train", *words)
    assert done.code == ExitCode.OK, done.err
    command_line.wait_for_step(3)
    job, run = command_line.job(), command_line.run()
    assert run.read_status_file()["world"] == 2
    # As Slurm does before the end of the time.
    command_line.cluster.slurm("scancel", "--signal=USR2", job)
    until(lambda: run.read_status_file()["state"] == "preempted", START_S, "saved")
    saved = run.find_newest_step()
    assert saved == run.read_status_file()["step"] == command_line.step()
    command_line.cluster.wait_for_job(job, "PENDING")
    # A killed job leaves nothing on its nodes.
    command_line.wait_for_step(saved + 3)
    assert f"resuming run a after step {saved}" in run.get_rank_log_file(0).read_text()
    command_line.cluster.slurm("scancel", "--signal=KILL", "--full", job)
    command_line.require_nothing_left()


def test_a_podman_container_of_slurm_saves_by_term_and_ends_with_its_job(
    command_line: CommandLine, tmp_path: Path
) -> None:
    container = prepare(command_line, tmp_path, "podman")
    words = ("launch=slurm", "launch.procs=2", "launch.preflight=true", *NUMBERS, LONG, *container)
    done = command_line.type("train", *words)
    assert done.code == ExitCode.OK, done.err
    command_line.wait_for_step(3)
    job, run = command_line.job(), command_line.run()
    assert "#SBATCH --signal=TERM@120" in run.script_file.read_text()
    # To the steps alone, as `--signal=TERM@120` sends it: the script queues the job again.
    command_line.cluster.slurm("scancel", "--signal=TERM", job)
    until(lambda: run.read_status_file()["state"] == "preempted", START_S, "saved")
    assert run.find_newest_step() == run.read_status_file()["step"]
    command_line.cluster.wait_for_job(job, "PENDING")
    command_line.wait_for_more()
    command_line.cluster.slurm("scancel", "--signal=KILL", "--full", job)
    command_line.require_nothing_left()


def test_two_hosts_of_ssh_in_containers(
    command_line: CommandLine, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """One of them shares the folder of the run; for the other it is another, empty one."""
    container = prepare(command_line, tmp_path_factory.mktemp("images"), "charliecloud")
    first, *_, last = command_line.cluster.nodes
    with start_sshd(command_line.cluster, last, [2225], HIDE, command_line.folder) as apart:
        config = command_line.cluster.kind.folder / "ssh" / f"config-{secrets.token_hex(4)}"
        common = command_line.cluster.ssh_config.read_text()
        own = f"Host apart\n  HostName {apart}\n  Port 2225\n  HostKeyAlias {last}\nHost *\n"
        of_a_host = ("Host", "HostName", "HostKeyAlias")
        options = [line for line in common.splitlines() if line.split()[0] not in of_a_host]
        config.write_text(common + own + "\n".join(dict.fromkeys(options)) + "\n")
        hosts = f"launch.hosts=[{first},apart]"
        ssh = f"launch.ssh='ssh -F {config}'"
        words = ("launch=ssh", hosts, ssh, "launch.procs=1", *NUMBERS, *container)
        try:
            done = command_line.type("train", *words, SHORT)
            assert done.code == ExitCode.OK, done.err
            assert len(curve(command_line.run())) == 12
            assert (command_line.run().logs_folder / "rank-1.log").exists(), "brought back"
            assert done.left == []
            # What is wrong is said of every host, before anything is written.
            rest = [w for w in words if not w.startswith(("launch.container_python", "run.name"))]
            wrong = ("launch.container_python=no-python", "run.name=b")
            done = command_line.type("train", *rest, *wrong)
        finally:
            config.unlink()
    assert done.code == ExitCode.USAGE
    for host in (first, "apart"):
        assert f"has no no-python on {host}" in done.err
    assert not command_line.run("b").folder.exists()


def test_tasks_of_srun_are_in_containers(command_line: CommandLine, tmp_path: Path) -> None:
    container = prepare(command_line, tmp_path, "charliecloud")
    program = (
        "import echelon, os; print(os.environ['SLURM_PROCID'], os.environ['MASTER_ADDR'], "
        "echelon.__file__, os.path.exists('/root/.bashrc'), os.getcwd())"
    )
    words = ("run", "launch=slurm", "launch.nodes=2", "mode=srun", "run.name=a", *container)
    done = command_line.type(*words, "--wait", "--", sys.executable, "-c", program)
    assert done.code == ExitCode.OK, done.output
    told = [command_line.run().get_rank_log_file(rank).read_text().split() for rank in range(2)]
    source = "/opt/echelon/echelon/__init__.py"
    there = [source, "False", str(command_line.folder)]
    assert [line[2:] for line in told] == [there, there]
    assert sorted(line[0] for line in told) == ["0", "1"]
    assert told[0][1] == told[1][1] in command_line.cluster.nodes
