"""Source trees by content: what is sent once, and what a tree is made of."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from echelon.errors import EchelonError
from echelon.login.host.source_store import SourceStore
from echelon.login.source_manifest import SourceManifest, read_manifest


@pytest.fixture
def project(tmp_path: Path) -> Path:
    folder = tmp_path / "project"
    (folder / "package").mkdir(parents=True)
    (folder / "train.py").write_text("print(1)\n")
    (folder / "package" / "__init__.py").write_text("")
    (folder / "run.sh").write_text("#!/bin/sh\n")
    (folder / "run.sh").chmod(0o755)
    (folder / "link.py").symlink_to("train.py")
    return folder


def read(project: Path) -> SourceManifest:
    environ = {"ECHELON_CACHE": str(project.parent / "cache"), "HOME": str(project.parent)}
    return read_manifest(project, project / "runs", environ)


def send(store: SourceStore, manifest: SourceManifest) -> list[str]:
    """What `send_source` and the session there do, without a connection; the names sent."""
    names = {e[2]: e[0] for e in manifest.entries if e[1] != "link"}
    missing = store.find_missing(manifest.entries)
    for digest in missing:
        store.add_content(digest, [(manifest.folder / names[digest]).read_bytes()])
    store.make_tree(manifest.digest, manifest.entries)
    return sorted(names[digest] for digest in missing)


def test_only_what_changed_is_sent_and_a_tree_never_changes(project: Path, tmp_path: Path) -> None:
    store = SourceStore(tmp_path / "there")
    first = read(project)
    assert send(store, first) == ["package/__init__.py", "run.sh", "train.py"]
    tree = store.get_tree(first.digest)
    assert (tree / "train.py").read_text() == "print(1)\n"
    assert os.readlink(tree / "link.py") == "train.py"
    assert os.access(tree / "run.sh", os.X_OK)
    assert not (tree / "train.py").stat().st_mode & 0o222, "runs share it"
    (project / "train.py").write_text("print(2)\n")
    second = read(project)
    assert second.digest != first.digest
    assert send(store, second) == ["train.py"]
    assert (tree / "train.py").read_text() == "print(1)\n"
    assert (store.get_tree(second.digest) / "train.py").read_text() == "print(2)\n"
    (project / "train.py").write_text("print(1)\n")
    assert read(project).digest == first.digest
    assert send(store, read(project)) == []


def test_data_in_the_folder_there_is_seen_under_its_name(project: Path, tmp_path: Path) -> None:
    root = tmp_path / "there"
    store = SourceStore(root)
    manifest = read(project)
    send(store, manifest)
    (root / "data").mkdir()
    (root / "runs").mkdir()
    (root / "train.py").write_text("not this one")
    tree = store.get_tree(manifest.digest)
    store.link_data(tree)
    store.link_data(tree)
    assert (tree / "data").resolve() == root / "data"
    assert (tree / "train.py").read_text() == "print(1)\n"
    assert not (tree / "runs").exists()


def test_damage_on_the_way_is_refused(tmp_path: Path) -> None:
    store = SourceStore(tmp_path)
    with pytest.raises(EchelonError, match="changed while it was sent"):
        store.add_content("ab" * 32, [b"something else"])
    with pytest.raises(ValueError, match="not inside the source"):
        store.make_tree("abc", [["../evil", "link", "x", 0]])
    assert not (tmp_path / ".echelon" / "sources" / "abc").exists()
    assert not list((tmp_path / ".echelon" / "sources").iterdir())


def test_the_path_of_a_runs_code_stays_while_the_code_changes(tmp_path: Path) -> None:
    store = SourceStore(tmp_path)
    for digest in ("one", "two"):
        store.make_tree(digest, [])
        store.point_code_link("a", store.get_tree(digest))
        assert store.get_code_link("a").resolve() == store.get_tree(digest)


def test_a_file_that_was_not_edited_is_not_read_again(project: Path) -> None:
    old = 1_700_000_000
    for path in project.rglob("*.py"):
        if not path.is_symlink():
            os.utime(path, (old, old))
    before = read(project)
    target = project / "train.py"
    signs = target.stat()
    # The same size, time and inode: as far as anybody can tell without reading it, the same file.
    with target.open("r+") as file:
        file.write("print(9)\n")
    os.utime(target, ns=(signs.st_atime_ns, signs.st_mtime_ns))
    assert read(project).digest == before.digest
    os.utime(target, (old + 1, old + 1))
    assert read(project).digest != before.digest
