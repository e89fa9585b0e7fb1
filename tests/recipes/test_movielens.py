"""MovieLens from a folder to recommendations, on a made-up set in the format of the real one."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
from worlds import Trained, metrics, train_config, train_world, verb

from echelon.config.compose import compose

KINDS = ("movielens", "movielens_dot", "movielens_ranking")
USERS, ITEMS = 30, 40


def write_made_up_ratings(folder: Path, seed: int = 0) -> Path:
    """Users 2, 4, …, 60 and movies 3, 6, …; the first half of the users likes the odd ones."""
    draw = random.Random(seed)
    folder.mkdir(parents=True, exist_ok=True)
    rows = ["userId,movieId,rating,timestamp"]
    for user in range(USERS):
        for item in draw.sample(range(ITEMS), draw.randint(5, 20)):
            likes = (item % 2 == 1) == (user < USERS // 2)
            rating = draw.choice((4.0, 4.5, 5.0) if likes else (1.0, 1.5, 2.0))
            rows.append(f"{2 * user + 2},{3 * item + 3},{rating},{draw.randint(0, 9**8)}")
    (folder / "ratings.csv").write_text("\n".join(rows) + "\n")
    movies = [f'{3 * i + 3},"Film {i}, The ({1950 + i})",Drama|Comedy' for i in range(ITEMS)]
    (folder / "movies.csv").write_text("\n".join(["movieId,title,genres", *movies]) + "\n")
    return folder


def train_movielens(folder: Path, kind: str, world_size: int = 1, *words: str) -> Trained:
    common = [
        f"experiment={kind}",
        f"data={write_made_up_ratings(folder / 'set')}",
        f"run.dir={folder}",
    ]
    quick = ["trainer.epochs=2", "trainer.batch_size=7", "trainer.log_steps=1", "launch.threads=1"]
    name = f"run.name={kind}-{world_size}"
    config = compose([*common, *quick, name, "track.progress=none", *words])
    return train_config(folder, world_size, config)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_the_same_result_to_rounding_at_any_world_size(tmp_path: Path, kind: str) -> None:
    results = {}
    for world_size in (1, 2, 4):
        ended = train_movielens(tmp_path, kind, world_size, "trainer.eval_batch_size=5")
        assert ended.codes == [0] * world_size, ended.said
        results[world_size] = metrics(ended.run)
    for world_size, lines in results.items():
        assert len(lines) == len(results[1])
        for line, alone in zip(lines, results[1], strict=True):
            assert line == pytest.approx(alone, rel=1e-4, abs=1e-6), f"at {world_size} processes"


@pytest.mark.slow
def test_a_taste_is_learned_and_recommended(tmp_path: Path) -> None:
    ended = train_movielens(tmp_path, "movielens", 1, "trainer.epochs=20", "shrink_vectors=1.0")
    assert ended.codes == [0], ended.said
    last = [line for line in metrics(ended.run) if "eval_rmse" in line][-1]
    assert last["eval_rmse"] < 1.0, "where a constant has 1.5"
    assert last["eval_mae"] < last["eval_rmse"]
    ended_command = verb(
        tmp_path, "recommend", str(ended.run.folder), "--user", "2", "-k", "5", "--json"
    )
    assert ended_command.code == 0, ended_command.output
    [recommendation] = json.loads(ended_command.output)
    assert recommendation["user"] == 2
    assert recommendation["known"]
    movies = [movie["movie"] // 3 - 1 for movie in recommendation["movies"]]
    assert [item % 2 for item in movies] == [1] * 5, "odd ones are what the user likes"
    rows = (tmp_path / "set" / "ratings.csv").read_text().splitlines()[1:]
    rated = {int(row.split(",")[1]) for row in rows if row.startswith("2,")}
    assert rated.isdisjoint(movie["movie"] for movie in recommendation["movies"])


@pytest.mark.slow
def test_recommend_with_every_model_and_its_faults(tmp_path: Path) -> None:
    for kind in KINDS:
        run = train_movielens(tmp_path, kind).run
        ended_command = verb(tmp_path, "recommend", str(run.folder), "--user", "60", "--user", "61")
        assert ended_command.code == 0, ended_command.output
        assert "user 61 is not in the data: what most people rated" in ended_command.output
        lines = [line.split("\t") for line in ended_command.output.splitlines() if "\t" in line]
        assert [(line[0], line[1]) for line in lines] == [
            (user, str(place)) for user in ("60", "61") for place in range(1, 11)
        ]
        assert all(line[4].startswith("Film ") for line in lines)

    other = train_world(tmp_path, 1, "trainer.epochs=1", name="other").run
    ended_command = verb(tmp_path, "recommend", str(other.folder), "--user", "2")
    assert (
        ended_command.code,
        "which is not an experiment on MovieLens" in ended_command.output,
    ) == (2, True), ended_command.output

    write_made_up_ratings(tmp_path / "set", seed=1)
    ended_command = verb(tmp_path, "recommend", str(run.folder), "--user", "2")
    assert (ended_command.code, "are not those that run" in ended_command.output) == (2, True), (
        ended_command.output
    )

    (tmp_path / "set" / "ratings.csv").unlink()
    ended_command = verb(tmp_path, "recommend", str(run.folder), "--user", "2")
    assert (ended_command.code, "no ratings in" in ended_command.output) == (3, True), (
        ended_command.output
    )
    assert "call this from the folder" in ended_command.output

    for folder in run.snapshots_folder.glob("step-*"):
        (folder / "manifest.json").unlink()
    ended_command = verb(tmp_path, "recommend", str(run.folder), "--user", "2")
    assert (ended_command.code, "no snapshot to recommend from" in ended_command.output) == (
        3,
        True,
    ), ended_command.output


@pytest.mark.slow
def test_faults_of_the_settings_are_reported(tmp_path: Path) -> None:
    for words, sentence in (
        (["data=nowhere"], "there is no folder nowhere"),
        (["split=tme"], "did you mean 'time'?"),
        (["dim=0"], "dim=0: it must be larger than zero"),
        (["held_out=1.5"], "1.5 of the ratings is to be held out"),
    ):
        ended = train_movielens(tmp_path, "movielens", 1, *words)
        assert ended.codes != [0]
        assert sentence in ended.said
        assert "Traceback" not in ended.said
