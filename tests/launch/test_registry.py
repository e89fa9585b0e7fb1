"""The registry of launchers, and what has to be added beside a launcher's own file."""

from __future__ import annotations

import pytest

from echelon.config.compose import compose
from echelon.config.hydra_files import BUNDLED_CONF_DIR
from echelon.config.schema import LAUNCHERS
from echelon.launch.registry import LAUNCHER_CLASSES, make_launcher

NEEDED = {
    "ssh": ["launch.hosts=[a]"],
    "k8s": ["launch.container=a", "launch.k8s.volumes=[c:/mnt]", "run.dir=/mnt/runs"],
}
"""What has to be set beside the launcher."""


def test_a_launcher_is_registered_known_to_the_schema_and_can_be_typed() -> None:
    typed = {file.stem for file in (BUNDLED_CONF_DIR / "launch").glob("*.yaml")}
    assert set(LAUNCHER_CLASSES) == set(LAUNCHERS) == typed


@pytest.mark.parametrize("name", LAUNCHERS)
def test_a_launcher_has_the_name_it_is_registered_by(name: str) -> None:
    assert make_launcher(compose([f"launch={name}", *NEEDED.get(name, [])])).name == name


def test_a_program_gets_a_process_of_its_own() -> None:
    assert make_launcher(compose([], program=["true"])).name == "local"
