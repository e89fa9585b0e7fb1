"""Jobs, GPUs and processors on the board. NVML is a stand-in that is built from C."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from board_requests import Answer, ask, ask_until
from fake_nvml import GIB, FakeDriver, gpu, process, run_idle_process
from run_folders import lines, make_run

from echelon.board import machines
from echelon.board.machines import MachineSampler, list_machines_of_runs
from echelon.board.server import Board
from echelon.gpus import nvml
from echelon.gpus.remote import RemoteMachine
from echelon.runs.preflight_results import list_preflight_results, record_preflight_results


@pytest.fixture
def driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeDriver:
    if shutil.which("gcc") is None:
        pytest.skip("the stand-in for NVML is built with gcc")
    found = FakeDriver(tmp_path / "driver", gpu(0, use=42, used=3 * GIB), gpu(1))
    monkeypatch.setattr(nvml, "LIBRARY", str(found.library))
    return found


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ECHELON_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def sampling(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., MachineSampler]]:
    """Samplers that stop with the test."""
    monkeypatch.setattr(machines, "_LOOKED_AT_S", 0.3)
    made: list[MachineSampler] = []

    def make(*others: RemoteMachine) -> MachineSampler:
        made.append(MachineSampler(lambda: list(others), 0.05))
        return made[-1]

    yield make
    until = time.monotonic() + 60
    while any(sampler.is_running for sampler in made):
        assert time.monotonic() < until, "a sampler goes on though nobody looks"
        time.sleep(0.02)


def look_until(
    sampler: MachineSampler, condition: Callable[[list[dict[str, Any]]], bool]
) -> list[dict[str, Any]]:
    answer = ask_until(lambda a: condition(a.data), lambda: Answer(200, sampler.look()))
    return list(answer.data)


def test_gpus_of_here_with_users_and_history(
    driver: FakeDriver, sampling: Callable[..., MachineSampler]
) -> None:
    with run_idle_process("train") as pid:
        driver.set(gpu(0, use=42, used=3 * GIB), gpu(1), process(pid, on=0, gib=2.5))
        sampler = sampling()
        [host] = look_until(sampler, lambda hosts: len(hosts[0]["gpus"][0]["history"]) > 2)
    first, second = host["gpus"]
    assert host["error"] is None
    assert (first["use_percent"], first["memory_used_bytes"]) == (42, 3 * GIB)
    assert len(first["users"]) == 1
    assert first["processes"][0]["pid"] == pid
    assert first["history"][0][1:] == [42, 3 * GIB]
    assert [second["users"], second["idle"]] == [[], True]
    assert host["cpu"]["cores"] == os.cpu_count()
    assert host["cpu"]["memory_total_bytes"] > host["cpu"]["memory_used_bytes"] > 0
    moments = [sample[0] for sample in host["cpu"]["history"]]
    assert moments == sorted(moments)


def test_what_is_older_than_an_hour_is_dropped(
    driver: FakeDriver, sampling: Callable[..., MachineSampler], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machines, "_KEPT_S", 0.2)
    sampler = sampling()
    begun = time.time()
    look_until(sampler, lambda hosts: hosts[0]["sampled"] > begun + 1.0)
    [host] = sampler.look()
    moments = [sample[0] for sample in host["gpus"][0]["history"]]
    assert moments[0] > begun + 0.5
    assert moments[-1] - moments[0] <= 0.2


def test_a_machine_without_gpus_says_so(
    sampling: Callable[..., MachineSampler], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nvml, "LIBRARY", "libnothing.so.1")
    [host] = look_until(sampling(), lambda hosts: bool(hosts))
    assert "no NVIDIA driver" in host["error"]
    assert host["gpus"] == []


def test_other_machines_are_read_and_may_be_gone(
    driver: FakeDriver, sampling: Callable[..., MachineSampler]
) -> None:
    environment = f"LD_LIBRARY_PATH={driver.library.parent}"
    there = RemoteMachine("there", ("env", environment), False)
    gone = RemoteMachine("gone", ("false",), False)
    hosts = look_until(
        sampling(there, gone),
        lambda hosts: (
            len(hosts) == 3
            and all(h["gpus"] or (h["error"] or "connecting").find("connecting") < 0 for h in hosts)
        ),
    )
    by_name = {host["host"]: host for host in hosts}
    assert by_name["there"]["gpus"][0]["use_percent"] == 42
    assert by_name["there"]["cpu"] is None
    assert "cannot be reached" in by_name["gone"]["error"]


def test_hosts_of_active_runs_are_asked(tmp_path: Path) -> None:
    alive = {"host": "far", "pid": 1, "born": "1"}
    running = {"state": "running", "process": alive}
    for name, status in {"a": running, "b": running | {"state": "finished"}}.items():
        make_run(tmp_path / "runs", name, status=status | {"host": name})
    odd = {"state": "running", "process": alive | {"host": "-oProxyCommand=x"}}
    make_run(tmp_path / "runs", "c", status=odd)
    board = Board([tmp_path / "runs"])
    for name in "abc":
        board.index.read_again(f"0:{name}")
    found = [machine for machine in list_machines_of_runs(board) if machine.needs_shell_quoting]
    assert [machine.host for machine in found] == ["far"]
    assert found[0].command_prefix[0] == "ssh"


def test_jobs_are_those_of_echelon_jobs(tmp_path: Path) -> None:
    root = tmp_path / "runs"
    for number in range(14):
        make_run(root, f"r{number}", lines(), status={"started": 1e9 + number, "step": 40})
    active = {"host": "far", "pid": 1, "born": "1"}
    make_run(root, "old", status={"state": "running", "started": 1e8, "process": active})
    board = Board([root])
    for name in os.listdir(root):
        board.index.read_again(f"0:{name}")
    data = ask(board, machines.ROUTES, "/api/jobs").data
    names = [job["run"] for job in data["jobs"]]
    assert names == [*(f"r{number}" for number in range(13, 4, -1)), "old"]
    job = data["jobs"][-1]
    assert (job["id"], job["state"], job["host"], job["own"]) == ("0:old", "running", "far", True)
    assert data["jobs"][0]["step"] == 40
    if shutil.which("squeue") is None:
        assert data["queue"] is None


def test_the_queue_of_slurm_is_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = tmp_path / "bin/squeue"
    tool.parent.mkdir()
    tool.write_text(
        "#!/bin/sh\n"
        "echo '7|gpu|me|RUNNING|1:00|2:00|2|gres:gpu:4|2026-01-01T00:00:00|n[1-2]|a|b'\n"
        "echo nonsense\n"
    )
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tool.parent}:{os.environ['PATH']}")
    found = machines._SlurmQueueReader().read({"7": "0:a"})
    assert found == {
        "error": "",
        "jobs": [
            {
                **{"job": "7", "partition": "gpu", "user": "me", "state": "RUNNING"},
                **{"time": "1:00", "limit": "2:00", "nodes": "2", "gres": "gres:gpu:4"},
                **{"submitted": "2026-01-01T00:00:00", "reason": "n[1-2]", "name": "a|b"},
                **{"own": False, "run": "0:a"},
            }
        ],
    }


def test_results_of_preflights_are_kept(tmp_path: Path) -> None:
    for number in range(25):
        record_preflight_results({"ready": number}, f"r{number}", os.environ)
    found = list_preflight_results(os.environ)
    assert [each["ready"] for each in found] == list(range(24, 4, -1))
    assert found[0]["run"] == "r24"
