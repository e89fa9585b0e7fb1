"""`echelon run`: somebody else's program, on many machines as it would run on one."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
from command_line import CommandLine
from command_runner import EXAMPLES, free_port

from echelon.errors import ExitCode

pytestmark = [pytest.mark.slow, pytest.mark.cluster]

SLURM = ("launch=slurm", "launch.nodes=2", "run.name=a", "--wait")
TORCH = """
import os, socket, sys
import torch, torch.distributed as dist
if os.environ["RANK"] == "3" and not os.path.exists("failed"):
    open("failed", "w").close()
    sys.exit("the first time it fails")
dist.init_process_group("gloo")
one = torch.ones(1)
dist.all_reduce(one)
print(dist.get_rank(), int(one), socket.gethostname(), os.environ["TORCHELASTIC_RESTART_COUNT"])
dist.barrier()
os._exit(0)
"""
ACCELERATE = """
import os, torch
from accelerate import Accelerator
accelerator = Accelerator(cpu=True)
model, data = accelerator.prepare(
    torch.nn.Linear(1, 1), torch.utils.data.DataLoader(torch.ones(8, 1), batch_size=2)
)
for batch in data:
    accelerator.backward(model(batch).sum())
print("rank", accelerator.process_index, "of", accelerator.num_processes, len(data), "batches")
accelerator.wait_for_everyone()
os._exit(0)  # torch's gloo may abort a process while it is destroyed
"""


def test_a_plain_torch_script_on_two_nodes_starts_again_after_a_failure(
    command_line: CommandLine,
) -> None:
    (command_line.folder / "plain.py").write_text(TORCH)
    more = (command_line.first_two_nodes, "launch.procs=2", "launch.max_restarts=1")
    done = command_line.type("run", *SLURM, *more, "--", sys.executable, "plain.py")
    assert done.code == ExitCode.OK, done.out
    assert done.left == []
    nodes = [node for node in command_line.cluster.nodes[:2] for _ in range(2)]
    assert f"rank 3 on {nodes[3]} failed: exited with code 1" in done.out
    assert "starting again, 1 restart(s) left" in done.out
    assert f"0 4 {nodes[0]} 1" in done.out  # rank 0 speaks on the screen
    for rank, node in enumerate(nodes):
        assert (
            f"{rank} 4 {node} 1"
            in command_line.run().get_rank_log_file(rank).read_text().splitlines()
        )
    assert "the first time it fails" in command_line.run().get_rank_log_file(3).read_text()
    assert command_line.run().read_status_file()["state"] == "finished"


def test_lightning_as_tasks_of_srun(command_line: CommandLine) -> None:
    """It finds its place in Slurm's variables, and is told the size of its world by flags."""
    pytest.importorskip("lightning")
    program = str(EXAMPLES / "lightning_program.py")
    flags = ("launch.nodes_flag=--num_nodes", "launch.gpus_flag=--gpus")
    words = (*SLURM, "launch.procs=1", "mode=lightning", *flags, "--", sys.executable, program)
    done = command_line.type("run", *words)
    assert done.code == ExitCode.OK, done.out
    assert done.left == []
    assert "--num_nodes 2 --gpus 1" in command_line.run().script_file.read_text()
    losses = [
        _last_line(command_line.run().get_rank_log_file(rank)).partition(": ") for rank in range(2)
    ]
    assert [who for who, _, _ in losses] == ["rank 0 of 2", "rank 1 of 2"]


def test_lightning_and_accelerate_under_an_agent(command_line: CommandLine) -> None:
    pytest.importorskip("lightning")
    pytest.importorskip("accelerate")
    (command_line.folder / "accelerated.py").write_text(ACCELERATE)
    programs = {"l": str(EXAMPLES / "lightning_program.py"), "a": "accelerated.py"}
    for name, file in programs.items():
        words = ("launch=local", "launch.procs=2", f"run.name={name}", "--", sys.executable, file)
        done = command_line.type("run", *words)
        assert done.code == ExitCode.OK, done.err
        assert done.left == []
        for rank in range(2):
            assert f"rank {rank} of 2" in command_line.run(name).get_rank_log_file(rank).read_text()


def _last_line(log: Path) -> str:
    return log.read_text().rstrip().splitlines()[-1]


def test_tasks_of_srun_and_programs_left_alone(command_line: CommandLine) -> None:
    tell = 'echo "task $SLURM_PROCID of $SLURM_NTASKS, rank [$RANK], devices $CUDA_VISIBLE_DEVICES"'
    gpus = ("launch.gpus_per_node=2", "launch.gpu_request=gpus-per-task")
    # Who fails ends the others, so that it waits until they have been heard.
    told = "for n in 0 1 3; do until grep -qs devices runs/a/logs/rank-$n.log; do sleep 0.1; done"
    fail = f"if test $SLURM_PROCID = 2; then {told}; done; exit 9; fi"
    srun = (*gpus, "mode=srun", "--", "bash", "-c", f"{tell}; {fail}")
    done = command_line.type("run", *SLURM, *srun)
    assert done.code == 9, done.out
    for task in range(4):
        assert (
            f"task {task} of 4, rank []" in command_line.run().get_rank_log_file(task).read_text()
        )
    # Slurm may append that it ended the others.
    devices = [
        re.search(r"devices (\S+)", command_line.run().get_rank_log_file(task).read_text())[1]  # type: ignore[index]
        for task in range(2)
    ]
    assert sorted(devices) == ["0", "1"]

    alone = ("launch=slurm", "launch.nodes=2", "run.name=b", "mode=plain", "--wait")
    done = command_line.type("run", *alone, "--", "bash", "-c", tell)
    assert done.code == ExitCode.OK
    assert "task 1 of 2, rank []" in command_line.run("b").get_rank_log_file(1).read_text()


def test_a_program_that_is_not_there_on_one_node(command_line: CommandLine) -> None:
    """Both are typed as they are; only node 0 has a folder with it on its PATH."""
    tools = command_line.folder / "tools"
    tools.mkdir()
    (tools / "mine").write_text("#!/bin/bash\nsleep 1000\n")
    (tools / "mine").chmod(0o755)
    hosts = command_line.cluster.nodes[:2]
    path = f"{Path(sys.executable).parent}:/usr/sbin:/usr/bin:/sbin:/bin"
    same = {"MASTER_ADDR": hosts[0], "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2"}
    words = ("run", "launch=env", "run.name=a", "--", "mine")
    world = [
        command_line.start(*words, on=hosts[0], NODE_RANK="0", PATH=f"{tools}:{path}", **same),
        command_line.start(*words, on=hosts[1], NODE_RANK="1", PATH=path, **same),
    ]
    for node in world:
        done = node.wait()
        assert done.code == 127
        assert f"rank 1 on {hosts[1]}" in done.err
    first = world[0].read_output()
    assert f"error: mine cannot be run on {hosts[1]}: no such file or directory" in first
    assert "hint: give its full path, or a command that is on the PATH of every node" in first
    assert "Traceback" not in first
    command_line.require_nothing_left()
