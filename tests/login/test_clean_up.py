"""What nobody needs any more goes from the project's folder on the cluster, and nothing else.

Slurm's commands are programs that answer as Slurm does.
"""

from __future__ import annotations

import hashlib
import os
import time
from pathlib import Path

import pytest

from echelon.login.host.clean_up import clean_up, clean_up_sometimes
from echelon.login.host.source_store import SourceStore
from echelon.runs.run_folder import Run

DAY_S = 86400.0
SECRETS = {name: name * 24 for name in "abc"}


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SourceStore:
    """Runs that are over, that run and that are gone, each with code of its own."""
    made = SourceStore(tmp_path / "project")
    slurm_says(tmp_path, "echo '2|RUNNING|None'")
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/usr/bin:/bin")
    for number, name in enumerate("abc", 1):
        content = f"code of {name}".encode()
        digest = hashlib.sha256(content).hexdigest()
        made.add_file(digest, content)
        tree = made.make_tree(name * 32, [["x.py", "file", digest, len(content)]])
        made.point_code_link(name, tree)
        secret = made.folder / "secrets" / SECRETS[name]
        secret.parent.mkdir(exist_ok=True)
        secret.write_text("KEY=x\n")
        if name != "c":  # which was removed
            run = Run(made.root / "runs" / name)
            run.folder.mkdir(parents=True)
            run.job_id_file.write_text(f"{number}\n")
            run.script_file.write_text(f"cat {secret}\nexport PYTHONPATH=/x/{'e' * 32}\n")
    Run(made.root / "runs" / "a").exit_code_file.write_text("0\n")
    for package in "ef":
        (made.folder / "packages" / (package * 32)).mkdir(parents=True)
    for path in [*made.folder.rglob("*"), made.root / "runs" / "b" / "job"]:
        os.utime(path, (0, time.time() - 40 * DAY_S), follow_symlinks=False)
    return made


def slurm_says(folder: Path, squeue: str) -> None:
    for name, text in (("squeue", squeue), ("sacct", ":")):
        program = folder / "bin" / name
        program.parent.mkdir(exist_ok=True)
        program.write_text(f"#!/bin/sh\n{text}\n")
        program.chmod(0o755)


def names_in(folder: Path) -> set[str]:
    return {path.name[0] for path in folder.iterdir()}


def test_what_no_run_refers_to_goes(store: SourceStore) -> None:
    clean_up(store, unused_s=30 * DAY_S)
    assert names_in(store.folder / "code") == {"a", "b"}
    assert names_in(store.folder / "sources") == {"a", "b"}
    assert names_in(store.folder / "secrets") == {"b"}, "its job may still read it"
    assert names_in(store.folder / "packages") == {"e"}, "the script of a job names it"
    assert len(list((store.folder / "files").glob("*/*"))) == 3, "not unused for so long"
    clean_up(store, unused_s=0)
    assert len(list((store.folder / "files").glob("*/*"))) == 2
    for name in "ab":
        assert (store.get_code_link(name) / "x.py").read_text() == f"code of {name}"


def test_nothing_goes_that_may_be_in_use(store: SourceStore, tmp_path: Path) -> None:
    """Slurm does not answer; and what was used today stays, whoever refers to it."""
    slurm_says(tmp_path, "echo 'squeue: error: no controller' >&2; exit 1")
    clean_up(store, unused_s=0)
    assert names_in(store.folder / "sources") == {"a", "b", "c"}
    assert names_in(store.folder / "secrets") == {"a", "b", "c"}
    slurm_says(tmp_path, ":")
    (store.folder / "slurm.json").unlink()
    for name in "abc":
        store.note_use(store.get_tree(name * 32))
    clean_up(store, unused_s=30 * DAY_S)
    assert names_in(store.folder / "sources") == {"a", "b", "c"}
    (store.root / "runs" / ".trash").mkdir()
    (store.root / "runs" / "b").rename(store.root / "runs" / ".trash" / "b")
    clean_up(store, unused_s=0)
    assert names_in(store.folder / "sources") == {"a", "b"}, "it can be brought back"


def test_it_happens_beside_and_seldom(store: SourceStore) -> None:
    process = clean_up_sometimes(store)
    assert process is not None
    assert os.waitpid(process, 0)[1] == 0
    assert names_in(store.folder / "sources") == {"a", "b"}
    assert clean_up_sometimes(store) is None
