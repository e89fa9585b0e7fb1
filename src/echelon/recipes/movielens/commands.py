"""The commands of the recipe: `echelon data movielens` and `echelon recommend`."""

from __future__ import annotations

from pathlib import Path

from echelon.commands.arguments import add_dir_argument, make_parser, parse_positive_int


def data_movielens(words: list[str]) -> int:
    """Download or import a MovieLens data set."""
    parser = make_parser(
        "data movielens",
        "Get a data set of MovieLens: download it or take it from a file, then verify, unpack and "
        "prepare it.",
        "An interrupted download continues when the same command is typed again. Set\n"
        "ECHELON_MOVIELENS_URL to use a mirror "
        "(default: https://files.grouplens.org/datasets/movielens).",
    )
    parser.add_argument(
        "--size",
        choices=["latest-small", "100k", "1m", "25m", "32m"],
        help="which of GroupLens' data sets (default: latest-small, or the one in the file)",
    )
    parser.add_argument(
        "--from", dest="given", metavar="FILE", help="a zip file or folder, instead of a download"
    )
    parser.add_argument("--to", default="data", metavar="DIR", help="(default: data)")
    parser.add_argument("--json", action="store_true", help="print where it is as JSON")
    given = parser.parse_args(words)
    from echelon.recipes.movielens.data.data_command import get_data

    return get_data(given.size, given.given, Path(given.to), given.json)


def recommend(words: list[str]) -> int:
    """Print the movies that a run's model recommends to users."""
    parser = make_parser(
        "recommend",
        "Recommend movies to users of MovieLens by a run's best snapshot: movies that they have "
        "not rated, the best first.",
        "The score is the expected rating, not clipped to the scale; of\n"
        "experiment=movielens_ranking, the log-likelihood of a movie to be next.\n"
        "In a pipe: user, rank, score, movie id and title, separated by tabs.",
    )
    parser.add_argument("run", help="a name, a folder, or `latest`")
    parser.add_argument(
        "--user",
        type=int,
        action="append",
        required=True,
        metavar="ID",
        help="the id of a user in MovieLens; may be repeated",
    )
    parser.add_argument("-k", type=parse_positive_int, default=10, help="how many (default: 10)")
    parser.add_argument("--json", action="store_true")
    add_dir_argument(parser)
    given = parser.parse_args(words)
    from echelon.recipes.movielens.recommend import print_recommendations
    from echelon.runs.find import find_run

    return print_recommendations(find_run(given.run, given.dir), given.user, given.k, given.json)
