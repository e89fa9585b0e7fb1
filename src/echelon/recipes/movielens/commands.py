"""MovieLens: its data, and what a user might like."""

from __future__ import annotations

from pathlib import Path

from echelon.commands.arguments import add_dir_argument, make_parser, parse_positive_int


def data(words: list[str]) -> int:
    parser = make_parser(
        "data",
        "Get a data set: download it, or take it from a file; check it, unpack it and prepare it.",
        "A broken download goes on where it stopped when the same is typed again. A mirror's\n"
        "address is given by ECHELON_MOVIELENS_URL "
        "(default: https://files.grouplens.org/datasets/movielens).",
    )
    parser.add_argument("name", choices=["movielens"])
    parser.add_argument(
        "--size",
        choices=["latest-small", "100k", "1m", "25m", "32m"],
        help="which of GroupLens' sets (default: latest-small, or what the file holds)",
    )
    parser.add_argument("--from", dest="given", metavar="FILE", help="a zip or folder, no internet")
    parser.add_argument("--to", default="data", metavar="DIR", help="(default: data)")
    parser.add_argument("--json", action="store_true", help="say where it is as JSON")
    given = parser.parse_args(words)
    from echelon.recipes.movielens.data.data_command import get_data

    return get_data(given.size, given.given, Path(given.to), given.json)


def recommend(words: list[str]) -> int:
    parser = make_parser(
        "recommend",
        "Say what users of MovieLens might like, by a run's best snapshot: movies that they have "
        "not rated, the best first.",
        "The score is the expected rating, not clipped to the scale; of\n"
        "experiment=movielens_ranking, a logarithm of how likely a movie is next.\n"
        "Piped: user, place, score, movie id and title between tabs.",
    )
    parser.add_argument("run", help="a name, a folder, or `latest`")
    parser.add_argument(
        "--user",
        type=int,
        action="append",
        required=True,
        metavar="ID",
        help="MovieLens' number of a user; may be repeated",
    )
    parser.add_argument("-k", type=parse_positive_int, default=10, help="how many (default: 10)")
    parser.add_argument("--json", action="store_true")
    add_dir_argument(parser)
    given = parser.parse_args(words)
    from echelon.recipes.movielens.recommend import print_recommendations
    from echelon.runs.run_folder import find_run

    return print_recommendations(find_run(given.run, given.dir), given.user, given.k, given.json)
