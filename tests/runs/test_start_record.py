"""How a run was started is written down, with the commit of its code as git sees it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from run_folders import make_run

from echelon.config.schema import Config
from echelon.runs.start_record import (
    find_git_commit,
    format_command,
    read_start_command,
    record_start_command,
)


def git(folder: Path, *words: str) -> str:
    identity = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "init.defaultBranch=main"]
    command = ["git", *identity, *words]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True)
    return done.stdout.strip()


def test_the_commit_is_that_of_git(tmp_path: Path) -> None:
    assert find_git_commit(tmp_path / "nowhere") is None
    repository = tmp_path / "a"
    inner = repository / "b/c"
    inner.mkdir(parents=True)
    git(repository, "init")
    assert find_git_commit(inner) is None, "there is no commit yet"
    git(repository, "commit", "--allow-empty", "-m", "1")
    commit = git(repository, "rev-parse", "HEAD")
    assert find_git_commit(inner) == commit
    git(repository, "pack-refs", "--all")
    assert find_git_commit(inner) == commit
    git(repository, "worktree", "add", "../tree", "-b", "other")
    git(tmp_path / "tree", "commit", "--allow-empty", "-m", "2")
    assert find_git_commit(tmp_path / "tree") == git(tmp_path / "tree", "rev-parse", "HEAD")
    git(repository, "checkout", "--detach")
    assert find_git_commit(inner) == commit
    (repository / ".git/HEAD").write_text("nonsense")
    assert find_git_commit(inner) is None


def test_the_command_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["/env/bin/echelon", "train", "name=a b"])
    run = make_run(tmp_path / "runs", "a")
    assert read_start_command(run) == {}
    record_start_command(run, Config())
    found = read_start_command(run)
    assert (found["command"], found["folder"]) == ("echelon train 'name=a b'", str(tmp_path))
    assert found["python"] == sys.version.split()[0]


def test_a_command_is_shown_as_it_was_typed() -> None:
    assert format_command(["/a/echelon/__main__.py", "resume", "a"]) == "echelon resume a"
    assert format_command(["my train.py", "lr=1"]) == "python 'my train.py' lr=1"
