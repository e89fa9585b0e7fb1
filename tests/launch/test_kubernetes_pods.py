"""The pods of launch=k8s, carried out as a kubelet would: the container's command with its
variables, those of the Secret, and the file of the ConfigMap. What no test has is a cluster."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest
import yaml
from command_runner import (
    ECHELON,
    RunningCommand,
    free_port,
    metrics,
    run_here,
    until,
    wait_for_all,
)
from worlds import start_forked

from echelon.errors import ExitCode
from echelon.launch.k8s.manifest import CONFIG_FILE
from echelon.runs.run_folder import Run
from echelon.world.network_key import make_key

pytestmark = pytest.mark.slow
START_S = 300.0


def _plan(folder: Path) -> dict[str, Any]:
    volume = f"launch.k8s.volumes=[team:{folder}]"
    words = ("launch.container=a/b:1", "launch.nodes=2", "run.name=a", "trainer.steps=1000000")
    often = ("trainer.log_steps=1", f"run.dir={folder}/runs", "--dry-run", "--json")
    done = run_here(["train", "launch=k8s", volume, *words, *often], folder)
    assert done.code == ExitCode.OK, done.err
    return {each["kind"]: each for each in yaml.safe_load_all(json.loads(done.out)["manifest"])}


def _start_pods(folder: Path, objects: dict[str, Any], key: str, port: int) -> list[RunningCommand]:
    """What the Job starts. Its name for node 0 is one of the cluster's DNS, which loopback is here;
    and its pods have a network each, where all have the same port."""
    job = objects["Job"]["spec"]
    [container] = job["template"]["spec"]["containers"]
    file = folder / "run.json"
    file.write_text(objects["ConfigMap"]["data"][file.name])
    assert container["command"] == ["python3", "-u", "-m", "echelon", "pod", CONFIG_FILE]
    given = {each["name"]: each["value"] for each in container["env"]}
    given |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "ECHELON_KEY": key}
    return [
        start_forked([*ECHELON, "pod", str(file)], folder, JOB_COMPLETION_INDEX=str(index), **given)
        for index in range(job["completions"])
    ]


def _steps(run: Run) -> list[int]:
    return [line["step"] for line in metrics(run.folder) if "loss" in line]


def _wait_for_step(run: Run, step: int, pods: list[RunningCommand]) -> None:
    def has_step() -> bool:
        return run.metrics_file.exists() and max(_steps(run), default=0) >= step

    until(has_step, START_S, f"step {step}", lambda: "\n".join(pod.describe() for pod in pods))


def test_pods_that_are_stopped_save_and_go_on_when_they_are_made_again(tmp_path: Path) -> None:
    objects, run, key = _plan(tmp_path), Run(tmp_path / "runs" / "a"), make_key()
    saved = 0
    for start in range(2):
        pods = _start_pods(tmp_path, objects, key, free_port())
        _wait_for_step(run, saved + 3, pods)
        # One pod is evicted: the other does not go on without it, and both are to be made again.
        pods[1].process.send_signal(signal.SIGTERM)
        codes = [done.code for done in wait_for_all(pods)]
        assert set(codes) <= {ExitCode.PREEMPTED, ExitCode.LEFT}, pods[0].describe()
        saved = run.find_newest_step() or 0
        status = run.read_status_file()
        assert (status["state"], status["launcher"], status["nodes"]) == ("preempted", "k8s", 2)
        assert [each["after"] for each in status["starts"]] == ["", "preempted"][: start + 1]
    steps = _steps(run)
    assert steps == list(range(1, saved + 1))  # none twice, none left out
