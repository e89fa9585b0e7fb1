"""Several processes of one machine: by launch=local, by torchrun, from a user's own file."""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
from pathlib import Path
from typing import Any

import command_runner
import pytest
from command_runner import (
    ECHELON,
    HERE,
    QUICK,
    TORCHRUN,
    TWO,
    curve,
    evaluations,
    metrics,
    only_run,
    status,
)
from worlds import run_forked, started_forked

from echelon.cli import run_and_report_faults, run_command

TRAIN = (*ECHELON, "train")
OWN = """
import torch, echelon
{before}
def experiment(cfg):
    print("built by", __name__)
    model = torch.nn.Linear(4, 1)
    x = torch.ones(8, 4)
    return echelon.Experiment(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.01),
        loss=torch.nn.functional.mse_loss,
        train_data=(x, x.sum(1, keepdim=True)),
    )
{call}
"""
GUARDED = 'if __name__ == "__main__":\n    echelon.main(experiment)'
BARE = "echelon.main(experiment)"
THREAD = "import threading\nthreading.Thread(target=threading.Event().wait, daemon=True).start()"
POOL = (
    "torch.set_num_threads(4)\n"
    "assert (torch.rand(900, 900) @ torch.rand(900, 900)).sum() > 0\n"
    "assert torch.rand(4000000).sum() > 0"
)
# Backward passes nested deeper than autograd nests them in one thread: what a backward pass starts
# on any machine with a GPU, this starts on every machine.
GRADIENTS = """
from torch.utils.checkpoint import checkpoint
def nested(x, depth):
    return checkpoint(nested, x, depth - 1, use_reentrant=True) if depth else x.tanh()
nested(torch.ones(2, requires_grad=True), 70).sum().backward()
"""


# --- launch=local ---


@pytest.mark.slow
def test_two_processes_leave_a_whole_run(tmp_path: Path) -> None:
    words = [*TRAIN, *TWO, *QUICK, "trainer.log_steps=1"]
    done = command_runner.run(words, tmp_path, WANDB_API_KEY="canary-5e0b")
    assert done.code == 0, done.err
    assert done.left == []
    folder = only_run(tmp_path)
    # Rank 0 is on the screen and in its log, the other in its log alone.
    log = (folder / "logs" / "rank-0.log").read_text()
    assert "finished 16 steps" in log
    assert "finished 16 steps" in done.err
    assert (folder / "logs" / "rank-1.log").exists()
    told = status(folder)
    assert (told["state"], told["step"], told["total_steps"]) == ("finished", 16, 16)
    assert told["failure"] is None
    # Only rank 0 writes: every step once, every evaluation once, every snapshot whole.
    assert [step for step, _ in curve(folder)] == list(range(1, 17))
    assert [step for step, _ in evaluations(folder)] == [8, 16]
    saved = sorted(p.name for p in (folder / "snapshots").iterdir())
    assert saved == ["best", "step-000000008", "step-000000016"]
    assert (tmp_path / "runs" / "latest").resolve() == folder
    assert curve(folder)[-1][1] < curve(folder)[0][1]
    # Where things are and what to type next.
    for told_where in (f"runs/{folder.name}/snapshots/step-000000016", "metrics.jsonl"):
        assert told_where in done.err
    assert f"echelon resume {folder.name}" in done.err
    # A secret of the environment is nowhere.
    files = [path for path in folder.rglob("*") if path.is_file()]
    assert all(b"canary-5e0b" not in path.read_bytes() for path in files)
    assert "canary-5e0b" not in done.out + done.err


@pytest.mark.slow
def test_the_default_is_one_process_where_there_is_no_device(tmp_path: Path) -> None:
    done = run_forked([*TRAIN, "launch=local", *QUICK], tmp_path, CUDA_VISIBLE_DEVICES="")
    assert done.code == 0, done.err
    assert done.left == []
    assert [p.name for p in (only_run(tmp_path) / "logs").glob("*.log")] == ["rank-0.log"]
    assert len(metrics(only_run(tmp_path))) > 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("before", "call", "threads"),
    [("", BARE, 4), (POOL, GUARDED, 4), (GRADIENTS, GUARDED, 1)],
    ids=["no __main__ guard", "torch's threads at import", "gradients"],
)
def test_a_users_own_file_launches_itself(
    before: str, call: str, threads: int, tmp_path: Path
) -> None:
    (tmp_path / "own.py").write_text(OWN.format(before=before, call=call))
    # OMP_NUM_THREADS=1 would keep torch from starting threads, but not autograd.
    done = command_runner.run(
        [sys.executable, "own.py", *TWO], tmp_path, OMP_NUM_THREADS=str(threads)
    )
    assert done.code == 0, done.err
    assert done.left == []
    assert status(only_run(tmp_path))["state"] == "finished"
    assert "finished 3 steps" in done.err
    assert done.out.count("built by") == 1  # rank 0's; the other's is in its log
    for rank in range(2):
        log = only_run(tmp_path) / "logs" / f"rank-{rank}.log"
        assert log.read_text().count("built by") == 1


@pytest.mark.slow
def test_threads_and_no_guard_are_told_apart_from_a_crash(tmp_path: Path) -> None:
    """Here a worker has to import the file, which would start a launch of its own."""
    (tmp_path / "own.py").write_text(OWN.format(before=THREAD, call=BARE))
    done = command_runner.run([sys.executable, "own.py", *TWO], tmp_path)
    assert done.code == 2
    assert done.left == []
    assert "own.py calls echelon.main while it is being imported" in done.err
    assert 'if __name__ == "__main__":' in done.err
    assert "Traceback" not in done.err


@pytest.mark.slow
@pytest.mark.parametrize("threads", [1, 2])
def test_a_process_with_threads_of_autograd_is_not_forked(threads: int, tmp_path: Path) -> None:
    """After imports, after a backward pass in one thread, after some in several; OpenBLAS's idle
    threads are no reason not to."""
    ask = "print(fork_server._can_fork_safely(), flush=True)"
    code = f"import torch\nfrom echelon.launch.node import fork_server\n{ask}\n"
    code += f"torch.ones(2, requires_grad=True).sum().backward()\n{ask}\n{GRADIENTS}\n{ask}\n"
    code += "import os\nos._exit(0)"  # torch may abort while autograd's threads end
    variables: dict[str, Any] = {"OMP_NUM_THREADS": str(threads), "CUDA_VISIBLE_DEVICES": ""}
    done = command_runner.run([sys.executable, "-c", code], tmp_path, **variables)
    assert done.out == "True\nTrue\nFalse\n", done.err


# --- before anything happens ---


def test_a_dry_run_prints_the_plan_and_makes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    words = ["train", *TWO, "launch.max_restarts=3", "--dry-run"]
    assert run_and_report_faults(lambda: run_command(words)) == 0
    text = capsys.readouterr().out
    assert "launch=local" in text
    assert "OMP_NUM_THREADS=1" in text
    assert "3" in text.splitlines()[-1]  # restarts
    assert run_and_report_faults(lambda: run_command([*words, "--json"])) == 0
    plan = json.loads(capsys.readouterr().out)
    host = socket.gethostname()
    assert plan["launcher"] == "local"
    assert plan["places"] == [
        {"rank": r, "host": host, "local_rank": r, "devices": ["cpu"]} for r in range(2)
    ]
    assert plan["variables"] == {"OMP_NUM_THREADS": "1"}
    assert list(tmp_path.iterdir()) == []


def test_a_dry_run_of_one_rank_says_whom_it_would_meet(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["train", "rank=1", "world_size=4", "master=127.0.0.1:4711", "--dry-run"]
    assert run_and_report_faults(lambda: run_command(words)) == 0
    text = capsys.readouterr().out
    assert "meet the other 3 processes at 127.0.0.1:4711" in text
    assert list(tmp_path.iterdir()) == []


def test_explain_under_torchruns_variables(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    torchrun = {
        "RANK": "3",
        "WORLD_SIZE": "4",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "2",
        "GROUP_RANK": "1",
        "GROUP_WORLD_SIZE": "2",
        "MASTER_ADDR": "head",
        "MASTER_PORT": "4711",
        "TORCHELASTIC_RUN_ID": "100",
        "SLURM_JOB_ID": "7",
        "SLURM_PROCID": "0",
    }
    for name, value in torchrun.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert run_and_report_faults(lambda: run_command(["explain", "--json"])) == 0
    told = json.loads(capsys.readouterr().out)
    world = told["world"]
    assert (world["rank"], world["size"], world["local_rank"], world["nodes"]) == (3, 4, 1, 2)
    assert (world["source"], world["master"]) == ("torchrun", "head:4711")
    because = {reason["field"]: reason["because"] for reason in told["reasons"]}
    assert "RANK=3" in because["rank"]
    assert "SLURM_PROCID" in {ignored["variable"] for ignored in told["ignored"]}


def test_explain_a_replica_of_two_stages(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert (
        run_and_report_faults(lambda: run_command(["explain", "--json", "replica.devices=2"])) == 0
    )
    told = json.loads(capsys.readouterr().out)
    assert told["world"]["devices"] == ["cpu stage 0", "cpu stage 1"]
    assert told["reasons"][-1]["because"] == "no CUDA device is visible: 2 stages of one CPU"


# --- torchrun ---


@pytest.mark.slow
def test_torchrun_starts_a_killed_worker_again_in_the_same_run(tmp_path: Path) -> None:
    faulty = [str(HERE / "faulty_experiment.py"), "trainer.batch_size=8", "trainer.epochs=2"]
    settings = ["trainer.log_steps=1", "fault=kill", "on=1", "at=13", f"once={tmp_path}/once"]
    settings += [f"after={tmp_path}/runs/*/snapshots/step-000000010"]
    options = ["--standalone", "--nproc_per_node=2", "--max-restarts=1"]
    done = command_runner.run([*TORCHRUN, *options, *faulty, *settings], tmp_path, timeout_s=300)
    assert done.code == 0, done.err
    assert done.left == []
    folder = only_run(tmp_path)  # one, not two
    assert "after step 10" in done.err  # where it had saved
    assert [step for step, _ in curve(folder)] == list(range(1, 21))
    assert status(folder)["state"] == "finished"


@pytest.mark.slow
def test_torchrun_asked_to_stop_lets_the_ranks_save(tmp_path: Path) -> None:
    options = ["--standalone", "--nproc_per_node=2", "-m", "echelon", "train"]
    words = [*TORCHRUN, *options, "run.name=a", "trainer.steps=1000000"]
    folder = tmp_path / "runs" / "a"
    with started_forked(words, tmp_path) as running:
        command_runner.until(lambda: folder.exists() and len(_lines(folder)) > 2, 300, "training")
        os.kill(running.process.pid, signal.SIGTERM)
        done = running.wait()
    assert done.code != 0
    assert done.left == []
    told = status(folder)
    assert told["state"] == "preempted"
    assert (folder / "snapshots" / f"step-{told['step']:09d}" / "manifest.json").exists()
    assert f"stopped by SIGTERM after step {told['step']}" in done.err


def _lines(folder: Path) -> list[str]:
    file = folder / "metrics.jsonl"
    return file.read_text().splitlines() if file.exists() else []


@pytest.mark.slow
def test_a_worker_killed_from_outside_is_noticed(tmp_path: Path) -> None:
    words = [*TRAIN, *TWO, "run.name=a", "samples=64000", "trainer.epochs=1000"]
    words += ["launch.max_replacements=0"]
    with started_forked(words, tmp_path) as running:
        folder = tmp_path / "runs" / "a"
        command_runner.until(
            lambda: min(command_runner.steps_seen(folder, 2)) > 20, 300, "training"
        )
        victim = max(command_runner.workers(running.process.pid))
        os.kill(victim, signal.SIGKILL)
        done = running.wait()
    assert done.code == 1
    assert done.left == []
    assert "killed by SIGKILL" in done.last_lines
