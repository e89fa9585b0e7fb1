"""An agent looks at the counters of its GPUs while a run goes on."""

from __future__ import annotations

import time

import pytest
from command_runner import until
from fake_nvml import MakeDriver, gpu

from echelon.launch.node import gpu_watch
from echelon.launch.node.gpu_watch import GpuWatch


def test_an_error_that_is_counted_during_the_run_is_found(
    make_driver: MakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_watch, "_INTERVAL_S", 0.05)
    driver, errors = make_driver(gpu(0, errors=3)), iter(range(4, 10_000))
    watch = GpuWatch({}, 1)

    def is_found() -> bool:
        """One more each time: when the watch has read the first number is not known."""
        driver.set(gpu(0, errors=next(errors)))
        time.sleep(0.1)
        return bool(watch.fault)

    until(is_found, 60.0, "a fault")
    assert watch.fault.startswith("GPU 0: uncorrected memory errors rose from ")
    watch.close()
