"""Borders of documents in token files: found once, by the token at their end or beginning."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from echelon.data.formats import document_index, index_worker
from echelon.data.formats.document_index import find_documents
from echelon.data.formats.index_file import load_index
from echelon.errors import EchelonError


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tokens")


@given(st.lists(st.integers(0, 3), min_size=1).filter(lambda tokens: 0 in tokens), st.booleans())
def test_documents_are_what_lies_between_borders(
    folder: Path, tokens: list[int], is_last: bool
) -> None:
    file = folder / "a.bin"
    np.array(tokens, np.uint32).tofile(file)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(document_index, "_BLOCK_TOKENS", 3)
        found = find_documents(file, "uint32", 0, is_last)
    expected: list[list[int]] = [[]]
    for token in tokens:
        if token == 0 and not is_last:
            expected.append([])
        expected[-1].append(token)
        if token == 0 and is_last:
            expected.append([])
    expected = [document for document in expected if document]
    pairs = zip((found.offsets // 4).tolist(), (found.spans // 4).tolist(), strict=True)
    assert [tokens[first : first + count] for first, count in pairs] == expected
    assert found.notes == {"begins": tokens[0] == 0, "ends": tokens[-1] == 0}


def test_each_way_to_read_a_file_has_an_index_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Built in other processes, which are given how."""
    monkeypatch.setattr(index_worker, "_BYTES_PER_PROCESS", 1)
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {0, 1})
    files = [tmp_path / "a.bin", tmp_path / "b.bin"]
    for file in files:
        np.array([5, 7, 5, 6, 7], np.uint16).tofile(file)
    for token, starts in ((7, [0, 2]), (5, [0, 1, 3])):
        build = partial(find_documents, dtype="uint16", token=token, is_last=True)
        index = load_index(files, f"documents-1/uint16-eos{token}", build)
        assert (index.map_offsets(1) // 2).tolist() == starts
    names = sorted(path.name for path in (tmp_path / ".echelon").glob("*.index"))
    assert names == [f"{name}.bin.uint16-eos{token}.index" for name in "ab" for token in (5, 7)]


def test_a_file_without_the_token_is_refused(tmp_path: Path) -> None:
    np.array([5, 7, 5], np.uint16).tofile(tmp_path / "a.bin")
    with pytest.raises(EchelonError) as caught:
        find_documents(tmp_path / "a.bin", "uint16", 50256, True)
    [fault] = caught.value.faults
    assert fault.what == (
        f"{tmp_path}/a.bin has no token 50256 among 3, so its documents have no border"
    )
    assert "give the eos_token_id and the dtype" in fault.do
