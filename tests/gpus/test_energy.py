"""The energy of a start, by the counters of a stand-in for NVIDIA's library."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from command_runner import ECHELON, started, until
from fake_nvml import MakeDriver, gpu, mig_slice

from echelon.gpus.energy import EnergyMeter
from echelon.runs.energy import read_energy
from echelon.runs.run_folder import Run


def _has_read(folder: Path) -> bool:
    return bool(list(folder.glob("*.json")))


def measure(folder: Path, change: Callable[[], None], **options: Any) -> dict[str, float]:
    """What a meter has written, between whose first and last reading the counters change."""
    meter = EnergyMeter(folder, {}, **options)
    until(lambda: _has_read(folder) or not meter._thread.is_alive(), 60, "a reading")
    change()
    meter.close()
    files = list(folder.glob("*.json"))
    found: dict[str, float] = json.loads(files[0].read_text())["joules"] if files else {}
    return found


@pytest.mark.parametrize(
    ("before", "after", "options", "joules"),
    [
        ([{"energy": 1000}, {"energy": 5000}], [{"energy": 4000}, {"energy": 9000}], {}, [3, 4]),
        ([{"energy": 0}, {"energy": 0}], [{"energy": 1000}] * 2, {"device_count": 1}, [1]),
        ([{}, {"energy": 1000}], [{}, {"energy": 3000}], {}, [2]),  # one does not count
        ([{"energy": 9000}], [{"energy": 10}], {}, [0]),  # its driver was loaded anew
        ([{"energy": 1000}], [{"energy": 2000, "code": 15}], {}, [0]),  # it is lost
        ([{}], [{}], {}, None),
        ([], [], {}, None),
    ],
)
def test_what_was_used_between_two_readings(
    before: list[dict[str, Any]],
    after: list[dict[str, Any]],
    options: dict[str, Any],
    joules: list[float] | None,
    tmp_path: Path,
    make_driver: MakeDriver,
) -> None:
    driver = make_driver(*(gpu(index, **each) for index, each in enumerate(before)))

    def change() -> None:
        driver.set(*(gpu(index, **each) for index, each in enumerate(after)))

    found = measure(tmp_path, change, **options)
    assert list(found.values()) == (joules or [])
    assert bool(list(tmp_path.glob("*.json"))) == (joules is not None)


def test_a_slice_counts_its_whole_gpu(tmp_path: Path, make_driver: MakeDriver) -> None:
    part = mig_slice(0, 1)
    driver = make_driver(gpu(0, mig=1, energy=0), part)
    uuid = part.split("uuid=")[1].split()[0]
    meter = EnergyMeter(tmp_path, {"CUDA_VISIBLE_DEVICES": uuid}, 1)
    until(lambda: _has_read(tmp_path), 60, "a reading")
    driver.set(gpu(0, mig=1, energy=7000), part)
    meter.close()
    (file,) = tmp_path.glob("*.json")
    assert list(json.loads(file.read_text())["joules"].values()) == [7]


def test_without_a_driver_nothing_is_written(tmp_path: Path) -> None:
    meter = EnergyMeter(tmp_path, {})
    meter.close()
    assert list(tmp_path.iterdir()) == []
    assert not [t for t in threading.enumerate() if t.name == "energy"]


@pytest.mark.slow
def test_a_run_has_its_energy_in_its_cost(tmp_path: Path, make_driver: MakeDriver) -> None:
    driver = make_driver(gpu(0, energy=1000), gpu(1, energy=1000))
    waits = ("sh", "-c", f"while [ ! -e {tmp_path}/off ]; do sleep 0.1; done")
    words = [*ECHELON, "run", "launch=local", "launch.procs=1", "run.name=a", "--", *waits]
    library = {"LD_LIBRARY_PATH": str(driver.library.parent)}
    with started(words, tmp_path, **library) as command:
        folder = Run(tmp_path / "runs" / "a").energy_folder
        until(lambda: _has_read(folder), 300, "a reading", command.describe)
        driver.set(gpu(0, energy=3_601_000), gpu(1, energy=1000))
        (tmp_path / "off").touch()
        assert command.wait().code == 0
    run = Run(tmp_path / "runs" / "a")
    assert [each.joules for each in read_energy(run)] == [3600]
    words = [*ECHELON, "cost", "a", "--price", "2 EUR", "--json"]
    with started(words, tmp_path, **library) as command:
        (row,) = json.loads(command.wait().out)["rows"]
    assert row["energy_kwh"] == pytest.approx(0.001)
    assert row["gpu_hours"] > 0 == row["cpu_hours"]
    assert row["price"] == pytest.approx(row["gpu_hours"] * 2)
    assert (row["sources"], row["estimate"]) == (["history"], False)
