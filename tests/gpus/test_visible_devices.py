"""Counting the visible CUDA devices, with a stand-in for NVML."""

from __future__ import annotations

import subprocess
import sys

import pytest
from fake_nvml import MakeDriver, gpu

from echelon.gpus import count_visible_gpus

UUIDS = [
    "GPU-8932f937-d72c-4106-c12f-20bd9faed9f6",
    "GPU-8932aaaa-d72c-4106-c12f-20bd9faed9f6",
    "GPU-1b2c3d4e-0000-4106-c12f-20bd9faed9f6",
    "GPU-ffffffff-0000-4106-c12f-20bd9faed9f6",
]
MIG = "MIG-5c89852c-d268-c3f3-1b07-005d5ae1dc3f", "MIG-ea5b5f5c-0000-c3f3-1b07-005d5ae1dc3f"


@pytest.fixture
def four_gpus(make_driver: MakeDriver) -> None:
    make_driver(*(gpu(i, uuid=uuid) for i, uuid in enumerate(UUIDS)))


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
    assert count_visible_gpus({} if value is None else {"CUDA_VISIBLE_DEVICES": value}) == count


@pytest.mark.parametrize("broken", ["init 9", "gpu handle=15", "gpu code=15", ""])
def test_a_failing_driver_is_no_device(make_driver: MakeDriver, broken: str) -> None:
    make_driver(broken)
    assert count_visible_gpus({"CUDA_VISIBLE_DEVICES": UUIDS[0]}) == 0


def test_no_driver_is_no_device() -> None:
    code = (
        "from echelon.gpus import nvml, count_visible_gpus; nvml.LIBRARY = 'libnothing.so'; "
        "assert count_visible_gpus({}) == 0; "
        f"assert count_visible_gpus({{'CUDA_VISIBLE_DEVICES': '{MIG[0]}'}}) == 0"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_hidden_devices_do_not_start_the_driver(make_driver: MakeDriver) -> None:
    driver = make_driver(gpu())
    code = (
        "from echelon.gpus import count_visible_gpus; "
        "assert count_visible_gpus({'CUDA_VISIBLE_DEVICES': ''}) == 0; "
        "assert 'nvidia' not in open('/proc/self/maps').read(); "
        "assert count_visible_gpus({'CUDA_VISIBLE_DEVICES': '0'}) == 1; "
        "assert 'nvidia' in open('/proc/self/maps').read()"
    )
    subprocess.run([sys.executable, "-c", code], env=driver.environment(), check=True)
