"""From files of ratings to arrays: the three formats, the cache, and what is said of bad files."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from echelon.errors import EchelonError
from echelon.recipes.movielens.data import Ratings, load_ratings
from echelon.recipes.movielens.data.synthetic import make_synthetic, write_csv

HEADER = "userId,movieId,rating,timestamp\n"
GOOD = "1,2,3.0,4\n"
COLUMNS = ("users", "items", "ratings", "times", "user_ids", "item_ids")


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "caches"))


def make_data_set(folder: Path, ratings: str | bytes, name: str = "ratings.csv") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    content = ratings.encode() if isinstance(ratings, str) else ratings
    (folder / name).write_bytes(content)
    return folder


def faults_of(folder: Path) -> list[str]:
    with pytest.raises(EchelonError) as caught:
        load_ratings(folder)
    return [fault.what for fault in caught.value.faults]


def rows(ratings: Ratings) -> list[tuple[int, int, float, int]]:
    users, items = ratings.user_ids[ratings.users], ratings.item_ids[ratings.items]
    columns = (users, items, ratings.ratings, ratings.times)
    return list(zip(*(column.tolist() for column in columns), strict=True))


# --- formats ------------------------------------------------------------------------------------


def test_csv_with_quotes_commas_and_other_line_ends(tmp_path: Path) -> None:
    folder = make_data_set(
        tmp_path / "a", HEADER.strip() + "\r\n7,30,4.0,100\r\n7,10,0.5,90\r\n2,10,5,1"
    )
    movies = 'movieId,title,genres\n10,"Postino, Il (1994)",Comedy|Drama\n99,Unrated,Drama\n'
    (folder / "movies.csv").write_text(movies + "30,Ünïcode,(no genres listed)\n")
    ratings = load_ratings(folder)
    assert rows(ratings) == [(7, 30, 4.0, 100), (7, 10, 0.5, 90), (2, 10, 5.0, 1)]
    assert ratings.users.tolist() == [1, 1, 0]
    assert ratings.items.tolist() == [1, 0, 0]
    assert (ratings.num_users, ratings.num_items) == (2, 2)
    assert ratings.get_titles() == ["Postino, Il (1994)", "Ünïcode"]
    assert ratings.get_genres() == [["Comedy", "Drama"], []]
    kinds = [getattr(ratings, name).dtype.name for name in COLUMNS]
    assert kinds == ["int32", "int32", "float32", "int64", "int64", "int64"]


def test_columns_in_another_order_with_a_mark_in_front_and_one_more(tmp_path: Path) -> None:
    text = "﻿timestamp,rating,comment,movieId,userId\n5,3.5,well,20,10\n"
    assert rows(load_ratings(make_data_set(tmp_path / "a", text))) == [(10, 20, 3.5, 5)]


def test_the_format_with_double_colons(tmp_path: Path) -> None:
    folder = make_data_set(
        tmp_path / "ml-1m", "1::1193::5::978300760\n2::661::3::978302109\n", "ratings.dat"
    )
    movies = "661::Café:: the Movie (1996)::Animation|Children's\n"
    (folder / "movies.dat").write_bytes(movies.encode("latin-1"))
    ratings = load_ratings(folder)
    assert rows(ratings) == [(1, 1193, 5.0, 978300760), (2, 661, 3.0, 978302109)]
    assert ratings.get_titles() == ["Café:: the Movie (1996)", "movie 1193"]
    assert ratings.get_genres() == [["Animation", "Children's"], []]


def test_the_format_of_100k(tmp_path: Path) -> None:
    folder = make_data_set(
        tmp_path / "ml-100k", "196\t242\t3\t881250949\n186\t302\t3\t891717742\n", "u.data"
    )
    (folder / "u.genre").write_text("unknown|0\nAction|1\nComedy|2\n\n")
    item = "242|Kolyá (1996)|24-Jan-1997||http://x/M/title-exact?Kolya|0|1|1\n"
    (folder / "u.item").write_bytes(item.encode("latin-1"))
    ratings = load_ratings(folder)
    assert rows(ratings) == [(196, 242, 3.0, 881250949), (186, 302, 3.0, 891717742)]
    assert ratings.get_titles() == ["Kolyá (1996)", "movie 302"]
    assert ratings.get_genres() == [["Action", "Comedy"], []]


def test_many_blocks_round_trip(tmp_path: Path) -> None:
    made = make_synthetic(100_000, 2_000, 1_500, seed=1)
    read = load_ratings(write_csv(made, tmp_path / "made"))
    for name in COLUMNS:
        np.testing.assert_array_equal(getattr(read, name), getattr(made, name))
    assert isinstance(read.users, np.memmap)
    assert read.get_titles()[0] == f"Movie {made.item_ids[0]}, The (1999)"


def test_synthetic_ratings_are_skewed_seeded_and_distinct() -> None:
    made, again = (make_synthetic(50_000, 3_000, 2_000, seed=3) for _ in range(2))
    np.testing.assert_array_equal(made.items, again.items)
    assert len(set(zip(made.users.tolist(), made.items.tolist(), strict=True))) == 50_000
    popular = np.sort(np.bincount(made.items))[::-1]
    assert popular[: len(popular) // 10].sum() > 0.5 * 50_000
    assert set(np.unique(made.ratings)) == {n / 2 for n in range(1, 11)}


@pytest.mark.parametrize("ordered", [True, False])
def test_the_newest_of_repeated_ratings_is_kept(
    tmp_path: Path, ordered: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = ["1,5,1.0,30", "1,5,2.0,40", "1,5,3.0,20", "1,6,4.0,1", "2,5,2.5,7", "2,5,3.5,7"]
    lines = lines if ordered else [*lines[3:], *lines[:3]]
    folder = make_data_set(tmp_path / "a", HEADER + "\n".join(lines))
    assert sorted(rows(load_ratings(folder))) == [(1, 5, 2.0, 40), (1, 6, 4.0, 1), (2, 5, 3.5, 7)]
    printed = capsys.readouterr().err
    assert f"warning: {folder}/ratings.csv rates 3 times a movie that the same user" in printed


# --- the cache ----------------------------------------------------------------------------------


def test_a_second_load_uses_the_cache(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = make_data_set(tmp_path / "a", HEADER + "1,2,3,4\n")
    first = load_ratings(folder)
    assert "prepared" in capsys.readouterr().err
    kept = (folder / "ratings.csv").stat()
    (folder / "ratings.csv").chmod(0o000)  # a new ctime, so it is looked at again …
    (folder / "ratings.csv").chmod(kept.st_mode)
    assert load_ratings(folder).fingerprint == first.fingerprint
    assert capsys.readouterr().err == "", "… and found the same"
    code = (
        "import sys; from echelon.recipes.movielens.data import load_ratings;"
        "load_ratings(sys.argv[1]);"
        "assert not {'torch', 'pyarrow', 'polars', 'pandas'} & sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", code, folder], check=True, timeout=300)


def test_a_touched_file_keeps_the_cache_and_a_changed_one_does_not(tmp_path: Path) -> None:
    folder = make_data_set(tmp_path / "a", HEADER + "1,2,3,4\n")
    first = load_ratings(folder)
    os.utime(folder / "ratings.csv", (1, 1))
    touched = load_ratings(folder)
    assert touched.fingerprint == first.fingerprint
    assert (
        json.loads((folder / ".echelon/sources.json").read_text())["file_stats"]["ratings.csv"][1]
        == 10**9
    )
    make_data_set(folder, HEADER + "1,2,5,4\n")
    os.utime(folder / "ratings.csv", (1, 1))  # the same size and time as before
    changed = load_ratings(folder)
    assert changed.fingerprint != first.fingerprint
    assert changed.ratings.tolist() == [5.0]
    assert first.ratings.tolist() == [3.0], "what was mapped before stands"
    (folder / "movies.csv").write_text("movieId,title,genres\n2,Two,Drama\n")
    assert load_ratings(folder).get_titles() == ["Two"]


@pytest.mark.parametrize("harm", ["cut", "gone", "manifest", "key"])
def test_a_damaged_cache_is_rebuilt(tmp_path: Path, harm: str) -> None:
    folder = make_data_set(tmp_path / "a", HEADER + "1,2,3,4\n")
    prepared = load_ratings(folder).prepared
    assert prepared
    if harm == "cut":
        (prepared / "times.npy").write_bytes((prepared / "times.npy").read_bytes()[:-3])
    elif harm == "gone":
        (prepared / "users.npy").unlink()
    elif harm == "manifest":
        (prepared / "prepared.json").write_text("{")
    else:
        (folder / ".echelon/sources.json").write_text("[]")
    assert rows(load_ratings(folder)) == [(1, 2, 3.0, 4)]
    assert not list((folder / ".echelon").glob("making-*"))


@contextlib.contextmanager
def nobody() -> Iterator[None]:
    """Root may write anywhere; what is tested is somebody else's lot."""
    # Whatever is imported on first use: Python itself may lie where nobody can read it.
    with tempfile.TemporaryDirectory() as rehearsal:
        load_ratings(make_data_set(Path(rehearsal), HEADER + GOOD))
    me = os.geteuid()
    if me == 0:
        os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(me)


@pytest.fixture
def shared() -> Iterator[Path]:
    """A folder that others may look into."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        yield Path(folder)
        for path in Path(folder).rglob("*"):
            path.chmod(0o755)


def test_a_read_only_folder_uses_the_users_cache(
    shared: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_data_set(shared / "a", HEADER + GOOD)
    (shared / "caches").mkdir()
    (shared / "caches").chmod(0o777)
    folder.chmod(0o555)
    monkeypatch.setenv("XDG_CACHE_HOME", str(shared / "caches"))
    with nobody():
        first, again = load_ratings(folder), load_ratings(folder)
        assert first.prepared == again.prepared
        assert first.prepared
        assert first.prepared.is_relative_to(shared / "caches")
        assert rows(again) == [(1, 2, 3.0, 4)]
        monkeypatch.setenv("XDG_CACHE_HOME", str(folder))
        [what] = faults_of(folder)
    assert what.startswith(f"the prepared form of {folder} cannot be written: {folder}/.echelon: ")
    assert what.count("permission denied") == 2


def test_a_user_without_a_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)  # as where nobody is known
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert rows(load_ratings(make_data_set(tmp_path / "a", HEADER + GOOD))) == [(1, 2, 3.0, 4)]


def test_a_cache_in_a_read_only_folder_is_used(shared: Path) -> None:
    folder = make_data_set(shared / "a", HEADER + GOOD)
    first = load_ratings(folder)
    os.utime(folder / "ratings.csv", (1, 1))
    (folder / ".echelon").chmod(0o555)
    folder.chmod(0o555)
    with nobody():
        assert load_ratings(folder).prepared == first.prepared


def test_an_unreadable_file(shared: Path) -> None:
    folder = make_data_set(shared / "a", HEADER + GOOD)
    (folder / "ratings.csv").chmod(0o000)
    folder.chmod(0o777)
    with nobody():
        assert faults_of(folder) == [f"{folder}/ratings.csv cannot be read: permission denied"]


_LOAD = (
    "import sys; from echelon.recipes.movielens.data import load_ratings;"
    "print(len(load_ratings(sys.argv[1]).users))"
)


@pytest.mark.slow
def test_concurrent_processes_prepare_once(tmp_path: Path) -> None:
    folder = write_csv(make_synthetic(50_000, 1_000, 500, seed=0), tmp_path / "made")
    started = [
        subprocess.Popen(
            [sys.executable, "-c", _LOAD, folder],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for _ in range(3)
    ]
    printed = [process.communicate(timeout=300) for process in started]
    assert [out.strip() for out, _ in printed] == ["50000"] * 3
    assert sum("prepared" in err for _, err in printed) == 1


# --- what is wrong with a file ------------------------------------------------------------------

GOOD = "1,2,3.0,4\n"


@pytest.mark.parametrize(
    ("lines", "wrong"),
    [
        (GOOD + "1,3,four,5\n", "line 3: rating is 'four', not a number"),
        (GOOD + "\n1,3,NaN,5\n", "line 4: rating is 'NaN', not a number"),
        ("1,3,inf,5\n", "line 2: rating is 'inf', not a number"),
        ("1,3,,5\n", "line 2: no rating"),
        (",3,1.0,5\n", "line 2: no userId"),
        ("-1,3,1.0,5\n", "line 2: userId is -1; ids reach from 0 to 268,435,455"),
        ("1,3000000000,1.0,5\n", "line 2: movieId is 3000000000; ids reach from 0 to 268,435,455"),
        ("1,300000000,1.0,5\n", "line 2: movieId is 300000000; ids reach from 0 to 268,435,455"),
        ("1.5,3,1.0,5\n", "line 2: userId is '1.5', not a whole number"),
        ("1,3,1.0,yesterday\n", "line 2: timestamp is 'yesterday', not a whole number"),
        (GOOD + "1,3,1e300,5\n", "line 3: rating is 1e300, too large"),
        (GOOD + f"1,3,1,{'9' * 20}\n", f"line 3: timestamp is {'9' * 20}, too large"),
        (GOOD + "0x1,3,1.0,5\n", "line 3: userId is '0x1', not a whole number"),
        (GOOD + "1,3\n", "line 3: 2 values where 4 belong: '1,3'"),
        (GOOD + "1,3,1.0,5,6\n", "line 3: 5 values where 4 belong: '1,3,1.0,5,6'"),
    ],
)
def test_a_wrong_line_is_reported(tmp_path: Path, lines: str, wrong: str) -> None:
    folder = make_data_set(tmp_path / "a", HEADER + lines)
    assert faults_of(folder) == [f"{folder}/ratings.csv, {wrong}"]
    assert not list((folder / ".echelon").glob("making-*"))


def test_wrong_lines_far_down_are_reported_together(tmp_path: Path) -> None:
    many = "".join(f"{i},7,3.5,1000000\n" for i in range(60_000))
    text = HEADER + many + "1,8,x,1\n" + many + "1,9,1.0,y\n"
    wrong = faults_of(make_data_set(tmp_path / "a", text))
    assert [what.partition("ratings.csv, ")[2] for what in wrong] == [
        "line 60002: rating is 'x', not a number",
        "line 120003: timestamp is 'y', not a whole number",
    ]


def test_the_first_five_of_many_wrong_lines_are_reported(tmp_path: Path) -> None:
    assert len(faults_of(make_data_set(tmp_path / "a", HEADER + "a,b,c,d\n" * 50))) == 5


@pytest.mark.parametrize(
    ("content", "wrong"),
    [
        ("", "ratings.csv is empty"),
        (HEADER, "ratings.csv has no ratings: it ends after its header"),
        (
            "userId,movieId,stars\n1,2,3\n",
            "ratings.csv has no column rating, timestamp: its first line names userId, movieId, "
            "stars",
        ),
        (HEADER.encode() + b"1,2,3\xe9,4\n", "ratings.csv, line 2: byte 0xe9 is not UTF-8"),
        (HEADER.encode("utf-16"), "ratings.csv, line 1 is not UTF-8"),
    ],
)
def test_a_file_without_ratings(tmp_path: Path, content: str | bytes, wrong: str) -> None:
    folder = make_data_set(tmp_path / "a", content)
    assert faults_of(folder) == [f"{folder}/{wrong}"]


@pytest.mark.parametrize(
    ("name", "content"), [("ratings.dat", "1::2::x::4\n"), ("u.data", "1\t2\tx\t4\n")]
)
def test_wrong_lines_of_older_formats(tmp_path: Path, name: str, content: str) -> None:
    folder = make_data_set(tmp_path / "a", content, name)
    assert faults_of(folder) == [f"{folder}/{name}, line 1: rating is 'x', not a number"]


@pytest.mark.parametrize(
    ("content", "wrong"),
    [
        (
            b"movieId,title,genres\n2,Two,Drama\nthree,Three,Drama\n",
            "movies.csv, line 3 is not a movie",
        ),
        (b"movieId,title,genres\n2,Two\n", "movies.csv, line 2 is not a movie"),
        (b"movieId,title,genres\n2,Caf\xe9,Drama\n", "movies.csv is not UTF-8"),
    ],
)
def test_a_wrong_line_of_movies(tmp_path: Path, content: bytes, wrong: str) -> None:
    folder = make_data_set(tmp_path / "a", HEADER + GOOD)
    (folder / "movies.csv").write_bytes(content)
    [what] = faults_of(folder)
    assert what.startswith(f"{folder}/{wrong}")


def test_a_folder_without_ratings_is_reported(tmp_path: Path) -> None:
    make_data_set(tmp_path / "data" / "ml-1m", "1::2::3::4\n", "ratings.dat")
    with pytest.raises(EchelonError) as caught:
        load_ratings(tmp_path / "data")
    [fault] = caught.value.faults
    assert (
        fault.what == f"no ratings in {tmp_path}/data: looked for ratings.csv, ratings.dat, u.data"
    )
    assert fault.do == f"did you mean {tmp_path}/data/ml-1m?"
    assert faults_of(tmp_path / "none") == [f"there is no folder {tmp_path}/none"]
