"""Trainings whose snapshots are mirrored: a lost machine, other numbers of processes, and stores
that fail."""

from __future__ import annotations

import json
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import session_loops
from object_store_server import SECRET_KEY, ObjectStoreServer, serve_object_store
from worlds import (
    differing,
    snapshot_steps,
    started_forked,
    state_at,
    train_world,
    verb,
    wait_until,
)

from echelon.snapshot.layout import find_best
from echelon.snapshot.mirror_process import fetch_first_valid, open_objects
from echelon.snapshot.reader import verify_snapshot

sys.path.insert(0, str(Path(__file__).parents[1] / "campaigns"))
from snapshot_kills import steps_in

HELPERS = Path(__file__).parents[1] / "helpers"
KILLS = 20
pytestmark = pytest.mark.slow

SHORT = (
    *("trainer.batch_size=5", "trainer.epochs=3", "trainer.save.steps=2", "eval_samples=7"),
    *("optimizer=adam", "dropout=0.3", "trainer.clip=1.0"),
)
STEPS = 12


@pytest.fixture
def server() -> Iterator[ObjectStoreServer]:
    with serve_object_store() as server:
        yield server


@pytest.fixture
def mirror(server: ObjectStoreServer) -> str:
    """The setting."""
    return f"trainer.mirror=s3://{server.bucket}/runs"


def test_a_rank_imports_nothing_of_the_store() -> None:
    """obstore is an extra, and its threads would break forked loaders."""
    program = "import sys, echelon.train.worker; sys.exit('obstore' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


def require_no_secret(folder: Path) -> None:
    """In no file of the run, and in nothing that was printed."""
    for file in folder.rglob("*"):
        if file.is_file() and not file.is_symlink():
            assert SECRET_KEY.encode() not in file.read_bytes(), file


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_a_lost_machine_goes_on_elsewhere_bit_for_bit(
    world_size: int, server: ObjectStoreServer, mirror: str, tmp_path: Path
) -> None:
    """On as many processes as here: the random numbers of every rank come back too."""
    env = server.environment
    stop = {"ECHELON_TEST_FAULT": "0:6:TERM"}
    here = train_world(tmp_path / "here", 2, *SHORT, mirror, env=env | stop)
    assert here.codes == [75, 75], here.said
    assert f"mirror    s3://{server.bucket}/runs/a at step 7" in here.said
    local = tmp_path / "local"
    shutil.copytree(tmp_path / "here" / "a", local / "a", symlinks=True)
    beside = train_world(local, world_size, *SHORT)
    there = train_world(tmp_path / "there", world_size, *SHORT, mirror, env=env)
    assert there.codes == [0] * world_size, there.said
    assert f"fetched the snapshot of step 7 from s3://{server.bucket}/runs/a" in there.said
    assert "resuming run a after step 7" in there.said
    assert differing(state_at(there.run, STEPS), state_at(beside.run, STEPS)) == []
    best, other = find_best(there.run.snapshots_folder), find_best(beside.run.snapshots_folder)
    assert best is not None
    assert other is not None
    assert verify_snapshot(best).info == verify_snapshot(other).info
    assert json.loads(there.run.status_file.read_text())["mirror"]["step"] == STEPS
    assert (
        f"s3://{server.bucket}/runs/a at step 12"
        in verb(there.run.folder, "show", str(there.run.folder)).output
    )
    require_no_secret(tmp_path)


def test_shards_of_all_ranks_are_mirrored(
    server: ObjectStoreServer, mirror: str, tmp_path: Path
) -> None:
    words = ("trainer.steps=4", "trainer.save.steps=2", "replica.kind=fsdp")
    here = train_world(tmp_path / "here", 2, *words, mirror, env=server.environment)
    assert here.codes == [0, 0], here.said
    assert "runs/a/step-000000004/model.00001-of-00002.pt" in server.list_keys()
    shutil.copytree(tmp_path / "here" / "a", tmp_path / "local" / "a", symlinks=True)
    longer = (*words, "trainer.steps=6")
    beside = train_world(tmp_path / "local", 3, *longer)
    there = train_world(tmp_path / "there", 3, *longer, mirror, env=server.environment)
    assert there.codes == [0] * 3, there.said
    assert "resuming run a after step 4" in there.said
    assert differing(state_at(there.run, 6), state_at(beside.run, 6)) == []


def test_a_loop_of_ones_own_is_mirrored(
    server: ObjectStoreServer, mirror: str, tmp_path: Path
) -> None:
    words = ("trainer.steps=6", "trainer.save.steps=2", mirror)
    here = train_world(
        tmp_path / "here", 1, *words, experiment=session_loops.regression, env=server.environment
    )
    assert here.codes == [0], here.said
    there = train_world(
        tmp_path / "there",
        2,
        *words,
        "trainer.steps=8",
        experiment=session_loops.regression,
        env=server.environment,
    )
    assert there.codes == [0, 0], there.said
    assert "resuming run a after step 6" in there.said
    assert f"mirror    s3://{server.bucket}/runs/a at step 8" in there.said


def test_another_run_begins_from_a_mirror(
    server: ObjectStoreServer, mirror: str, tmp_path: Path
) -> None:
    env = server.environment
    train_world(tmp_path, 1, *SHORT, mirror, env=env)
    best = (server.get("runs/a/best") or b"").decode().strip()
    given = f"trainer.resume=s3://{server.bucket}/runs/a"
    for where, step in (("", STEPS), ("/best", int(best[5:]))):
        words = (*SHORT, f"{given}{where}", "trainer.epochs=4")
        begun = train_world(tmp_path, 2, *words, name=f"b{step}{where[1:]}", env=env)
        assert begun.codes == [0, 0], begun.said
        assert f"after step {step}" in begun.said
    missing = train_world(tmp_path, 1, *SHORT, f"{given}x", name="c", env=env)
    assert missing.codes == [3]
    assert f"there is no snapshot in s3://{server.bucket}/runs/ax" in missing.said


def test_mistakes_are_refused_before_the_first_step(
    server: ObjectStoreServer, mirror: str, tmp_path: Path
) -> None:
    env = server.environment
    for size in (1, 2):
        none = train_world(tmp_path, size, "trainer.mirror=s3://none/x", name=f"n{size}", env=env)
        assert none.codes == [2] * size, none.said
        assert "there is no such bucket" in none.said
        assert "Traceback" not in none.said
    server.decide = lambda method, path: 403
    denied = train_world(tmp_path, 1, mirror, name="denied", env=env)
    assert denied.codes == [2]
    assert "access denied" in denied.said
    server.decide = None
    train_world(tmp_path, 1, *SHORT, mirror, env=env)
    owner = server.get("runs/a/owner.json")
    other = train_world(tmp_path / "other", 1, *SHORT, mirror, "lr=0.5", env=env)
    assert other.codes == [2], other.said
    assert "lr=0.5, but run a was trained with" in other.said
    assert server.get("runs/a/owner.json") == owner  # nobody has lost it
    never = train_world(tmp_path, 1, *SHORT, mirror, "trainer.resume=never", env=env)
    assert never.codes == [2]
    assert "holds snapshots of another run of this name, up to step 12" in never.said
    require_no_secret(tmp_path)


def test_a_store_that_fails_in_a_training_ends_nothing(
    server: ObjectStoreServer, mirror: str, tmp_path: Path
) -> None:
    env = server.environment | {"ECHELON_STORE_RETRIES": "0"}
    noted, failed = tmp_path / "noted", set[tuple[str, str]]()

    def fail_from_the_first_manifest(method: str, path: str) -> int | None:
        if not failed and not (path.endswith("/manifest.json") and method == "PUT"):
            return None
        if (method, path) in failed:  # it is tried again, so the failure was noted
            noted.touch()
        failed.add((method, path))
        return 500

    server.decide = fail_from_the_first_manifest
    # The training is not over before that.
    wait = {"ECHELON_TEST_FAULT": "0:3:go", "ECHELON_TEST_AFTER": str(noted)}
    trained = train_world(tmp_path, 2, *SHORT, mirror, env=env | wait)
    assert trained.codes == [0, 0], trained.said
    assert trained.said.count(f"is not mirrored to s3://{server.bucket}/runs/a yet") == 1
    assert f"warning: step 12 is not in the mirror s3://{server.bucket}/runs/a: " in trained.said
    assert "the store answered 500" in trained.said
    shown = verb(tmp_path, "show", str(trained.run.folder)).output
    assert "newer ones are not: " in shown
    # Without the store the run goes on from what is here, and says so.
    again = train_world(tmp_path, 1, *SHORT, mirror, "trainer.epochs=4", env=env)
    assert again.codes == [0]
    assert "does not answer" in again.said
    fresh = train_world(tmp_path / "fresh", 1, *SHORT, mirror, env=env)
    assert fresh.codes == [1]
    assert "whether it holds snapshots of a is not known" in fresh.said


def test_what_a_failed_training_has_saved_is_mirrored(
    server: ObjectStoreServer, mirror: str, tmp_path: Path
) -> None:
    words = ("lr=1e9", "trainer.epochs=9", "trainer.save.steps=1", mirror)
    failed = train_world(tmp_path, 2, *words, env=server.environment)
    assert failed.codes == [1, 1], failed.said
    assert "not finite" in failed.said or "is inf" in failed.said or "is nan" in failed.said
    newest = max(snapshot_steps(failed.run))
    assert f"runs/a/step-{newest:09d}/manifest.json" in server.list_keys()


def test_killed_at_any_moment_of_an_upload(
    server: ObjectStoreServer, mirror: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A training is killed again and again, and with it the process of its uploads. What it leaves
    is always a whole snapshot, at least as new as the last one that was seen there."""
    for name, value in server.environment.items():
        monkeypatch.setenv(name, value)
    rng, url, seen = random.Random(5), f"s3://{server.bucket}/runs/k", 0
    program = [sys.executable, str(HELPERS / "mirrored_saves.py"), str(tmp_path / "here"), url]
    for kill in range(KILLS):
        if kill % 5 == 4:  # the machine is lost
            shutil.rmtree(tmp_path / "here")
        (tmp_path / "here").mkdir(exist_ok=True)
        wanted = len(server.list_paths("PUT")) + rng.randint(2, 12)
        with started_forked(program, tmp_path, **server.environment) as running:
            wait_until(lambda w=wanted: len(server.list_paths("PUT")) >= w, "uploads")  # type: ignore[misc]
            time.sleep(rng.uniform(0, 0.01))
            running.process.kill()
            output = running.wait().out
        seen = max([seen, *map(int, output.split())])
        objects = open_objects(url)
        there = tmp_path / f"there-{kill}"
        names = objects.list_snapshots()
        warnings: list[str] = []
        fetched = fetch_first_valid(objects, url, reversed(names), there, warnings)
        assert warnings == []
        if fetched is None:
            assert seen == 0
            continue
        snapshot = verify_snapshot(there / fetched)
        assert snapshot.step >= seen
        steps = {s for part in snapshot.parts for s in steps_in(snapshot.load_part(part))}
        assert steps == {snapshot.step}
    assert seen > 0
