"""What a job tells, from the queue to its end, and what it has cost by Slurm's accounts."""

from __future__ import annotations

import json
import os
import signal
import socket
from collections.abc import Iterator
from pathlib import Path

import news_servers
import pytest
from command_line import REGRESSION, CommandLine, open_command_line
from command_runner import until
from node_worlds import start_world, wait_for_ends
from slurm_cluster import TestCluster

pytestmark = [pytest.mark.slow, pytest.mark.cluster]

CANARY = "c4nary-of-a-secret"


@pytest.fixture
def at_accounted(accounted: TestCluster, tmp_path: Path) -> Iterator[CommandLine]:
    with open_command_line(accounted, tmp_path) as opened:
        opened.variables |= news_servers.DIRECTLY
        yield opened


def test_a_job_tells_of_itself_and_costs_what_slurm_says(at_accounted: CommandLine) -> None:
    """The queue is told by the command that waits, all else by the job, also after a requeue."""
    with news_servers.serve_web(host=at_accounted.address) as sink:
        secrets = at_accounted.folder / "secrets"
        secrets.write_text(f"ECHELON_WEBHOOK_URL={sink.url}/{CANARY}\n")
        secrets.chmod(0o600)
        (at_accounted.folder / "echelon.yaml").write_text(
            f"notify:\n  to: [webhook, desktop]\n  queued_minutes: 0.01\nsecrets: {secrets}\n"
        )
        at_accounted.variables["ECHELON_TEST_PAUSE_S"] = "0.05"
        words = ("launch=slurm", "launch.gpus_per_node=2", "launch.procs=1", "launch.threads=1")
        held = ("launch.sbatch=[--hold]", "--wait", "run.name=a")
        steps = ("trainer.steps=60", "trainer.log_steps=1", "eval_samples=0")
        waiting = at_accounted.start("train", *words, *held, *steps, REGRESSION)
        until(lambda: sink.events == ["queued"], 300, "news of the queue", waiting.describe)
        queued = sink.received[0]
        assert queued["lines"][0] == f"job {at_accounted.job()}"
        assert "JobHeldUser" in queued["lines"][1]
        at_accounted.cluster.slurm("scontrol", "release", at_accounted.job())
        assert waiting.wait().code == 0, waiting.describe()
    assert sink.events == ["queued", "started", "finished"]
    assert sink.received[1]["job"] == at_accounted.job()
    assert sink.received[1]["host"] != socket.gethostname()
    folder = at_accounted.run().folder
    files = [path for path in folder.rglob("*") if path.is_file()]
    assert [path for path in files if CANARY.encode() in path.read_bytes()] == []

    # accounts are written some seconds after a job has ended
    query = ("sacct", "-nXP", "-j", at_accounted.job(), "-o", "State,ElapsedRaw")
    is_over = lambda: at_accounted.cluster.slurm(*query).startswith("COMPLETED")  # noqa: E731
    until(is_over, 120, "accounts of the job")
    elapsed_s = int(at_accounted.cluster.slurm(*query).strip().split("|")[1])
    (found,) = json.loads(at_accounted.type("cost", "a", "--json").out)["rows"]
    assert found["sources"] == ["slurm"]
    assert found["gpu_hours"] == pytest.approx(2 * elapsed_s / 3600, abs=2 / 3600)
    assert found["gpu_hours_by_use"]["stepping"] > 0
    by_history = json.loads(at_accounted.type("cost", "a", "--history", "--json").out)
    assert by_history["rows"][0]["sources"] == ["history"]


def test_another_node_tells_when_the_one_that_led_is_killed(at_accounted: CommandLine) -> None:
    """What node 0 has left behind keeps silent, and the next leader says what was lost."""
    with news_servers.serve_web(host=at_accounted.address) as sink:
        at_accounted.variables["ECHELON_WEBHOOK_URL"] = f"{sink.url}/{CANARY}"
        world = start_world(
            at_accounted, "notify=webhook", "trainer.steps=80", "missing_pause_s=0.05"
        )
        until(lambda: sink.events == ["started"], 300, "news", at_accounted.describe)
        os.kill(world[0].process.pid, signal.SIGKILL)
        assert wait_for_ends(world)[1:] == [0, 0], at_accounted.describe()
    assert sink.events == ["started", "lost", "finished"]
    assert at_accounted.cluster.nodes[0] in " ".join(sink.received[1]["lines"])
