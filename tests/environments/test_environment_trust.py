"""An environment that somebody else can have written is refused before any of its code runs."""

from __future__ import annotations

import json
import os
import stat
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from other_users import NOBODY, STRANGER, act_as, give_away, make_open_folder, needs_root

from echelon.environments import EnvironmentPlan, build_environment, plan_environment
from echelon.environments.cache import EnvironmentPaths
from echelon.environments.env_command import show_environment
from echelon.errors import EchelonError

FORGED_PYTHON = """\
#!/bin/sh
touch "{evidence}"
exit 0
"""


@pytest.fixture
def shared(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder that everybody sees, with a cache and a source in it."""
    with make_open_folder() as folder:
        monkeypatch.setenv("ECHELON_CACHE", str(folder / "cache"))
        (folder / "source").mkdir()
        (folder / "source" / "requirements.txt").write_text("tiny\n")
        yield folder


def make_ready_environment(shared: Path, location: str = "cache") -> EnvironmentPlan:
    """What is needed to pass for a complete environment at the expected key."""
    plan = plan_environment(shared / "source", location)
    paths = EnvironmentPaths(plan.folder)
    paths.python_executable().parent.mkdir(parents=True)
    paths.python_executable().write_text(FORGED_PYTHON.format(evidence=shared / "it ran"))
    paths.python_executable().chmod(0o755)
    paths.marker.write_text(json.dumps({"key": plan.key, "distributions": []}))
    return plan


def get_refusal(plan: EnvironmentPlan) -> str:
    with pytest.raises(EchelonError) as caught:
        build_environment(plan)
    (fault,) = caught.value.faults
    return f"{fault.what}; {fault.do}"


def test_one_of_our_own_is_used(shared: Path) -> None:
    plan = make_ready_environment(shared)
    assert build_environment(plan) == plan.folder
    assert (shared / "it ran").exists(), "its interpreter was tried"


@needs_root
def test_a_strangers_environment_at_the_expected_key_is_refused(
    shared: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """In a cache that everybody may write, as a stranger would make it."""
    plan = make_ready_environment(shared)
    plan.folder.parent.chmod(0o777)
    give_away(plan.folder)
    refusal = get_refusal(plan)
    assert f"the environment {plan.folder} is not used" in refusal
    assert "may be written by everybody" in refusal
    assert "set ECHELON_CACHE to a folder of your own" in refusal
    plan.folder.parent.chmod(0o755)
    assert f"{plan.folder} belongs to {STRANGER}" in get_refusal(plan)
    show_environment(shared / "source", "cache", sys.executable, as_json=False)
    assert f"is not used: {plan.folder} belongs to {STRANGER}" in capsys.readouterr().out
    show_environment(shared / "source", "cache", sys.executable, as_json=True)
    assert json.loads(capsys.readouterr().out)["ready"] is False
    assert not (shared / "it ran").exists()


def make_strangers_folder(path: Path) -> None:
    path.mkdir()
    give_away(path)


Spoil = Callable[[EnvironmentPaths], None]
PARTS: dict[str, Spoil] = {
    "a module": lambda paths: give_away(paths.python_executable()),
    "the marker": lambda paths: give_away(paths.marker),
    "the cache": lambda paths: os.chown(paths.folder.parent.parent, STRANGER, STRANGER),
    "an open folder": lambda paths: paths.python_executable().parent.chmod(0o777),
    "an open file": lambda paths: paths.marker.chmod(0o666),
    "the lock": lambda paths: make_strangers_folder(paths.lock),
    "inputs": lambda paths: make_strangers_folder(paths.inputs_folder),
}


@needs_root
@pytest.mark.parametrize("part", PARTS)
def test_every_part_of_it_counts(shared: Path, part: str) -> None:
    plan = make_ready_environment(shared)
    PARTS[part](EnvironmentPaths(plan.folder))
    assert "who could make you run any code" in get_refusal(plan)
    assert not (shared / "it ran").exists()


@needs_root
def test_a_cache_that_root_made_for_everybody_works_for_everybody(shared: Path) -> None:
    plan = make_ready_environment(shared)
    EnvironmentPaths(plan.folder).use_lock.touch()
    build_environment(plan)  # imports what it needs
    with act_as(NOBODY):
        assert build_environment(plan) == plan.folder
    give_away(plan.folder)
    with act_as(NOBODY):
        assert f"belongs to {STRANGER}" in get_refusal(plan)


@needs_root
def test_a_venv_beside_the_source_is_looked_at_too(shared: Path) -> None:
    plan = make_ready_environment(shared, "source")
    assert plan.folder == shared / "source" / ".venv"
    (shared / "source").chmod(0o777)
    build_environment(plan)
    (shared / "it ran").unlink()
    give_away(plan.folder)
    refusal = get_refusal(plan)
    assert f"{plan.folder} belongs to {STRANGER}" in refusal
    assert "use --where cache" in refusal
    assert not (shared / "it ran").exists()


@pytest.mark.slow
def test_what_we_build_is_closed_to_others_whatever_the_umask(shared: Path) -> None:
    (shared / "source" / "requirements.txt").write_text("# nothing\n")
    before = os.umask(0)
    try:
        plan = plan_environment(shared / "source")
        build_environment(plan, lambda line: None)
    finally:
        os.umask(before)
    built = (plan.folder, *plan.folder.rglob("*"))
    modes = {path: path.lstat().st_mode for path in built if not path.is_symlink()}
    assert [path for path, mode in modes.items() if stat.S_IMODE(mode) & 0o022] == []
    plan.folder.parent.chmod(0o755)  # what it lies in is closed, so that modes would not matter
    assert build_environment(plan) == plan.folder
