"""How many processes, and which device each has."""

from __future__ import annotations

import pytest

from echelon.config.compose import compose
from echelon.errors import EchelonError
from echelon.launch.local import plan as local_plan
from echelon.launch.plan import Here

LOCAL = "launch=local"


@pytest.mark.parametrize(
    ("words", "visible", "devices"),
    [
        ([], 0, ["cpu"]),
        ([], 1, ["cuda:0"]),
        ([], 4, ["cuda:0", "cuda:1", "cuda:2", "cuda:3"]),
        (["launch.procs=2"], 4, ["cuda:0", "cuda:1"]),
        (["launch.procs=3"], 0, ["cpu", "cpu", "cpu"]),
        (["launch.procs=3", "launch.share_devices=true"], 2, ["cuda:0", "cuda:1", "cuda:0"]),
    ],
)
def test_one_process_per_visible_device_unless_told(
    words: list[str], visible: int, devices: list[str]
) -> None:
    plan = local_plan(compose([LOCAL, *words]), Here({}, "here", visible))
    assert [place.devices for place in plan.places] == [(device,) for device in devices]
    assert [place.rank for place in plan.places] == list(range(len(devices)))


def test_two_processes_on_one_device_by_accident() -> None:
    with pytest.raises(EchelonError) as told:
        local_plan(compose([LOCAL, "launch.procs=3"]), Here({}, "here", 2))
    [fault] = told.value.faults
    assert "launch.procs=3, but 2 devices are visible" in fault.what
    assert "launch.share_devices=true" in fault.do


def test_a_users_own_number_of_threads_is_kept() -> None:
    config = compose([LOCAL, "launch.procs=2"])
    assert local_plan(config, Here({}, "here", 0)).variables == {"OMP_NUM_THREADS": "1"}
    assert local_plan(config, Here({"OMP_NUM_THREADS": "3"}, "here", 0)).variables == {}
    assert local_plan(compose([LOCAL]), Here({}, "here", 0)).variables == {}
