"""Training from an object store: the same numbers as from the same files on a disk, every byte
fetched once, and a store that fails is said and loses nothing."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from file_experiment import from_files, write_training_files
from object_experiment import ROWS, from_rows, make_rows
from object_store_server import ACCESS_KEY, SECRET_KEY, ObjectStoreServer
from worlds import Trained, global_batches, losses, train_world

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("object_store")]


def train(
    folder: Path,
    world_size: int,
    path: str,
    store: ObjectStoreServer,
    *words: str,
    name: str,
    fault: str = "",
    rows: bool = True,
    cache: str = "cache",
    cache_gb: str = "",
) -> Trained:
    traces = folder / f"trace-{name}"
    traces.mkdir(exist_ok=True)
    env = {
        **store.environment,
        "ECHELON_TEST_TRACE": str(traces),
        "ECHELON_TEST_FAULT": fault,
        "ECHELON_CACHE": str(folder / cache),
        "ECHELON_DATA_CACHE_GB": cache_gb,
    }
    size, epochs = (12, 2) if rows else (5, 3)
    return train_world(
        folder,
        world_size,
        *(f"path={path}", f"trainer.batch_size={size}", f"trainer.epochs={epochs}", *words),
        name=name,
        experiment=from_rows if rows else from_files,
        env={key: value for key, value in env.items() if value},
        end_together=bool(fault),
    )


def require_no_secrets(folder: Path) -> None:
    """Neither outputs nor anything in the folders of runs have the credentials."""
    for file in folder.rglob("*"):
        if file.is_file():
            content = file.read_bytes()
            assert ACCESS_KEY.encode() not in content, file
            assert SECRET_KEY.encode() not in content, file


@pytest.mark.parametrize("kind", ["parquet", "jsonl"])
def test_objects_give_the_numbers_of_files_at_any_world_size_and_after_kills(
    object_store: ObjectStoreServer, tmp_path: Path, kind: str
) -> None:
    write_training_files(tmp_path / "data")
    for file in (tmp_path / "data" / kind).iterdir():
        object_store.put(f"{kind}/{file.name}", file.read_bytes())
    url = f"s3://{object_store.bucket}/{kind}"
    words = ("trainer.save.steps=1",)
    local = str(tmp_path / "data" / kind)
    whole = train(tmp_path, 1, local, object_store, *words, name="whole", rows=False)
    assert set(whole.codes) == {0}, whole.said
    batches = global_batches(tmp_path / "trace-whole")
    killed = train(
        tmp_path, 2, url, object_store, *words, name="killed", rows=False, fault="0:6:KILL"
    )
    assert killed.codes[0] == -signal.SIGKILL, killed.said
    assert global_batches(tmp_path / "trace-killed")[:6] == batches[:6]
    workers = "trainer.loader_workers=1"
    resumed = train(tmp_path, 1, url, object_store, *words, workers, name="killed", rows=False)
    assert set(resumed.codes) == {0}, resumed.said
    assert losses(resumed.run) == pytest.approx(losses(whole.run), rel=1e-5)
    require_no_secrets(tmp_path)


@pytest.mark.parametrize("cache_gb", ["", "0.034"])
def test_every_byte_is_fetched_once_per_node_and_epoch(
    object_store: ObjectStoreServer, tmp_path: Path, cache_gb: str
) -> None:
    """Two ranks with a loader process each, in windows of two blocks. All of the data is fetched
    once, or once in an epoch where the cache is smaller than the data."""
    data = make_rows()
    url = object_store.put("rows.npy", data)
    (tmp_path / "rows.npy").write_bytes(data)
    local = train(tmp_path, 1, str(tmp_path / "rows.npy"), object_store, name="local")
    assert set(local.codes) == {0}, local.said
    object_store.reset_counts()
    workers = "trainer.loader_workers=1"
    trained = train(tmp_path, 2, url, object_store, workers, name="remote", cache_gb=cache_gb)
    assert set(trained.codes) == {0}, trained.said
    assert losses(trained.run) == pytest.approx(losses(local.run), rel=1e-5)
    batches = global_batches(tmp_path / "trace-remote")
    assert batches == global_batches(tmp_path / "trace-local")
    half = len(batches) // 2
    for epoch in (batches[:half], batches[half:]):
        assert sorted(row for batch in epoch for row in batch) == list(range(ROWS))
    epochs = 2 if cache_gb else 1
    assert len(data) <= object_store.bytes_sent <= 1.05 * len(data) * epochs
    require_no_secrets(tmp_path)


def test_a_store_that_fails_ends_the_training_with_a_sentence_and_it_resumes(
    object_store: ObjectStoreServer, tmp_path: Path
) -> None:
    url = object_store.put("rows.npy", make_rows())
    words = ("trainer.save.steps=5", "trainer.loader_workers=1")
    whole = train(tmp_path, 1, url, object_store, *words, name="whole")
    assert set(whole.codes) == {0}, whole.said
    object_store.reset_counts()
    object_store.answer, object_store.answer_after = 403, 8
    failed = train(tmp_path, 1, url, object_store, *words, name="failed", cache="new")
    assert failed.codes[0] not in (0, -signal.SIGKILL), failed.said
    assert f"{url} cannot be read: the store answered 403" in failed.said
    assert "hint: " in failed.said
    assert "Traceback" not in failed.said
    object_store.answer = None
    resumed = train(tmp_path, 1, url, object_store, *words, name="failed", cache="new")
    assert set(resumed.codes) == {0}, resumed.said
    assert losses(resumed.run) == losses(whole.run)
    require_no_secrets(tmp_path)
