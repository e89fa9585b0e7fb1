"""What `doctor` and `preflight` make of a machine's GPUs."""

from __future__ import annotations

import os

import pytest
from fake_nvml import NOBODY_HERE, MakeDriver, gpu, mig_slice, process

from echelon.doctor.machine_facts import DriverFacts, GpuModel, MissingDriver, read_driver_facts
from echelon.gpus.command import get_current_user
from echelon.preflight import gpu_health

ME = os.getpid()


def test_the_driver_and_its_devices(make_driver: MakeDriver) -> None:
    make_driver(gpu(0), gpu(1, capability=120, name="RTX 5090"), gpu(2, code=15), gpu(3, handle=15))
    assert read_driver_facts() == DriverFacts(
        "550.54.15",
        (12, 4),
        [
            GpuModel("NVIDIA H200", (9, 0)),
            GpuModel("RTX 5090", (12, 0)),
            "lost: reboot or reset",
            "lost: reboot or reset",
        ],
    )


def test_a_driver_that_is_not_there_and_one_that_is_broken(
    make_driver: MakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_driver("init 18")
    reason = "the NVIDIA driver was changed under a running system (reboot)"
    assert read_driver_facts() == MissingDriver(reason, is_broken=True)
    monkeypatch.setattr("echelon.gpus.nvml.LIBRARY", "libnothing.so")
    assert not read_driver_facts().is_broken  # type: ignore[union-attr]
    assert gpu_health.read_gpu_health({}) == []


def test_gpus_of_a_job(make_driver: MakeDriver) -> None:
    make_driver(
        *(gpu(0), gpu(1, errors=3), gpu(2, code=15), gpu(3), gpu(4, used=9 << 30, use=7), gpu(5)),
        *(process(ME, on=3, gib=2), process(NOBODY_HERE, on=5, gib=1)),
    )
    entries = gpu_health.read_gpu_health({})
    troubles = {entry["index"]: entry["trouble"] for entry in entries if entry["trouble"]}
    assert troubles == {1: "3 uncorrected memory errors", 2: "lost: reboot or reset"}
    assert {entry["index"]: entry["users"] for entry in entries if entry["users"]} == {
        3: [f"{get_current_user()}'s process {ME} (2.0 GiB)"],
        4: ["9.0 GiB and 7% by a process that is not visible"],
        5: ["a process that is not visible (1.0 GiB)"],
    }


@pytest.mark.parametrize(
    ("chosen", "seen"),
    [("1,0", [0, 1]), ("", []), ("GPU-00000001", [1]), ("MIG-a", [2]), ("7", [])],
)
def test_only_those_that_are_visible(make_driver: MakeDriver, chosen: str, seen: list[int]) -> None:
    slices = [mig_slice(2, 0, uuid="MIG-a"), mig_slice(2, 1, uuid="MIG-b")]
    make_driver(gpu(0), gpu(1), gpu(2, mig=1), *slices, process(ME, on=2, slice=1))
    entries = gpu_health.read_gpu_health({"CUDA_VISIBLE_DEVICES": chosen})
    assert [gpu["index"] for gpu in entries] == seen
    assert [gpu["users"] for gpu in entries] == [[]] * len(seen), "the other slice is not ours"
