"""`echelon gpus` on a real NVIDIA GPU: the same numbers as nvidia-smi, while a training runs."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.xdist_group("training"),  # one training for all of them
    pytest.mark.skipif(shutil.which("nvidia-smi") is None, reason="there is no nvidia-smi"),
]

MIB = 1 << 20


def typed(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "echelon", "gpus", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=300)


def looked() -> list[dict[str, Any]]:
    done = typed("--json")
    assert done.returncode == 0, done.stderr
    gpus: list[dict[str, Any]] = json.loads(done.stdout)["nodes"][0]["gpus"]
    return gpus


def smi(*fields: str, about: str = "gpu") -> list[list[str]]:
    words = ["nvidia-smi", f"--query-{about}={','.join(fields)}", "--format=csv,noheader,nounits"]
    out = subprocess.run(words, capture_output=True, text=True, check=True, timeout=300).stdout
    return [[cell.strip() for cell in line.split(",")] for line in out.splitlines() if line.strip()]


@pytest.fixture(scope="module")
def training(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A run that goes on until it is ended; its folder."""
    folder = tmp_path_factory.mktemp("training")
    words = ["train", "run.name=busy", "hidden=2048", "samples=65536", "trainer.epochs=100000"]
    words += ["lr=1e-6"]  # a wide layer diverges at the usual one, and the training would be over
    said = folder / "said"
    with said.open("w") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "echelon", *words], cwd=folder, stdout=output, stderr=output
        )
    run = folder / "runs" / "busy"
    deadline = time.monotonic() + 300
    try:
        while not _steps(run):
            assert process.poll() is None, said.read_text()
            assert time.monotonic() < deadline
            time.sleep(0.1)
        yield run
        assert process.poll() is None, f"the training ended meanwhile: {said.read_text()}"
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(timeout=300)


def _steps(run: Path) -> bool:
    file = run / "metrics.jsonl"
    return file.exists() and file.stat().st_size > 0


@pytest.mark.usefixtures("training")
def test_what_stays_is_the_same() -> None:
    named = smi("index", "uuid", "name", "driver_version", "memory.total", "enforced.power.limit")
    for ours, (index, uuid, name, _, total, limit) in zip(looked(), named, strict=True):
        assert (ours["index"], ours["uuid"], ours["name"]) == (int(index), uuid, name)
        assert ours["memory_total_bytes"] // MIB == int(total)
        if ours["power_limit_w"] is not None:
            assert ours["power_limit_w"] == pytest.approx(float(limit), abs=0.01)


@pytest.mark.usefixtures("training")
def test_what_changes_agrees() -> None:
    """Each value lies among those that nvidia-smi gives before and after, or close to them.

    Other tests use the GPU at the same time, so a value may change between two looks: every value
    must agree in one of many rounds, and a wrong one agrees in none.
    """
    slacks = {"memory.used": 2, "temperature.gpu": 2, "power.draw": 60, "utilization.gpu": 30}
    names = ("memory_used_bytes", "temperature_c", "power_w", "use_percent")
    missing = set(names)
    rounds = []
    for _ in range(30):
        rounds.append((smi(*slacks)[0], looked()[0], smi(*slacks)[0]))
        for number, (name, slack) in enumerate(zip(names, slacks.values(), strict=True)):
            before, ours, after = rounds[-1]
            if _agrees(before[number], ours[name], after[number], slack, name):
                missing.discard(name)
        if not missing:
            return
    pytest.fail(f"{missing} agree in none of {rounds}")


def _agrees(before: str, ours: float | None, after: str, slack: float, name: str) -> bool:
    if ours is None:
        return not before.replace(".", "").isdigit()  # nvidia-smi does not know it either
    value = ours / MIB if name.endswith("_bytes") else ours
    theirs = sorted([float(before), float(after)])
    return theirs[0] - slack <= value <= theirs[1] + slack


def test_the_training_is_seen_with_its_run(training: Path) -> None:
    found = [p for gpu in looked() for p in gpu["processes"]]
    theirs = {int(pid): memory for pid, memory in smi("pid", "used_memory", about="compute-apps")}
    if not found and not theirs:
        pytest.skip("this driver lists no processes here, as in some containers")
    mine = [p for p in found if p["run_folder"] == str(training)]
    if not mine:
        assert all(p["pid"] is None for p in found), "known processes, but none is the training"
        pytest.skip("this driver lists processes by numbers of another namespace")
    [process] = mine
    assert process["run"] == "busy"
    assert not process["orphan"]
    assert process["user"]
    if process["pid"] in theirs and theirs[process["pid"]].isdigit():
        ours_mib = process["memory_bytes"] / MIB
        assert ours_mib == pytest.approx(int(theirs[process["pid"]]), abs=2)


@pytest.mark.usefixtures("training")
def test_a_busy_gpu_is_not_free_and_a_launch_says_so(tmp_path: Path) -> None:
    (used, use), listed = smi("memory.used", "utilization.gpu")[0], smi("pid", about="compute-apps")
    if (used, use, listed) == ("0", "0", []):
        pytest.skip("nvidia-smi itself reports this GPU idle while a training runs on it")
    gpus = looked()
    assert not gpus[0]["idle"]
    done = typed("--free", str(len(gpus)))
    assert (done.returncode, done.stdout) == (7, "")
    if not gpus[0]["processes"]:
        pytest.skip("this driver lists no processes here, as in some containers")
    words = ["train", "samples=64", "trainer.epochs=1"]
    launched = subprocess.run(
        [sys.executable, "-m", "echelon", *words],
        cwd=tmp_path,
        env=os.environ | {"CUDA_VISIBLE_DEVICES": "0"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert launched.returncode == 0, launched.stderr
    assert "warning: GPU 0 is in use: " in launched.stderr
