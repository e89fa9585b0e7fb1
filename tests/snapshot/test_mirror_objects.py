"""Snapshots in an object store: in which order objects come and go, and what is checked."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from object_store_server import ObjectStoreServer, serve_object_store

from echelon.errors import EchelonError
from echelon.object_store.store_errors import ObjectStoreError
from echelon.snapshot.layout import find_best, list_snapshots
from echelon.snapshot.manifest import InvalidSnapshotError
from echelon.snapshot.mirror_claim import MirrorClaim
from echelon.snapshot.mirror_objects import MirrorObjects, MirrorTakenError
from echelon.snapshot.mirror_process import (
    fetch_given,
    fetch_newer,
    open_objects,
    take_mirror,
    update_mirror,
)
from echelon.snapshot.reader import verify_snapshot
from echelon.snapshot.writer import SnapshotWriter

OWNER = MirrorClaim("run", "start")


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[ObjectStoreServer]:
    with serve_object_store() as server:
        for name, value in server.environment.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setenv("ECHELON_STORE_RETRIES", "0")
        yield server


@pytest.fixture
def url(server: ObjectStoreServer) -> str:
    return f"s3://{server.bucket}/runs/a"


@pytest.fixture
def objects(url: str) -> MirrorObjects:
    return open_objects(url)


def save(root: Path, *steps: int, best: tuple[int, ...] = (), size: int = 50) -> list[Path]:
    writer = SnapshotWriter(root, keep_last=9)
    for step in steps:
        parts = {"model": {"w": torch.full((size,), float(step))}, "rng": torch.arange(9) + step}
        writer.save(step, parts, {"step": step}, is_best=step in best)
        writer.wait()
    writer.close()
    return list_snapshots(root)


def read_files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def read(server: ObjectStoreServer, key: str) -> bytes:
    data = server.get(key)
    assert data is not None
    return data


def begin(objects: MirrorObjects, root: Path, **given: Any) -> dict[str, Any]:
    """As a start of a run does it whose snapshots are in a folder."""
    usual: dict[str, Any] = {"newest_step": None, "is_adopted": True, "is_fetched": True}
    file = str(root.with_suffix(".json"))
    found = fetch_newer(objects, "s3://runs/a", file, str(root), **usual | given)
    return found | take_mirror(objects, "s3://runs/a", file)


@pytest.mark.slow
def test_a_snapshot_comes_back_byte_for_byte(objects: MirrorObjects, tmp_path: Path) -> None:
    [folder] = save(tmp_path / "here", 3, size=5_000_000)  # 20 MB: several parts and blocks
    objects.upload(folder, OWNER)
    assert objects.list_snapshots() == ["step-000000003"]
    assert begin(objects, tmp_path / "there")["fetched_step"] == 3
    fetched = tmp_path / "there" / folder.name
    assert read_files(fetched) == read_files(folder)
    assert verify_snapshot(fetched).step == 3


def test_the_manifest_comes_last_and_goes_first(
    objects: MirrorObjects, server: ObjectStoreServer, tmp_path: Path
) -> None:
    folders = save(tmp_path, 1, 2)
    for folder in folders:
        objects.upload(folder, OWNER)
    writes = server.list_paths("PUT")
    assert writes[3].endswith("step-000000001/manifest.json")
    assert len(writes) == 8
    server.reset_counts()
    objects.remove_old(step=2, keep_last=1)
    assert server.list_keys("runs/a/") == [
        f"runs/a/step-000000002/{f.name}" for f in sorted(folders[1].iterdir())
    ]


def test_what_is_there_is_not_sent_again(
    objects: MirrorObjects, url: str, server: ObjectStoreServer, tmp_path: Path
) -> None:
    [folder] = save(tmp_path, 1)
    objects.upload(folder, OWNER)
    server.reset_counts()
    open_objects(url).upload(folder, OWNER)
    assert not server.list_paths("PUT") + server.list_paths("POST")


def test_an_evaluation_that_is_added_later_arrives(
    objects: MirrorObjects, server: ObjectStoreServer, tmp_path: Path
) -> None:
    writer = SnapshotWriter(tmp_path / "here")
    writer.save(4, {"model": {"w": torch.ones(3)}}, {"step": 4, "best": None})
    writer.wait()
    [folder] = list_snapshots(tmp_path / "here")
    objects.upload(folder, OWNER)
    writer.record_evaluation(4, {"best": 0.5}, is_best=True)
    writer.close()
    server.reset_counts()
    update_mirror(objects, "", list(OWNER), [str(folder)], folder.name, step=4, keep_last=1)
    sent = [path.rpartition("/")[2] for path in server.list_paths("PUT")]
    assert sent == ["evaluation.json", "manifest.json", "best"]
    begin(objects, tmp_path / "there")
    assert verify_snapshot(tmp_path / "there" / folder.name).info == {"step": 4, "best": 0.5}
    assert find_best(tmp_path / "there") == tmp_path / "there" / folder.name


def test_another_snapshot_of_the_same_step_takes_the_place(
    objects: MirrorObjects, tmp_path: Path
) -> None:
    [old] = save(tmp_path / "old", 5, size=10)
    [new] = save(tmp_path / "new", 5, size=20)
    objects.upload(old, OWNER)
    objects.upload(new, OWNER)
    begin(objects, tmp_path / "there")
    assert read_files(tmp_path / "there" / new.name) == read_files(new)


def test_the_best_one_stays_and_arrives(objects: MirrorObjects, tmp_path: Path) -> None:
    folders = save(tmp_path / "here", 1, 2, 3, 4, best=(2,))
    for folder in folders:
        files = [str(folder), str(folders[1])] if folder >= folders[1] else [str(folder)]
        best = folders[1].name if len(files) == 2 else None
        update_mirror(objects, "", list(OWNER), files, best, int(folder.name[5:]), keep_last=1)
    assert objects.list_snapshots() == ["step-000000002", "step-000000004"]
    begin(objects, tmp_path / "there")
    assert [f.name for f in list_snapshots(tmp_path / "there")] == objects.list_snapshots()
    assert find_best(tmp_path / "there") == tmp_path / "there" / "step-000000002"


def damage_nothing_else(data: bytes) -> bytes:
    return data[:60] + bytes([data[60] ^ 1]) + data[61:]


@pytest.mark.parametrize("what", ["missing", "truncated", "altered", "no manifest", "manifest"])
@pytest.mark.slow
def test_a_damaged_one_is_named_and_the_one_before_is_used(
    what: str, objects: MirrorObjects, server: ObjectStoreServer, tmp_path: Path
) -> None:
    for folder in save(tmp_path / "here", 1, 2):
        objects.upload(folder, OWNER)
    key = "runs/a/step-000000002/model.pt"
    if what == "missing":
        server.delete(key)
    elif what == "truncated":
        server.put(key, read(server, key)[:100])
    elif what == "altered":
        server.put(key, damage_nothing_else(read(server, key)))
    elif what == "no manifest":
        server.delete("runs/a/step-000000002/manifest.json")
    else:
        manifest = read(server, "runs/a/step-000000002/manifest.json")
        server.put("runs/a/step-000000002/manifest.json", damage_nothing_else(manifest))
    found = begin(objects, tmp_path / "there")
    assert found["fetched_step"] == 1
    assert [f.name for f in list_snapshots(tmp_path / "there")] == ["step-000000001"]
    assert not list((tmp_path / "there").glob(".*"))
    if what == "no manifest":  # then it does not exist
        assert found["warnings"] == []
    else:
        [warning] = found["warnings"]
        assert "s3://runs/a/step-000000002 is damaged (" in warning


def test_a_run_of_which_all_are_damaged_does_not_start_over(
    objects: MirrorObjects, server: ObjectStoreServer, tmp_path: Path
) -> None:
    [folder] = save(tmp_path / "here", 1)
    objects.upload(folder, OWNER)
    server.delete("runs/a/step-000000001/rng.pt")
    with pytest.raises(EchelonError, match=r"none is valid: .*rng\.pt: missing"):
        begin(objects, tmp_path / "there")


def test_a_newer_one_here_is_not_replaced(objects: MirrorObjects, tmp_path: Path) -> None:
    begin(objects, tmp_path / "here")
    objects.upload(save(tmp_path / "here", 1)[0], objects.read_claim() or OWNER)
    found = begin(objects, tmp_path / "here", newest_step=1, is_adopted=False)
    assert found["fetched_step"] is None
    assert found["mirrored_step"] == 1


def test_a_damaged_one_here_is_replaced(objects: MirrorObjects, tmp_path: Path) -> None:
    begin(objects, tmp_path / "here")
    folders = save(tmp_path / "here", 1, 2)
    good = read_files(folders[1])
    for folder in folders:
        objects.upload(folder, objects.read_claim() or OWNER)
    (folders[1] / "model.pt").write_bytes(b"")
    begin(objects, tmp_path / "here", newest_step=1, is_adopted=False)
    assert read_files(folders[1]) == good


def test_another_run_of_the_name_is_refused_and_left_alone(
    objects: MirrorObjects, server: ObjectStoreServer, tmp_path: Path
) -> None:
    begin(objects, tmp_path / "here")
    objects.upload(save(tmp_path / "here", 7)[0], objects.read_claim() or OWNER)
    before = server.list_keys()
    for owner in ("{}", '{"run": "another", "start": "one"}'):
        (tmp_path / "there.json").write_text(owner)
        with pytest.raises(EchelonError, match="another run of this name, up to step 7"):
            begin(objects, tmp_path / "there", is_adopted=False, newest_step=3)
        assert (tmp_path / "there.json").read_text() == owner
    assert server.list_keys() == before


def test_a_start_that_is_killed_while_it_fetches_is_repeated(
    objects: MirrorObjects, server: ObjectStoreServer, tmp_path: Path
) -> None:
    """The newest snapshot is here already, and the best one is not."""
    first = begin(objects, tmp_path / "here")["owner"]
    for folder in save(tmp_path / "here", 1, 2, best=(1,)):
        objects.upload(folder, MirrorClaim(*first))
    objects.mark_best("step-000000001")
    server.decide = lambda method, path: 403 if path.endswith("/best") else None
    with pytest.raises(ObjectStoreError):
        begin(objects, tmp_path / "there")
    assert [folder.name for folder in list_snapshots(tmp_path / "there")] == ["step-000000002"]
    assert objects.read_claim() == MirrorClaim(*first)  # nobody has lost it
    server.decide = None
    second = begin(objects, tmp_path / "there", newest_step=2, is_adopted=False)["owner"]
    assert second[0] == first[0]


def test_the_start_that_came_last_writes(objects: MirrorObjects, tmp_path: Path) -> None:
    first = begin(objects, tmp_path / "here")["owner"]
    folders = save(tmp_path / "here", 1, 2)
    objects.upload(folders[0], MirrorClaim(*first))
    second = begin(objects, tmp_path / "there")["owner"]
    assert second[0] == first[0]
    with pytest.raises(MirrorTakenError, match="another start of this run"):
        objects.upload(folders[1], MirrorClaim(*first))
    assert objects.list_snapshots() == ["step-000000001"]


def test_a_file_that_changed_on_disk_is_not_published(
    objects: MirrorObjects, tmp_path: Path
) -> None:
    [folder] = save(tmp_path, 1)
    data = (folder / "model.pt").read_bytes()
    (folder / "model.pt").write_bytes(damage_nothing_else(data))
    with pytest.raises(InvalidSnapshotError, match=r"model\.pt: checksum differs"):
        objects.upload(folder, OWNER)
    assert objects.list_snapshots() == []


def test_only_files_of_snapshots_are_removed(
    objects: MirrorObjects, server: ObjectStoreServer, tmp_path: Path
) -> None:
    foreign = [
        *("runs/a/notes.txt", "runs/a/step-000000001/notes.txt", "runs/a/step-1/model.pt"),
        *("runs/ab/step-000000001/model.pt", "runs/a/more/step-000000001/model.pt"),
    ]
    for key in foreign:
        server.put(key, b"mine")
    server.put("runs/a/step-000000001/optimizer.pt", b"of an upload that was killed")
    for folder in save(tmp_path, 1, 2, 3):
        objects.upload(folder, OWNER)
    server.delete("runs/a/step-000000001/manifest.json")
    objects.remove_old(step=3, keep_last=1)
    assert objects.list_snapshots() == ["step-000000003"]
    assert [k for k in server.list_keys() if "step-000000003" not in k] == sorted(foreign)


def test_a_later_step_is_from_before_a_return_and_stays(
    objects: MirrorObjects, tmp_path: Path
) -> None:
    for folder in save(tmp_path, 1, 2, 9):
        objects.upload(folder, OWNER)
    objects.remove_old(step=2, keep_last=1)
    assert objects.list_snapshots() == ["step-000000002", "step-000000009"]


def test_a_full_disk_is_named_and_nothing_is_left(objects: MirrorObjects, tmp_path: Path) -> None:
    """A limit on the size of files stands for it: the same write fails."""
    for folder in save(tmp_path / "here", 1, 2, size=1_000_000):
        objects.upload(folder, OWNER)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, before[1]))
    try:
        with pytest.raises(EchelonError, match=r"step-000000002 cannot be brought to .*too large"):
            begin(objects, tmp_path / "there")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert list((tmp_path / "there").iterdir()) == []


@pytest.mark.slow
def test_an_upload_that_ends_anywhere_leaves_whole_snapshots(
    objects: MirrorObjects, url: str, server: ObjectStoreServer, tmp_path: Path
) -> None:
    """From the k-th request on nothing is answered, for every k of an update that replaces a
    snapshot of the same step, marks the best and removes an old one."""
    old = save(tmp_path / "old", 1, 2, 3, size=10)
    new = save(tmp_path / "new", 3, size=20)[0]
    files = [file for folder in old for file in folder.iterdir()]
    before = {f"runs/a/{file.parent.name}/{file.name}": file.read_bytes() for file in files}
    for answered in range(100):
        server.delete(*(set(server.list_keys()) - before.keys()))
        for key, data in before.items():
            server.put(key, data)
        server.reset_counts()
        server.decide = lambda method, path, n=answered: 403 if len(server.requests) > n else None
        try:
            arguments = ([str(new)], new.name, 3, 2)
            update_mirror(open_objects(url), "", list(OWNER), *arguments)
            is_done = True
        except ObjectStoreError:
            is_done = False
        server.decide = None
        there = tmp_path / f"there-{answered}"
        found = begin(open_objects(url), there)
        assert found["warnings"] == []
        step = found["fetched_step"]
        candidates = [old[1]] if step == 2 else [old[2], new]
        assert read_files(there / f"step-{step:09d}") in [read_files(f) for f in candidates]
        if is_done:
            break
    assert is_done
    assert answered > 10
    assert open_objects(url).list_snapshots() == ["step-000000002", "step-000000003"]


def test_a_given_one_is_the_newest_the_best_or_that_of_a_step(
    objects: MirrorObjects, tmp_path: Path
) -> None:
    for folder in save(tmp_path / "here", 1, 2, 3):
        objects.upload(folder, OWNER)
    objects.mark_best("step-000000002")
    chosen = {"": "step-000000003", "best": "step-000000002", "step-000000001": "step-000000001"}
    for which, name in chosen.items():
        found = fetch_given(objects, "s3://runs/a", which, str(tmp_path / "fetched"))
        assert found["name"] == name
        assert verify_snapshot(tmp_path / "fetched" / name)
    with pytest.raises(EchelonError, match="no snapshot step-000000009"):
        fetch_given(objects, "s3://runs/a", "step-000000009", str(tmp_path / "fetched"))


@pytest.mark.parametrize("status", [403, 500, 503])
def test_a_store_that_refuses_is_said_in_a_sentence(
    status: int, objects: MirrorObjects, server: ObjectStoreServer, tmp_path: Path
) -> None:
    [folder] = save(tmp_path, 1)
    server.decide = lambda method, path: status
    with pytest.raises(ObjectStoreError) as caught:
        objects.upload(folder, OWNER)
    assert f"the store answered {status}" in caught.value.faults[0].what
