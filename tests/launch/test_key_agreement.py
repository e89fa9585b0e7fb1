"""How nodes come to the same key through a file, and which files they do not believe."""

from __future__ import annotations

import json
import os
import stat
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist
from command_runner import free_port
from other_users import give_away

from echelon.errors import EchelonError, ExitCode
from echelon.launch.node import key_agreement
from echelon.launch.node.key_agreement import LIFELINE_KEY, agree_on_key, read_lifeline_port
from echelon.launch.plan import NodeSpec
from echelon.runs.process_record import identify_process, identify_this_process
from echelon.world.network_key import make_key
from echelon.world.sealed_store import SealedStore


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> SealedStore:
    """The store of a start, at whose lifeline nobody answers."""
    monkeypatch.setattr(key_agreement, "_KNOCK_LIMIT_S", 0.1)
    raw = dist.TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=60), False)
    store = SealedStore(raw, None)
    store.set(LIFELINE_KEY, str(free_port()))
    return store


def make_node(store: SealedStore, rank: int, count: int = 2) -> NodeSpec:
    return NodeSpec(rank, count, 1, "127.0.0.1", store.port)


def list_key_files(folder: Path) -> list[Path]:
    return sorted(folder.glob(".key-*"))


def test_nodes_share_a_key_by_a_file_that_only_this_user_can_read(
    store: SealedStore, tmp_path: Path
) -> None:
    runs = tmp_path / "runs"
    first = agree_on_key(store, make_node(store, 0), {}, runs)
    second = agree_on_key(store, make_node(store, 1), {}, runs)
    assert first == second
    assert len(first.key) == 64
    (file,) = list_key_files(runs)
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert all(
        first.key.encode() not in store.get(name) for name in store.torch_store.list_keys()
    ), "the store is open to everybody"
    first.remove_file()
    second.remove_file()
    assert list_key_files(runs) == []


def test_no_file_where_it_is_not_needed(store: SealedStore, tmp_path: Path) -> None:
    assert agree_on_key(store, make_node(store, 0, 1), {}, tmp_path).file is None
    env = {"ECHELON_KEY": make_key()}
    for rank in range(2):
        agreed = agree_on_key(store, make_node(store, rank), env, tmp_path)
        assert agreed == (env["ECHELON_KEY"], None)
    with pytest.raises(EchelonError, match=r"is set on node 0, but not on .* \(node 1\)") as raised:
        agree_on_key(store, make_node(store, 1), {}, tmp_path)
    assert raised.value.exit == ExitCode.RENDEZVOUS
    assert list_key_files(tmp_path) == []


def test_a_file_of_an_earlier_start_is_never_taken(store: SealedStore, tmp_path: Path) -> None:
    """The one whose node 0 is dead is removed; those of other starts and machines stay."""
    others = {
        "a" * 32: {"host": "elsewhere", "pid": 1, "born": 1},
        "b" * 32: identify_this_process(),
        "c" * 32: {**identify_process(os.getpid()), "born": 1},
    }
    for start, process in others.items():
        file = tmp_path / f".key-{start}"
        file.touch(0o600)
        file.write_text(json.dumps({"key": "the key of an earlier start", "process": process}))
    first = agree_on_key(store, make_node(store, 0), {}, tmp_path)
    assert agree_on_key(store, make_node(store, 1), {}, tmp_path) == first
    left = {file.name for file in list_key_files(tmp_path)}
    assert first.file is not None
    assert left == {f".key-{'a' * 32}", f".key-{'b' * 32}", first.file.name}


@pytest.mark.parametrize("hint", ["", "../../etc/shadow", "A" * 32, "0" * 31 + "/", "x" * 5000])
def test_the_store_names_no_other_file(hint: str, store: SealedStore, tmp_path: Path) -> None:
    """Anybody can write into the store which file it is."""
    agree_on_key(store, make_node(store, 0), {}, tmp_path)
    store.set("start", hint)
    with pytest.raises(EchelonError, match="ECHELON_KEY"):
        agree_on_key(store, make_node(store, 1), {}, tmp_path)


def test_a_folder_that_is_not_shared_is_a_sentence(
    store: SealedStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(key_agreement, "_FILE_LIMIT_S", 0.2)
    agree_on_key(store, make_node(store, 0), {}, tmp_path / "here")
    with pytest.raises(EchelonError, match="finds no file with the job's key in") as raised:
        agree_on_key(store, make_node(store, 1), {}, tmp_path / "there")
    assert raised.value.exit == ExitCode.RENDEZVOUS
    assert "export ECHELON_KEY=$(openssl rand -hex 32)" in str(raised.value)


def spoil_by_mode(file: Path) -> None:
    file.chmod(0o644)


def spoil_by_link(file: Path) -> None:
    file.rename(file.with_name("kept"))
    file.symlink_to("kept")


def spoil_by_pipe(file: Path) -> None:
    file.unlink()
    os.mkfifo(file, 0o600)


@pytest.mark.parametrize(
    "spoil",
    [
        spoil_by_mode,
        spoil_by_link,
        spoil_by_pipe,
        pytest.param(give_away, marks=pytest.mark.skipif(os.geteuid() != 0, reason="root")),
    ],
)
def test_a_file_that_others_could_have_written_or_read_is_refused(
    spoil: object, store: SealedStore, tmp_path: Path
) -> None:
    tmp_path.chmod(0o755)
    agreed = agree_on_key(store, make_node(store, 0), {}, tmp_path)
    assert callable(spoil)
    spoil(agreed.file)
    with pytest.raises(EchelonError, match="set ECHELON_KEY") as raised:
        agree_on_key(store, make_node(store, 1), {}, tmp_path)
    assert agreed.key not in str(raised.value)


def test_a_folder_that_cannot_be_written_is_a_sentence(store: SealedStore, tmp_path: Path) -> None:
    (tmp_path / "runs").write_text("a file")
    with pytest.raises(EchelonError, match="the key of this job cannot be written"):
        agree_on_key(store, make_node(store, 0), {}, tmp_path / "runs")


@pytest.mark.parametrize("port", ["", "0", "-1", "99999", "x" * 1000])
def test_a_port_that_is_none_is_a_sentence(port: str, store: SealedStore) -> None:
    store.set(LIFELINE_KEY, port)
    with pytest.raises(EchelonError, match="who is not of this job"):
        read_lifeline_port(store, make_node(store, 1))
