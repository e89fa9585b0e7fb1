"""A `print` of a training never fails: on a full disk, or when nobody reads any more."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from command_runner import ECHELON, status

from echelon.utils.streams import TolerantStream, use_tolerant_streams


def test_a_full_disk_loses_lines_and_raises_nothing() -> None:
    with open("/dev/full", "w", encoding="utf-8") as full:
        stream = TolerantStream(full)
        for _ in range(10_000):
            assert stream.write("a line\n") == 7
        stream.flush()
        os.dup2(os.open(os.devnull, os.O_WRONLY), full.fileno())  # so that closing can flush


def test_what_a_full_disk_did_not_take_comes_when_it_has_room(tmp_path: Path) -> None:
    with open("/dev/full", "w", encoding="utf-8") as file:
        stream = TolerantStream(file)
        stream.write("first\n")
        stream.flush()
        room = os.open(tmp_path / "log", os.O_WRONLY | os.O_CREAT)
        os.dup2(room, file.fileno())
        stream.write("second\n")
        stream.flush()
    assert (tmp_path / "log").read_text() == "first\nsecond\n"


def test_a_reader_that_has_left(capfd: pytest.CaptureFixture[str]) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "w", encoding="utf-8") as pipe:
        stream = TolerantStream(pipe)
        for _ in range(3):
            stream.write("nobody reads this\n")
            stream.flush()
        assert os.readlink(f"/proc/self/fd/{writer}") == os.devnull


def test_the_streams_are_those_of_before_afterwards() -> None:
    before = sys.stdout, sys.stderr
    with use_tolerant_streams():
        assert isinstance(sys.stdout, TolerantStream)
        assert sys.stdout.encoding == before[0].encoding
    assert (sys.stdout, sys.stderr) == before


@pytest.mark.slow
@pytest.mark.parametrize("launch", [["launch=inline"], ["launch=local", "launch.procs=2"]])
def test_a_training_whose_screen_is_a_file_on_a_full_disk(
    launch: list[str], tmp_path: Path
) -> None:
    words = [*ECHELON, "train", "run.name=a", "trainer.steps=20", *launch]
    with open("/dev/full", "w", encoding="utf-8") as full:
        done = subprocess.run(words, cwd=tmp_path, stdout=full, stderr=full)
    assert done.returncode == 0
    assert status(tmp_path / "runs" / "a")["state"] == "finished"
