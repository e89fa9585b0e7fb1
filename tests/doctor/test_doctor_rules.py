"""`echelon doctor`: bad facts as data, and what is said of them."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from echelon.doctor.machine_facts import (
    EXTRAS,
    DiskFacts,
    DriverFacts,
    GpuModel,
    MachineFacts,
    MissingDriver,
    ResourceLimit,
    ToolFacts,
    TorchFacts,
    describe_exit,
)
from echelon.doctor.rules import evaluate_machine, evaluate_smoke_test
from echelon.doctor.smoke_test import SmokeTestResult
from echelon.doctor.torch_wheels import is_built_for, make_install_command, parse_version
from echelon.doctor.verdict import FAIL, NONE, OK, WARN, Verdict, find_worst_state

GB = 10**9
WHL = "pip install --force-reinstall torch --index-url https://download.pytorch.org/whl"
H100 = GpuModel("NVIDIA H100", (9, 0))
ARCHS = ("sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120")
TORCH = TorchFacts("2.9.0+cu128", "12.8", archs=ARCHS, nccl="2.27.5", devices=[H100, H100])
DRIVER = DriverFacts("570.86", (12, 8), [H100, H100])
NO_LIMIT = ResourceLimit(float("inf"), float("inf"))
GOOD = MachineFacts(
    python=(3, 12),
    executable="/v/bin/python",
    venv="/v",
    echelon="0.1.0",
    extras={"wandb": True, "plot": True},
    torch=TORCH,
    driver=DRIVER,
    visible_gpus=2,
    nvcc_version="12.8",
    port_fault="",
    disks=[DiskFacts(what, f"/{what}", 50 * GB, 10**6, True) for what in ("here", "runs", "tmp")],
    shm_bytes=(64 * GB, 64 * GB),
    open_files_limit=ResourceLimit(1024, 1_048_576),
    process_limit=NO_LIMIT,
    locked_memory_limit=NO_LIMIT,
    has_infiniband=True,
    core_count=16,
    omp_num_threads=None,
    wandb_fault=None,
    slurm=ToolFacts("slurm 24.05"),
    ssh=ToolFacts("OpenSSH_9.2, OpenSSL 3"),
    now=1.8e9,
    is_clock_synchronized=True,
    host="n1",
    addresses=["10.0.0.1"],
)


def evaluate(check: str, **facts: Any) -> Verdict:
    """The verdict of one check on a machine that is good but for these facts."""
    found = [v for v in evaluate_machine(replace(GOOD, **facts)) if v.check == check]
    assert len(found) == 1, found
    return found[0]


def test_a_good_machine_is_well() -> None:
    assert {v.state for v in evaluate_machine(GOOD)} == {OK}
    assert evaluate("gpu 1").found == "NVIDIA H100, compute capability 9.0"


def test_a_laptop_without_a_gpu_is_well() -> None:
    cpu = TorchFacts("2.9.0+cpu")
    facts: dict[str, Any] = {
        "driver": MissingDriver("there is none"),
        "torch": cpu,
        "visible_gpus": 0,
        "nvcc_version": None,
    }
    verdicts = evaluate_machine(replace(GOOD, **facts, slurm=None, ssh=None))
    assert find_worst_state(verdicts) == OK
    unneeded = {v.check for v in verdicts if v.state == NONE}
    assert unneeded == {"driver", "toolkit", "nccl", "slurm", "ssh"}


# --- torch, driver, devices ---


def test_a_driver_that_does_not_work_is_a_warning() -> None:
    """As after an update without a restart: a training would run on the CPU, and say nothing."""
    broken = MissingDriver("the NVIDIA driver was changed under a running system (reboot)", True)
    verdict = evaluate("driver", driver=broken)
    assert (verdict.state, verdict.found) == (WARN, broken.reason)
    assert "restart the machine" in verdict.do


def test_a_driver_too_old_for_the_wheel() -> None:
    verdict = evaluate("driver", driver=DRIVER._replace(version="520.61", cuda=(11, 8)))
    assert verdict.state == FAIL
    assert verdict.found == ("520.61, supports CUDA up to 11.8, but torch is built for CUDA 12.8")
    assert verdict.do == f"{WHL}/cu118"


def test_a_driver_too_old_for_any_wheel() -> None:
    verdict = evaluate("driver", driver=DRIVER._replace(version="470.1", cuda=(11, 4)))
    assert (verdict.state, verdict.do.partition(":")[0]) == (FAIL, "install a later driver")


def test_a_driver_of_the_same_major_version_runs_the_wheel() -> None:
    verdict = evaluate("driver", driver=DRIVER._replace(cuda=(12, 2)))
    assert verdict.state == OK
    assert "12.8 runs on it too" in verdict.found


def test_a_wheel_for_the_cpu_on_a_machine_with_gpus() -> None:
    verdict = evaluate("torch", torch=TorchFacts("2.9.0+cpu"))
    assert verdict.state == FAIL
    assert verdict.found.endswith("built for the CPU alone, but this machine has 2 NVIDIA GPUs")
    assert verdict.do == f"{WHL}/cu128"


def test_a_torch_that_cannot_be_imported() -> None:
    verdict = evaluate("torch", torch="killed by signal 11: no output")
    assert (verdict.state, verdict.do) == (FAIL, f"{WHL}/cu128")
    assert evaluate("torch", torch=replace(TORCH, version="2.1.0")).state == FAIL


@pytest.mark.parametrize(
    ("device", "driver_cuda", "do"),
    [
        (GpuModel("Tesla V100", (7, 0)), (12, 8), f"{WHL}/cu126"),
        (GpuModel("RTX 5090", (12, 0)), (12, 4), "install a driver for CUDA 12.8 or later"),
        (GpuModel("Tesla K80", (3, 7)), (11, 8), "no wheel of torch supports all of these"),
    ],
    ids=lambda x: x.name if isinstance(x, GpuModel) else "",
)
def test_a_capability_that_the_wheel_lacks(
    device: GpuModel, driver_cuda: tuple[int, int], do: str
) -> None:
    archs = ("sm_75", "sm_80", "sm_90")
    torch = replace(TORCH, archs=archs, devices=[device])
    verdict = evaluate(
        "gpu 0", torch=torch, driver=DriverFacts("1", driver_cuda, [device]), visible_gpus=1
    )
    assert verdict.state == FAIL
    assert verdict.found.endswith("but torch is built for sm_75 sm_80 sm_90")
    assert verdict.do.startswith(do)


def test_what_machine_code_and_ptx_run_on() -> None:
    assert is_built_for(["sm_80"], (8, 9)), "a later minor version"
    assert not is_built_for(["sm_80"], (9, 0))
    assert not is_built_for(["sm_86"], (8, 0))
    assert is_built_for(["compute_80"], (12, 0)), "compiled at run time"
    assert is_built_for(["sm_100", "sm_120"], (12, 1))
    assert is_built_for(["sm_90a"], (9, 0))
    assert not is_built_for(["sm_100a"], (10, 3))
    assert not is_built_for(["gfx90a", "", "sm_"], (9, 0))


def test_the_wheel_for_a_driver() -> None:
    assert make_install_command(None) == f"{WHL}/cpu"
    assert make_install_command((12, 2)) == f"{WHL}/cu121"
    assert make_install_command((13, 1)) == f"{WHL}/cu130"
    assert make_install_command((14, 0)) == f"{WHL}/cu132"
    assert make_install_command((13, 0), [(9, 0), (6, 1)]) == f"{WHL}/cu126", "all of them"
    assert make_install_command((10, 0)) == ""
    assert [parse_version(t) for t in ("12.8", "2.13.0+cpu", "nightly", None)] == [
        (12, 8),
        (2, 13),
        None,
        None,
    ]


def test_devices_that_cuda_or_nvml_does_not_find() -> None:
    lost = evaluate(
        "gpu 1", driver=DRIVER._replace(devices=[H100, "GPU is lost"]), torch=TorchFacts("2.9+cpu")
    )
    assert (lost.state, lost.found) == (FAIL, "does not answer: GPU is lost")
    mismatch = replace(TORCH, devices=[], trouble="forward compatibility was attempted")
    assert evaluate("cuda", torch=mismatch).state == FAIL
    none = replace(TORCH, devices=[], trouble="No CUDA GPUs are available")
    hidden = evaluate("visible", visible_gpus=0, torch=none)
    assert (hidden.state, hidden.do) == (WARN, "unset CUDA_VISIBLE_DEVICES")
    assert find_worst_state(evaluate_machine(replace(GOOD, visible_gpus=0, torch=none))) == WARN, (
        "on purpose, perhaps"
    )


def test_libraries_that_are_missing_or_do_not_fit() -> None:
    assert evaluate("nccl", torch=replace(TORCH, nccl=None)).state == FAIL
    assert evaluate("gloo", torch=replace(TORCH, gloo=False)).state == FAIL
    old = evaluate("toolkit", nvcc_version="11.8")
    assert (old.state, "CUDA_HOME=/usr/local/cuda-12.8" in old.do) == (WARN, True)
    assert evaluate("python", python=(3, 9)).state == FAIL
    assert evaluate("environment", venv=None).state == WARN


# --- the machine ---


@pytest.mark.parametrize(
    ("disk", "state", "found"),
    [
        (DiskFacts("runs", "/r", 10**6, 10**6, True), FAIL, "1 MB free in /r"),
        (DiskFacts("runs", "/r", GB, 10**6, True), WARN, "1 GB free in /r"),
        (DiskFacts("runs", "/r", 50 * GB, 12, True), FAIL, "/r has room for 12 more files"),
        (DiskFacts("runs", "/r", 50 * GB, None, True), OK, "50 GB free in /r"),
        (DiskFacts("runs", "/r", 50 * GB, 10**6, False), FAIL, "/r cannot be written"),
        (DiskFacts("home", "/r", 0, 10**6, True), WARN, "0 B free in /r"),
    ],
)
def test_disks(disk: DiskFacts, state: str, found: str) -> None:
    verdict = evaluate(f"disk {disk.name}", disks=[disk])
    assert (verdict.state, verdict.found) == (state, found)
    assert bool(verdict.do) == (state != OK)


def test_limits_and_shared_memory() -> None:
    files = evaluate("open files", open_files_limit=ResourceLimit(256, 4096))
    assert (files.state, files.found, files.do) == (WARN, "256", "ulimit -n 4096")
    assert evaluate("open files", open_files_limit=ResourceLimit(64, 64)).state == FAIL
    assert "hard limit is 64" in evaluate("open files", open_files_limit=ResourceLimit(64, 64)).do
    assert evaluate("processes", process_limit=ResourceLimit(100, 100)).state == FAIL
    assert evaluate("locked memory", locked_memory_limit=ResourceLimit(65536, 65536)).state == WARN
    assert (
        evaluate(
            "locked memory", locked_memory_limit=ResourceLimit(65536, 65536), has_infiniband=False
        ).state
        == OK
    )
    tiny = evaluate("/dev/shm", shm_bytes=(64 * 10**6, 64 * 10**6))
    assert (tiny.state, "--shm-size=8g" in tiny.do) == (WARN, True)
    assert evaluate("/dev/shm", shm_bytes=(64 * 10**6, 10**6)).state == FAIL
    assert evaluate("/dev/shm", shm_bytes=None).state == FAIL


def test_the_rest() -> None:
    assert evaluate("threads", omp_num_threads="64").do == "export OMP_NUM_THREADS=16"
    assert evaluate("threads", omp_num_threads="many").do == "unset OMP_NUM_THREADS"
    assert evaluate("threads", omp_num_threads="8").state == OK
    assert evaluate("port", port_fault="address already in use").state == FAIL
    assert evaluate("clock", is_clock_synchronized=False).state == WARN
    assert evaluate("clock", now=1e8).state == FAIL
    assert evaluate("clock", is_clock_synchronized=None).state == OK
    assert evaluate("host name", addresses=[]).do == "echo '127.0.1.1 n1' | sudo tee -a /etc/hosts"
    assert evaluate("slurm", slurm=ToolFacts("slurm 24.05", "Unable to contact")).state == WARN
    assert evaluate("ssh", ssh=ToolFacts("", "cannot be run")).state == WARN
    assert "wandb login" in evaluate("wandb", wandb_fault="there is no key for api.wandb.ai").found
    assert evaluate("wandb", extras={"wandb": False}).state == NONE


def test_how_a_process_ended() -> None:
    assert describe_exit(-11, "") == "killed by signal 11: no output"
    assert describe_exit(1, "Traceback\nImportError: x\n") == "ImportError: x"


# --- the smoke test ---

RANK = SmokeTestResult("cuda:0", (9.0, 7.0), 1.0, True, "nccl", 0.5, "")


def test_a_smoke_test_that_went_well() -> None:
    verdicts = list(evaluate_smoke_test([RANK, RANK._replace(device="cuda:1")]))
    assert [v.check for v in verdicts] == ["step cuda:0", "step cuda:1", "all-reduce"]
    assert {v.state for v in verdicts} == {OK}


def test_a_device_that_crashes_is_a_row() -> None:
    crashed = SmokeTestResult(
        "cuda:1", None, 0, None, "", 0, "killed by signal 6: CUDA error: no kernel image"
    )
    waits = RANK._replace(is_sum_right=None, trouble="waited for the others, or hung: x")
    first, second, together = evaluate_smoke_test([waits, crashed])
    assert (first.state, second.state, together.state) == (OK, FAIL, FAIL)
    assert "no kernel image" in second.found
    assert together.found.startswith("nccl: rank 1 killed by signal 6"), "not who waited"


def test_wrong_numbers_fail() -> None:
    step, together = evaluate_smoke_test(
        [RANK._replace(loss=(9.0, float("nan")), is_sum_right=False)]
    )
    assert (step.state, together.state) == (FAIL, FAIL)
    assert "computes wrongly" in step.found
    assert "the sum is wrong on rank 0" in together.found


def test_every_extra_is_looked_for() -> None:
    project = (Path(__file__).parents[2] / "pyproject.toml").read_text()
    names = re.findall(
        r"^(\w+) = \[", project.partition("[project.optional-dependencies]")[2], re.M
    )
    for ours, package in EXTRAS.items():
        assert re.search(rf'^{ours} = \["{package}>=', project, re.M)
    assert set(EXTRAS) == set(names[: names.index("bench")]) - {"dev"}
