"""Snapshots: what is saved comes back, what is damaged is found, what is kept is kept."""

from __future__ import annotations

import collections
import enum
import errno
import json
import os
import random
import resource
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from worlds import run_forked

from echelon.errors import EchelonError
from echelon.snapshot import retention
from echelon.snapshot.layout import find_best, list_snapshots
from echelon.snapshot.manifest import BLOCK_BYTES, InvalidSnapshotError
from echelon.snapshot.reader import DamagedSnapshot, find_newest, load_weights, verify_snapshot
from echelon.snapshot.writer import SaveError, SaveResult, ShardedSave, SnapshotWriter

sys.path.insert(0, str(Path(__file__).parents[1] / "campaigns"))
import snapshot_kills


def tiny(step: int) -> dict[str, Any]:
    return {"model": {"w": torch.full((50,), float(step))}, "rng": torch.arange(9) + step}


def save(
    root: Path, *steps: int, keep_last: int = 9, best: tuple[int, ...] = ()
) -> list[SaveResult]:
    writer = SnapshotWriter(root, keep_last)
    saved = []
    for step in steps:
        writer.save(step, tiny(step), {"step": step}, is_best=step in best)
        saved += writer.wait()
    writer.close()
    return saved


def steps(root: Path) -> list[int]:
    return [int(folder.name[5:]) for folder in list_snapshots(root)]


def found(root: Path) -> tuple[int | None, dict[int, str]]:
    snapshot, damaged = find_newest(root)
    return snapshot.step if snapshot else None, {int(d.folder.name[5:]): d.reason for d in damaged}


def only(saved: list[SaveResult]) -> SaveResult:
    assert len(saved) == 1
    return saved[0]


# Round trip ----------------------------------------------------------------------------------


class Colour(enum.IntEnum):
    RED = 3


SCALARS: dict[str, Any] = {
    "int": 2**127 + 1,
    "inf": float("inf"),
    "none": None,
    "bool": True,
    "text": "größe",
    "nested": [1, (2.5, {3: "three", (4, 5): None})],
    "empty": {},
}

TENSORS: dict[str, Callable[[], torch.Tensor]] = {
    "float": lambda: torch.randn(3, 4),
    "bf16": lambda: torch.randn(5).bfloat16(),
    "int": lambda: torch.arange(7),
    "uint8": lambda: torch.arange(7, dtype=torch.uint8),
    "bool": lambda: torch.tensor([True, False, True]),
    "0-dim": lambda: torch.tensor(3.5),
    "empty": lambda: torch.empty(0, 3),
    "empty slice": lambda: torch.randn(9)[4:4],
    "transposed": lambda: torch.randn(3, 4).t(),
    "channels last": lambda: torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "every other": lambda: torch.randn(10)[::2],
    "expanded": lambda: torch.randn(2).expand(3, 2),
    "conjugated": lambda: torch.randn(3, dtype=torch.complex64).conj(),
    "parameter": lambda: torch.nn.Parameter(torch.randn(2)),
}


def round_trip(root: Path, tree: Any) -> Any:
    writer = SnapshotWriter(root)
    writer.save(7, {"part": tree}, {"position": 1})
    assert only(writer.close()).error is None
    snapshot, damaged = find_newest(root)
    assert snapshot is not None
    assert not damaged
    assert (snapshot.step, snapshot.info, snapshot.parts) == (7, {"position": 1}, ("part",))
    return snapshot.load_part("part")


def test_scalars_come_back(tmp_path: Path) -> None:
    assert round_trip(tmp_path, SCALARS) == SCALARS


def test_subclasses_come_back_as_what_they_are_a_kind_of(tmp_path: Path) -> None:
    tree = collections.OrderedDict(colour=Colour.RED, counts=collections.Counter("aab"))
    back = round_trip(tmp_path, {"tree": tree, "size": torch.Size((2, 3))})
    assert back == {"tree": {"colour": 3, "counts": {"a": 2, "b": 1}}, "size": (2, 3)}
    assert type(back["tree"]) is dict
    assert type(back["tree"]["colour"]) is int


@pytest.mark.parametrize("kind", TENSORS)
def test_tensors_come_back(tmp_path: Path, kind: str) -> None:
    tensor = TENSORS[kind]()
    back = round_trip(tmp_path, tensor)
    assert torch.equal(back, tensor)
    assert back.dtype == tensor.dtype
    assert type(back) is torch.Tensor
    assert not back.requires_grad


def test_tied_tensors_stay_tied_and_views_stay_views(tmp_path: Path) -> None:
    weight = torch.randn(4, 5)
    bits = weight.view(torch.int32)  # torch.save refuses two dtypes on one storage
    tree = {"a": weight, "b": weight, "row": weight[2], "t": weight.t(), "bits": bits}
    back = round_trip(tmp_path, tree)
    assert all(torch.equal(back[key], tree[key]) for key in tree)
    back["a"][2, 0] = 99.0
    assert back["b"][2, 0] == back["row"][0] == back["t"][0, 2] == 99.0


def test_a_slice_does_not_take_its_whole_storage_along(tmp_path: Path) -> None:
    round_trip(tmp_path, torch.randn(1_000_000)[:10])
    assert (tmp_path / "step-000000007" / "part.pt").stat().st_size < 10_000


def test_a_state_of_several_blocks_and_an_adam(tmp_path: Path) -> None:
    model = torch.nn.Linear(1500, 1500)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.randn(2, 1500)).sum().backward()
    optimizer.step()
    writer = SnapshotWriter(tmp_path)
    writer.save(1, {"model": model.state_dict(), "optimizer": optimizer.state_dict()}, {})
    assert only(writer.close()).error is None
    snapshot = verify_snapshot(tmp_path / "step-000000001")
    assert (snapshot.folder / "optimizer.pt").stat().st_size > BLOCK_BYTES
    again = torch.nn.Linear(1500, 1500)
    again.load_state_dict(snapshot.load_part("model"))
    assert all(map(torch.equal, again.parameters(), model.parameters()))
    other = torch.optim.Adam(again.parameters())
    other.load_state_dict(snapshot.load_part("optimizer"))
    assert torch.equal(
        other.state[again.weight]["exp_avg"], optimizer.state[model.weight]["exp_avg"]
    )


def test_parts_load_with_plain_torch(tmp_path: Path) -> None:
    save(tmp_path, 3)
    plain = torch.load(tmp_path / "step-000000003" / "model.pt", weights_only=True)
    assert torch.equal(plain["w"], torch.full((50,), 3.0))


@pytest.mark.parametrize(
    ("tree", "where"),
    [
        ({"a": [0, object()]}, "object at part/a/1"),
        ({"f": lambda: 0}, "function at part/f"),
        ({"s": {1, 2}}, "set at part/s"),
        ({"t": torch.eye(3).to_sparse()}, "sparse_coo on cpu"),
        ({"t": torch.empty(3, device="meta")}, "on meta"),
    ],
)
def test_what_cannot_be_saved_is_named_at_once(tmp_path: Path, tree: Any, where: str) -> None:
    with pytest.raises(EchelonError, match=where):
        SnapshotWriter(tmp_path).save(1, {"part": tree}, {})
    assert list_snapshots(tmp_path) == []


def test_info_that_is_not_json_and_names_that_are_paths_are_refused(tmp_path: Path) -> None:
    writer = SnapshotWriter(tmp_path)
    with pytest.raises(EchelonError, match="not JSON"):
        writer.save(1, {}, {"x": torch.ones(1)})
    with pytest.raises(ValueError, match="name"):
        writer.save(1, {"../x": 1}, {})
    with pytest.raises(EchelonError, match="keep_last=0"):
        SnapshotWriter(tmp_path, keep_last=0)


# Kept memory and the background --------------------------------------------------------------


def test_memory_is_kept_and_later_changes_are_not_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    release, addresses = threading.Event(), []
    plain_save = torch.save

    def slow_save(tree: Any, file: Any) -> None:
        release.wait()
        addresses.append(tree["w"].data_ptr())
        plain_save(tree, file)

    monkeypatch.setattr(torch, "save", slow_save)
    weight, info = torch.full((1000,), 1.0), {"note": ["as it was"]}
    writer = SnapshotWriter(tmp_path)
    writer.save(1, {"model": {"w": weight}}, info)
    assert writer.take_results() == []  # save() returned while nothing is written yet
    weight.fill_(2.0)
    info["note"].append("changed")
    release.set()
    writer.save(2, {"model": {"w": weight}}, info)
    assert [s.step for s in writer.wait()] == [1, 2]
    first = verify_snapshot(tmp_path / "step-000000001")
    assert torch.equal(first.load_part("model")["w"], torch.full((1000,), 1.0))
    assert first.info == {"note": ["as it was"]}
    assert addresses[0] == addresses[1] != weight.data_ptr()


@pytest.mark.slow
def test_a_process_that_ends_finishes_its_save(tmp_path: Path) -> None:
    code = (
        "import sys, torch; from pathlib import Path;"
        "from echelon.snapshot.writer import SnapshotWriter;"
        "SnapshotWriter(Path(sys.argv[1])).save(1, {'m': torch.ones(3_000_000)}, {})"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True)
    assert found(tmp_path) == (1, {})


def test_the_same_step_again_is_left_as_it_is(tmp_path: Path) -> None:
    save(tmp_path, 1)
    before = (tmp_path / "step-000000001" / "model.pt").stat().st_mtime_ns
    saved = only(save(tmp_path, 1))
    assert saved.was_present
    assert saved.error is None
    assert saved.folder is not None
    assert (saved.folder / "model.pt").stat().st_mtime_ns == before


def test_the_same_step_damaged_is_replaced(tmp_path: Path) -> None:
    save(tmp_path, 1)
    (tmp_path / "step-000000001" / "model.pt").write_bytes(b"")
    saved = only(save(tmp_path, 1))
    assert not saved.was_present
    assert saved.error is None
    assert found(tmp_path) == (1, {})
    assert os.listdir(tmp_path) == ["step-000000001"]


# Returning to an older one -------------------------------------------------------------------


def value(folder: Path) -> float:
    return float(verify_snapshot(folder).load_part("model")["w"][0])


def save_after(root: Path, after: int, step: int, number: int, best: bool = False) -> SaveResult:
    """Go on from the step `after`, and save a state that this number marks."""
    writer = SnapshotWriter(root, keep_last=9, resumed_step=after)
    writer.save(step, tiny(number), {"step": step}, is_best=best)
    return only(writer.close())


@pytest.mark.parametrize("is_best", [False, True])
def test_a_later_step_is_replaced_once_it_is_saved_again(tmp_path: Path, is_best: bool) -> None:
    save(tmp_path, 1, 2, 3, 4, best=(1, 3))
    saved = save_after(tmp_path, 2, 3, number=33, best=is_best)
    assert (saved.error, saved.was_present) == (None, False)
    assert [value(folder) for folder in list_snapshots(tmp_path)] == [1, 2, 33, 4]
    assert find_best(tmp_path) == tmp_path / f"step-00000000{3 if is_best else 1}"
    assert not [name for name in os.listdir(tmp_path) if name.startswith(".")]


def test_no_mark_stays_on_what_is_not_the_best(tmp_path: Path) -> None:
    save(tmp_path, 1, 2, best=(2,))
    assert save_after(tmp_path, 1, 2, number=22).error is None
    assert find_best(tmp_path) is None
    SnapshotWriter(tmp_path, resumed_step=2)
    assert find_best(tmp_path) is None


def test_what_this_run_saved_is_not_replaced(tmp_path: Path) -> None:
    save(tmp_path, 1, 2, 3)
    assert save_after(tmp_path, 3, 3, number=33).was_present
    writer = SnapshotWriter(tmp_path, resumed_step=1)
    for number in (22, 222):
        writer.save(2, tiny(number), {})
    assert [saved.was_present for saved in writer.close()] == [False, True]
    assert [value(folder) for folder in list_snapshots(tmp_path)] == [1, 22, 3]


@pytest.mark.slow
def test_killed_at_any_change_of_names_of_a_replacement(tmp_path: Path) -> None:
    """The old one or the new one or none of that step, and a mark on the best of those there."""
    save(tmp_path / "source", 1, 2, 3, best=(1, 3))
    seen = set()
    for k in range(1, 1000):
        root = snapshot_kills.fresh(tmp_path / "source", tmp_path / "target")

        def once(pipe: int, root: Path = root, k: int = k) -> None:
            writer = SnapshotWriter(root, 9, resumed_step=2)
            snapshot_kills.kill_at_operation(k, ("mkdir", "rename", "unlink", "rmdir"))
            writer.save(3, tiny(33), {})
            writer.close()

        child, reader = snapshot_kills.forked(once)
        _, status = os.waitpid(child, 0)
        os.close(reader)
        step, damaged = found(root)
        assert step in (2, 3)
        assert not damaged
        SnapshotWriter(root, resumed_step=step)
        there = [value(folder) for folder in list_snapshots(root)]
        assert find_best(root) == root / ("step-000000003" if 3 in there else "step-000000001")
        assert not [name for name in os.listdir(root) if name.startswith(".")]
        seen.add(tuple(there))
        if not os.WIFSIGNALED(status):
            break
    assert status == 0
    assert seen == {(1, 2, 3), (1, 2), (1, 2, 33)}


# Evaluated after it was saved ----------------------------------------------------------------


def test_an_evaluation_is_added_to_its_snapshot(tmp_path: Path) -> None:
    save(tmp_path, 1, 2, best=(1,))
    writer = SnapshotWriter(tmp_path, keep_last=1, resumed_step=2)
    writer.save(3, tiny(3), {"step": 3, "best": 0.5, "results": {}})
    writer.record_evaluation(3, {"best": 0.25, "results": {"loss": 0.25}}, is_best=True)
    assert only(writer.close()).error is None
    snapshot = verify_snapshot(tmp_path / "step-000000003")
    assert snapshot.info == {"step": 3, "best": 0.25, "results": {"loss": 0.25}}
    assert snapshot.is_best
    assert find_best(tmp_path) == snapshot.folder
    assert steps(tmp_path) == [3], "the best one of before is no longer kept"
    path = snapshot.folder / "evaluation.json"
    path.write_bytes(path.read_bytes().replace(b"0.25", b"0.26"))
    assert found(tmp_path) == (None, {3: "evaluation.json: checksum differs"})


def test_an_evaluation_of_what_was_not_saved_changes_nothing(tmp_path: Path) -> None:
    save(tmp_path, 1, 2)
    writer = SnapshotWriter(tmp_path, resumed_step=1)  # 2 is from before the return to 1
    writer.record_evaluation(2, {"best": 0.25}, is_best=True)
    writer.record_evaluation(3, {"best": 0.25}, is_best=True)
    assert writer.close() == []
    assert verify_snapshot(tmp_path / "step-000000002").info == {"step": 2}
    assert find_best(tmp_path) is None


@pytest.mark.slow
def test_killed_at_any_change_of_names_while_an_evaluation_is_added(tmp_path: Path) -> None:
    """A snapshot with the evaluation, or one without, to which it can be added again."""
    save(tmp_path / "source", 1, 2, best=(1,))
    seen = set()
    for k in range(1, 1000):
        root = snapshot_kills.fresh(tmp_path / "source", tmp_path / "target")

        def once(pipe: int, root: Path = root, k: int = k) -> None:
            writer = SnapshotWriter(root, 9, resumed_step=2)
            snapshot_kills.kill_at_operation(k, ("open", "write", "replace", "unlink", "fsync"))
            writer.record_evaluation(2, {"best": 0.5}, is_best=True)
            writer.close()

        child, reader = snapshot_kills.forked(once)
        _, status = os.waitpid(child, 0)
        os.close(reader)
        assert found(root) == (2, {})
        is_added = "best" in verify_snapshot(root / "step-000000002").info
        writer = SnapshotWriter(root, 9, resumed_step=2)
        assert find_best(root) == root / f"step-00000000{2 if is_added else 1}"
        writer.record_evaluation(2, {"best": 0.5}, is_best=True)
        assert writer.close() == []
        assert verify_snapshot(root / "step-000000002").info["best"] == 0.5
        assert find_best(root) == root / "step-000000002"
        seen.add(is_added)
        if not os.WIFSIGNALED(status):
            break
    assert status == 0
    assert seen == {False, True}


# Damage --------------------------------------------------------------------------------------

FILES = ("model.pt", "rng.pt", "state.json", "manifest.json")


@pytest.fixture
def two(tmp_path: Path) -> Path:
    save(tmp_path, 1, 2)
    return tmp_path


def hurt(root: Path, name: str) -> Path:
    return root / "step-000000002" / name


@pytest.mark.parametrize("name", FILES)
def test_a_flipped_bit_is_found_in_every_file(two: Path, name: str) -> None:
    path = hurt(two, name)
    whole = path.read_bytes()
    rng = random.Random(name)
    for at in {0, len(whole) - 1, *(rng.randrange(len(whole)) for _ in range(60))}:
        changed = bytearray(whole)
        changed[at] ^= 1 << rng.randrange(8)
        path.write_bytes(changed)
        step, damaged = found(two)
        assert step == 1, at
        assert damaged[2].startswith(name), at


@pytest.mark.parametrize("name", FILES)
def test_a_file_cut_short_emptied_or_missing_is_found(two: Path, name: str) -> None:
    path = hurt(two, name)
    size = path.stat().st_size
    for length in (size - 1, size // 2, 0):
        os.truncate(path, length)
        step, damaged = found(two)
        assert step == 1
        assert name in damaged[2]
        if name != "manifest.json":
            assert damaged[2] == f"{name}: {length} bytes instead of {size}"
    path.unlink()
    assert found(two) == (1, {2: f"{name}: missing"})


GARBAGE = {
    "not text": b"\xff\x00\xfe",
    "null": b"null",
    "list": b"[]",
    "number": b"1" * 9000,
    "nested": b"[" * 100_000 + b"]" * 100_000,
    "huge": b" " * (2 << 20),
    "another format": b'{"format": 2}',
    "surrogate": b'{"\\ud800": 1}',
}


@pytest.mark.parametrize("kind", GARBAGE)
def test_a_manifest_of_garbage_is_found(two: Path, kind: str) -> None:
    hurt(two, "manifest.json").write_bytes(GARBAGE[kind])
    step, damaged = found(two)
    assert step == 1
    assert damaged[2].startswith("manifest.json: ")


@pytest.mark.parametrize(
    "change",
    [
        {"step": 3},
        {"step": "2"},
        {"format": 99},
        {"files": []},
        {"files": {"../step-000000001/model.pt": {"size": 1, "checksum": ""}}},
        {"files": {"state.json": {"size": "12", "checksum": None}}},
        {"files": {"state.json": 5}},
        {"best": None},
    ],
)
def test_a_manifest_with_a_right_checksum_is_still_read_with_care(
    two: Path, change: dict[str, Any]
) -> None:
    from echelon.snapshot import manifest

    path = hurt(two, "manifest.json")
    body = {**json.loads(path.read_bytes()), **change}
    body.pop("checksum")
    path.write_bytes(manifest._render_with_checksum(body))
    assert found(two)[0] == 1


def test_files_of_odd_kinds_are_found(two: Path) -> None:
    for name in ("model.pt", "manifest.json"):
        path = hurt(two, name)
        whole = path.read_bytes()
        path.unlink()
        path.mkdir()
        assert found(two) == (1, {2: f"{name}: not a regular file"})
        path.rmdir()
        os.mkfifo(path)  # opening it would wait for ever
        assert found(two) == (1, {2: f"{name}: not a regular file"})
        path.unlink()
        path.symlink_to(path)
        assert found(two)[0] == 1
        path.unlink()
        path.write_bytes(whole)
    assert found(two) == (2, {})


def test_extra_files_and_odd_names_do_not_matter(two: Path) -> None:
    hurt(two, ".nfs0001").write_text("left by NFS")
    hurt(two, "notes.txt").write_text("mine")
    for name in ("step-3", "step-00000000٣", "step-", "step--00000001", "step-000000003x", "tmp"):
        (two / name).mkdir()
    os.mkdir(os.fsencode(two) + b"/step-\xff\xfe")
    (two / "step-0000000000000000000000000000003").write_text("")
    assert steps(two) == [1, 2]
    assert found(two) == (2, {})


def test_a_file_where_a_folder_should_be_and_an_empty_folder(two: Path) -> None:
    (two / "step-000000003").write_text("a file")
    (two / "step-000000004").mkdir()
    missing = "manifest.json: missing"
    assert found(two) == (2, {3: missing, 4: missing})


def test_a_folder_of_another_step_is_found(two: Path) -> None:
    (two / "step-000000002").rename(two / "step-000000005")
    assert found(two) == (1, {5: "manifest.json: written for step 2"})


def test_nothing_there(tmp_path: Path) -> None:
    assert find_newest(tmp_path) == find_newest(tmp_path / "missing") == (None, [])
    (tmp_path / "file").write_text("")
    snapshot, damaged = find_newest(tmp_path / "file")
    assert snapshot is None
    assert damaged == [DamagedSnapshot(tmp_path / "file", "cannot be listed: not a directory")]


def test_only_damaged_ones_there(tmp_path: Path) -> None:
    save(tmp_path, 1)
    (tmp_path / "step-000000001" / "manifest.json").unlink()
    assert found(tmp_path) == (None, {1: "manifest.json: missing"})
    with pytest.raises(InvalidSnapshotError, match=r"manifest\.json: missing"):
        verify_snapshot(tmp_path / "step-000000001")


def test_weights_of_a_run_whose_newest_snapshot_is_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    run = tmp_path / "runs" / "a"
    save(run / "snapshots", 1, 2)
    (run / "config.json").write_text("{}")
    newest_of = run / "snapshots" / "step-000000002"
    (newest_of / "model.pt").write_bytes(b"")
    assert load_weights("a")["w"][0] == 1.0
    (told,) = capsys.readouterr().err.splitlines()
    assert told.startswith(f"warning: {newest_of} is damaged (model.pt: 0 bytes instead of ")
    assert told.endswith("; its weights are left out, and step-000000001's taken")


def test_an_unknown_run_is_answered_with_those_that_have_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("saved", "never_started"):
        (tmp_path / "runs" / name).mkdir(parents=True)
        (tmp_path / "runs" / name / "config.json").write_text("{}")
    (tmp_path / "runs" / "latest").symlink_to("saved")
    with pytest.raises(EchelonError, match="hint: train one with"):
        load_weights("nope")
    save(tmp_path / "runs" / "saved" / "snapshots", 1)
    with pytest.raises(EchelonError, match=r"no run 'nope' .*\n  hint: known: saved$"):
        load_weights("nope")


# Errors of the disk --------------------------------------------------------------------------


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    if os.getuid() != 0:
        pytest.skip("mounting a small file system needs root")
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(tmp_path)], capture_output=True
    )
    if mounted.returncode:
        pytest.skip(f"no small file system can be mounted: {mounted.stderr.decode().strip()}")
    yield tmp_path
    subprocess.run(["umount", "-l", str(tmp_path)], check=True)  # a neighbour may look into it


def test_a_full_disk(small_disk: Path) -> None:
    root = small_disk / "snapshots"
    writer = SnapshotWriter(root)
    writer.save(1, {"model": torch.ones(50_000)}, {})
    writer.save(2, {"model": torch.ones(500_000)}, {})
    good, full = writer.wait()
    assert good.error is None
    assert full.folder is None
    path = root / "step-000000002" / "model.pt"
    assert full.error == f"no space left on device: {path}; the snapshot of step 1 stands"
    assert found(root) == (1, {})
    assert os.listdir(root) == ["step-000000001"]
    writer.save(3, {"model": torch.ones(50_000)}, {})  # the same writer goes on
    assert only(writer.close()).error is None
    assert steps(root) == [1, 3]


def test_a_disk_that_is_read_only(small_disk: Path) -> None:
    save(small_disk, 1)
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    failed = only(save(small_disk, 2))
    assert failed.error == f"read-only file system: {small_disk}; the snapshot of step 1 stands"


def test_a_file_size_limit(tmp_path: Path) -> None:
    """The same as a full disk where nothing can be mounted (SIGXFSZ is ignored by Python)."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    writer = SnapshotWriter(tmp_path)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, before[1]))
        writer.save(1, {"model": torch.ones(500_000)}, {})
        failed = only(writer.close())
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    path = tmp_path / "step-000000001" / "model.pt"
    assert failed.error == f"file too large: {path}; no snapshot stands"
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("call", ["fsync", "write", "mkdir", "rename"])
def test_an_error_at_every_kind_of_call(
    two: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    def fails(*_: Any, **__: Any) -> Any:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    writer = SnapshotWriter(two)
    with monkeypatch.context() as patched:
        patched.setattr(os, call, fails)
        writer.save(3, tiny(3), {})
        failed = only(writer.wait())
    assert failed.folder is None
    assert failed.error is not None
    assert failed.error.startswith(f"input/output error: {two}")
    assert failed.error.endswith("; the snapshot of step 2 stands")
    assert sorted(os.listdir(two)) == ["step-000000001", "step-000000002"]
    writer.save(3, tiny(3), {})
    assert only(writer.close()).error is None


@pytest.mark.parametrize("other", ["wrote", "failed"])
@pytest.mark.parametrize("step", [1, 2], ids=["there already", "not written"])
def test_a_folder_that_others_write_to_goes_when_they_are_done(
    tmp_path: Path, step: int, other: str
) -> None:
    """Deleted earlier it would come to life again, half full."""
    writer = SnapshotWriter(tmp_path)
    writer.save(1, {"model": {}}, {})
    writer.wait()
    beside = tmp_path / f".writing-{step}"
    beside.mkdir()
    (beside / "model.pt").touch()  # in the way of rank 0's
    waited = []

    def others() -> dict[str, Any]:
        waited.append(beside.is_dir())
        if other == "failed":
            raise SaveError("rank 1: no space left")
        return {}

    writer.save(step, {"model": {}}, {}, shared_save=ShardedSave(beside, others))
    [saved] = writer.close()
    assert waited == [True]
    assert (saved.error is None) == saved.was_present == (step == 1)
    assert sorted(os.listdir(tmp_path)) == ["step-000000001"]


def test_pruning_that_fails_does_not_take_the_save_back(
    two: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(folder: Path) -> Path:
        raise PermissionError(errno.EACCES, "Permission denied", str(folder))

    monkeypatch.setattr(retention, "hide_folder", fails)
    saved = only(save(two, 3, keep_last=1))
    assert saved.folder == two / "step-000000003"
    assert saved.error is not None
    assert saved.error.startswith("step 3 is saved, but tidying up failed: permission denied")


def test_a_folder_that_cannot_be_made_is_said_before_training(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(EchelonError, match="not a directory"):
        SnapshotWriter(tmp_path / "file" / "snapshots")


# Pruning -------------------------------------------------------------------------------------


def test_the_last_and_the_best_are_kept(tmp_path: Path) -> None:
    save(tmp_path, *range(1, 8), keep_last=2, best=(1, 3))
    assert steps(tmp_path) == [3, 6, 7]
    assert find_best(tmp_path) == tmp_path / "step-000000003"
    assert verify_snapshot(tmp_path / "step-000000003").is_best
    save(tmp_path, 8, keep_last=2, best=(8,))
    assert steps(tmp_path) == [7, 8]
    assert os.readlink(tmp_path / "best") == "step-000000008"
    assert (tmp_path / "best" / "model.pt").is_file()


def test_a_damaged_newer_one_does_not_push_out_the_good_one(tmp_path: Path) -> None:
    save(tmp_path, 10, 20)
    (tmp_path / "step-000000020" / "model.pt").write_bytes(b"")
    save(tmp_path, 15, keep_last=1)
    assert steps(tmp_path) == [15, 20]
    assert found(tmp_path)[0] == 15
    save(tmp_path, 25, keep_last=1)
    assert steps(tmp_path) == [25]


def test_a_mark_lost_to_a_kill_is_found_again(tmp_path: Path) -> None:
    save(tmp_path, 1, 2, best=(1, 2))
    (tmp_path / "best").unlink()
    (tmp_path / "best").symlink_to("step-000000001")
    os.utime(tmp_path / "best", (0, 0), follow_symlinks=False)  # as old as it would be
    SnapshotWriter(tmp_path)
    assert find_best(tmp_path) == tmp_path / "step-000000002"


@pytest.mark.parametrize("target", ["../..", "step-000000009", "\udcff", "best", "x" * 4000])
def test_a_best_link_of_garbage_leads_nowhere(two: Path, target: str) -> None:
    (two / "best").symlink_to(target)
    assert find_best(two) is None


def test_a_file_in_the_place_of_the_best_link_is_replaced(tmp_path: Path) -> None:
    """As a run of an earlier version left it."""
    save(tmp_path, 1, 2, best=(1,))
    (tmp_path / "best").unlink()
    (tmp_path / "best").write_text("step-000000002\n")
    assert find_best(tmp_path) is None
    SnapshotWriter(tmp_path)
    assert os.readlink(tmp_path / "best") == "step-000000001"


def test_a_copy_that_followed_links_gets_its_link_back(tmp_path: Path) -> None:
    save(tmp_path / "here", 1, 2, best=(1,))
    shutil.copytree(tmp_path / "here", tmp_path / "there")
    assert not (tmp_path / "there" / "best").is_symlink()
    assert only(save(tmp_path / "there", 3, best=(3,))).error is None
    assert os.readlink(tmp_path / "there" / "best") == "step-000000003"
    assert steps(tmp_path / "there") == [1, 2, 3]


def test_a_run_that_is_moved_keeps_its_best(tmp_path: Path) -> None:
    save(tmp_path / "here", 1, 2, best=(1,))
    (tmp_path / "here").rename(tmp_path / "there")
    assert find_best(tmp_path / "there") == tmp_path / "there" / "step-000000001"
    assert (tmp_path / "there" / "best" / "manifest.json").is_file()


def test_leftovers_go_at_the_next_open(two: Path) -> None:
    for name in (".writing-000000003-ab", ".removing-step-000000001-ab"):
        (two / name).mkdir()
        (two / name / "model.pt").write_bytes(b"half")
    (two / ".writing-best-ab").write_text("step-")
    (two / ".mine").write_text("not ours")
    assert found(two) == (2, {})
    SnapshotWriter(two)
    assert sorted(os.listdir(two)) == [".mine", "step-000000001", "step-000000002"]


# Kills and speed -----------------------------------------------------------------------------


@pytest.mark.slow
def test_a_sample_of_the_kill_campaign(tmp_path: Path) -> None:
    """In a process of its own: it forks, and needs to have one thread."""
    out = tmp_path / "report.json"
    command = [sys.executable, snapshot_kills.__file__, "--kills", "8", "--flips", "30"]
    command += ["--most-calls", "12", "--folder", str(tmp_path), "--json", str(out)]
    done = run_forked(command, tmp_path)
    report = json.loads(out.read_text())["found"]
    assert snapshot_kills.bad(report) == 0, done.output
    assert report["random"]["kills"] == 8
    assert report["operations"]["kills"] == 12


@pytest.mark.slow
def test_other_threads_run_while_a_snapshot_is_written(tmp_path: Path) -> None:
    """A writer that held the interpreter's lock would stop this thread for most of a save.

    Time is what this process computes, so that other work on the machine does not count. It may
    still keep this thread alone from running, hence the best of several.
    """
    writer = SnapshotWriter(tmp_path)
    assert min(_measure_longest_pause(writer, step) for step in range(1, 6)) < 0.5


def _measure_longest_pause(writer: SnapshotWriter, step: int) -> float:
    """The longest that this thread stood still while another computed, as a part of a save."""
    began = time.process_time()
    writer.save(step, {"model": torch.ones(25_000_000)}, {})
    longest, last = 0.0, time.process_time()
    while not (saved := writer.take_results()):
        time.sleep(0.001)
        now = time.process_time()
        longest, last = max(longest, now - last), now
    assert only(saved).error is None
    return longest / (time.process_time() - began)
