"""Errors that a GPU counts while a run goes on."""

from __future__ import annotations

import pytest
from fake_nvml import MakeDriver, gpu, mig_slice

from echelon.gpus.error_counts import GpuErrorCounts
from echelon.gpus.nvml import NvmlError

LOST, RESET = 15, 16


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        ({"errors": 0}, {"errors": 0}, ""),
        ({"errors": 3}, {"errors": 3}, ""),
        ({"errors": 3}, {"errors": 5}, "GPU 1: uncorrected memory errors rose from 3 to 5"),
        ({"rows": 0}, {"rows": 1}, "GPU 1: rows remapped for uncorrected errors rose from 0 to 1"),
        ({"rows": 0}, {"rows": 0, "pending": 1}, "GPU 1: pending row remappings rose from 0 to 1"),
        ({"pages": 0}, {"pages": 1}, "GPU 1: pending page retirements rose from 0 to 1"),
        ({}, {}, ""),
        ({}, {"errors": 7}, ""),  # what they were at first is not known
        ({"errors": 0}, {"code": LOST}, "GPU 1: lost: reboot or reset"),
        ({"errors": 0}, {"code": RESET}, "GPU 1: needs a reset: nvidia-smi --gpu-reset"),
        ({"code": LOST}, {"code": LOST}, ""),
        ({"errors": 0}, {"errors": "-"}, ""),
    ],
)
def test_what_a_gpu_has_counted_since(
    before: dict[str, object], after: dict[str, object], said: str, make_driver: MakeDriver
) -> None:
    driver = make_driver(gpu(0), gpu(1, **before))
    counts = GpuErrorCounts({}, 2)
    assert counts.find_new_errors() == ""
    driver.set(gpu(0), gpu(1, **after))
    assert counts.find_new_errors() == said
    counts.close()


@pytest.mark.parametrize(
    ("env", "count", "is_seen"),
    [
        ({}, 2, True),
        ({}, 1, False),  # the second one is no device of a rank
        ({"CUDA_VISIBLE_DEVICES": "1,0"}, 1, True),
        ({"CUDA_VISIBLE_DEVICES": "0"}, 1, False),
        ({"CUDA_VISIBLE_DEVICES": ""}, 1, False),
    ],
)
def test_only_the_devices_of_the_ranks_are_looked_at(
    env: dict[str, str], count: int, is_seen: bool, make_driver: MakeDriver
) -> None:
    driver = make_driver(gpu(0, errors=0), gpu(1, errors=0))
    counts = GpuErrorCounts(env, count)
    driver.set(gpu(0, errors=0), gpu(1, errors=1))
    assert bool(counts.find_new_errors()) == is_seen
    counts.close()


def test_a_slice_has_the_errors_of_its_gpu(make_driver: MakeDriver) -> None:
    parts = [mig_slice(1, 0)]
    driver = make_driver(gpu(0, errors=0), gpu(1, errors=0, mig=1), *parts)
    uuid = parts[0].split("uuid=")[1].split()[0]
    counts = GpuErrorCounts({"CUDA_VISIBLE_DEVICES": uuid}, 1)
    driver.set(gpu(0, errors=1), gpu(1, errors=0, mig=1), *parts)
    assert counts.find_new_errors() == ""
    driver.set(gpu(0, errors=1), gpu(1, errors=1, mig=1), *parts)
    assert counts.find_new_errors() == "GPU 1: uncorrected memory errors rose from 0 to 1"
    counts.close()


def test_without_a_driver_there_is_nothing_to_look_at(
    make_driver: MakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_driver()
    counts = GpuErrorCounts({}, 4)
    assert counts.is_empty
    counts.close()
    monkeypatch.setattr("echelon.gpus.nvml.LIBRARY", "/nowhere/libnvidia-ml.so.1")
    with pytest.raises(NvmlError):
        GpuErrorCounts({}, 4)
