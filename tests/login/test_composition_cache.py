"""What was composed is taken again while nothing has changed that it was made of."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from echelon.config.defaults_files import NO_DEFAULTS, DefaultValue, FileDefaults
from echelon.config.schema import Config, LaunchConfig, RunConfig
from echelon.login.composition_cache import CompositionCache
from echelon.login.early import find_probable_login

WORDS = ["launch=slurm", "launch.login=hpc"]
CONFIG = Config(launch=LaunchConfig(kind="slurm", login="hpc"), run=RunConfig(None, "runs"))


@pytest.fixture
def settings_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file that the experiment reads, older than the command."""
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "sizes.json"
    make_old(file, "[1, 2]")
    (tmp_path / "conf").mkdir()
    make_old(tmp_path / "conf" / "config.yaml", "")
    make_old(tmp_path / "conf")
    return file


def make_old(path: Path, text: str | None = None) -> None:
    if text is not None:
        path.write_text(text)
    os.utime(path, (0, 1_600_000_000))


def make_cache(
    words: list[str], defaults: FileDefaults = NO_DEFAULTS, **variables: str
) -> CompositionCache:
    return CompositionCache(
        words, defaults, {"ECHELON_CACHE": str(Path.cwd() / "cache"), **variables}
    )


def test_the_same_words_and_files_are_composed_once(settings_file: Path, tmp_path: Path) -> None:
    cache = make_cache(WORDS, HOME="/a")
    assert cache.read() is None
    cache.watch()
    settings_file.read_text()
    (tmp_path / "written").write_text("no input")
    cache.write(CONFIG)
    assert make_cache(WORDS, HOME="/a").read() == CONFIG
    assert make_cache([*WORDS, "lr=1"], HOME="/a").read() is None
    assert make_cache(WORDS, HOME="/b").read() is None
    changed = FileDefaults({"launch.time": DefaultValue("1:00:00", "echelon.yaml:1")}, {})
    assert make_cache(WORDS, changed, HOME="/a").read() is None
    (tmp_path / "written").write_text("which may change")
    assert make_cache(WORDS, HOME="/a").read() == CONFIG
    (tmp_path / "conf" / "launch.yaml").write_text("")
    assert make_cache(WORDS, HOME="/a").read() is None, "a file of settings is new"
    (tmp_path / "conf" / "launch.yaml").unlink()
    assert make_cache(WORDS, HOME="/a").read() == CONFIG
    settings_file.write_text("[1, 3]")
    assert make_cache(WORDS, HOME="/a").read() is None


def test_what_changed_meanwhile_is_not_kept(settings_file: Path) -> None:
    cache = make_cache(WORDS)
    cache.watch()
    settings_file.write_text("[1, 2, 3]")
    settings_file.read_text()
    cache.write(CONFIG)
    assert make_cache(WORDS).read() is None


@pytest.mark.parametrize(
    ("words", "found"),
    [
        (["launch=slurm", "launch.login=hpc"], ("hpc", "ssh", None)),
        (
            ["launch=slurm", "launch.login='hpc'", "launch.ssh='ssh -F x'"],
            ("hpc", "ssh -F x", None),
        ),
        (["launch=slurm", "launch.login=hpc", "launch.python=/p"], ("hpc", "ssh", "/p")),
        (["launch=local"], None),
        (["launch=slurm", "launch.login=null"], None),
        (["launch=slurm", "launch.login=-oProxyCommand=x"], None),
        (["launch=slurm"], ("login", "ssh", None)),
    ],
)
def test_which_login_node_it_will_be(words: list[str], found: object) -> None:
    defaults = FileDefaults({"launch.login": DefaultValue("login", "echelon.yaml:1")}, {})
    assert find_probable_login(words, defaults) == found
