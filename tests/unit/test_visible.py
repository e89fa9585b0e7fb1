"""Counting the visible CUDA devices, with a stand-in for NVML's Python module."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace

import pytest

from echelon.gpus import visible_count

UUIDS = [
    "GPU-8932f937-d72c-4106-c12f-20bd9faed9f6",
    "GPU-8932aaaa-d72c-4106-c12f-20bd9faed9f6",
    "GPU-1b2c3d4e-0000-4106-c12f-20bd9faed9f6",
    "GPU-ffffffff-0000-4106-c12f-20bd9faed9f6",
]
MIG = "MIG-5c89852c-d268-c3f3-1b07-005d5ae1dc3f", "MIG-ea5b5f5c-0000-c3f3-1b07-005d5ae1dc3f"


class NVMLError(Exception):
    pass


def fake_nvml(**answers: object) -> SimpleNamespace:
    module = SimpleNamespace(
        NVMLError=NVMLError,
        nvmlInit=lambda: None,
        nvmlShutdown=lambda: None,
        nvmlDeviceGetCount=lambda: len(UUIDS),
        nvmlDeviceGetHandleByIndex=lambda index: index,
        nvmlDeviceGetUUID=lambda handle: UUIDS[handle],
    )
    module.__dict__.update(answers)
    return module


@pytest.fixture
def four_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", fake_nvml())


@pytest.mark.usefixtures("four_gpus")
@pytest.mark.parametrize(
    ("value", "count"),
    [
        (None, 4),
        ("0", 1),
        ("3,1", 2),
        (" 0 , 2 ", 2),
        ("0,2,-1,1", 2),  # NVIDIA's own example
        ("0,4,1", 1),  # no device 4: the list ends there
        ("4", 0),
        ("0,0", 0),  # named twice: CUDA shows none
        ("0,1,0", 0),
        ("1gpu,2", 2),  # as strtoul reads
        ("", 0),
        (" ", 0),
        ("-1", 0),
        ("NoDevFiles", 0),
        ("none", 0),
        (",0", 0),
        (UUIDS[0], 1),
        (f"{UUIDS[2]},{UUIDS[0]}", 2),
        ("GPU-1b2c", 1),
        ("GPU-8932", 0),  # fits two devices, so names neither
        ("GPU-1b2c,GPU-nope,GPU-ffff", 1),
        ("GPU-1b2c,GPU-1b2c3d4e", 0),  # one device named twice
        ("GPU-1b2c,0", 1),  # all entries are of the first one's kind
        ("0,GPU-1b2c", 1),
        (MIG[0], 1),
        (",".join(MIG), 2),
        (f"{MIG[0]},{MIG[0]}", 0),
        (f"{MIG[0]},0", 1),
    ],
)
def test_count(value: str | None, count: int) -> None:
    assert visible_count({} if value is None else {"CUDA_VISIBLE_DEVICES": value}) == count


def fails(*_: object) -> None:
    raise NVMLError


@pytest.mark.parametrize("broken", ["nvmlInit", "nvmlDeviceGetCount", "nvmlDeviceGetUUID"])
def test_a_failing_driver_is_no_device(monkeypatch: pytest.MonkeyPatch, broken: str) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", fake_nvml(**{broken: fails}))
    value = UUIDS[0] if broken == "nvmlDeviceGetUUID" else "0"
    assert visible_count({"CUDA_VISIBLE_DEVICES": value}) == 0


def test_a_failing_shutdown_is_no_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", fake_nvml(nvmlShutdown=fails))
    assert visible_count({}) == 4


def test_no_nvml_package_is_no_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert visible_count({}) == 0
    assert visible_count({"CUDA_VISIBLE_DEVICES": MIG[0]}) == 0


def test_uuids_as_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    old = fake_nvml(nvmlDeviceGetUUID=lambda handle: UUIDS[handle].encode())
    monkeypatch.setitem(sys.modules, "pynvml", old)
    assert visible_count({"CUDA_VISIBLE_DEVICES": "GPU-1b2c"}) == 1


def test_hidden_devices_do_not_start_the_driver() -> None:
    code = (
        "import sys; from echelon.gpus import visible_count; "
        "assert visible_count({'CUDA_VISIBLE_DEVICES': ''}) == 0; "
        "assert not {'pynvml', 'torch'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
