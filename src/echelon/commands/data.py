"""`echelon data look|check|pack`: files of samples."""

from __future__ import annotations

import argparse
from pathlib import Path

from echelon.commands.arguments import (
    make_parser,
    parse_line_count,
    parse_positive_int,
    parse_size_bytes,
)

_PATHS_HELP = "files, folders, or patterns in quotes: 'data/train-*.tar'"
_FORMATS = ("parquet", "arrow", "jsonl", "npy", "tar", "images")


def data(words: list[str]) -> int:
    """`echelon data look|check|pack`."""
    actions = {"look": _look, "check": _check, "pack": _pack}
    parser = make_parser(
        "data",
        "Files of samples, as `echelon.data.open` reads them: tar shards, Parquet, Arrow and saved "
        "Hugging Face datasets, jsonl, npy, folders of pictures.",
        """\
  look       what is in them: samples, bytes, columns, the first few samples
  check      whether every sample can be read and decoded, and which cannot
  pack       write them as shards: tar or Parquet files of a given size
  movielens  get a data set of MovieLens

examples:
  echelon data look data/train
  echelon data look 'data/*.tar' --html samples.html
  echelon data check data/train
  echelon data pack photos -o data/train --shard-size 256MB
  echelon data movielens

`echelon data look --help` says more, and so on.""",
    )
    parser.add_argument("action", choices=actions, metavar="look|check|pack")
    given = parser.parse_args(words[:1])
    return actions[given.action](words[1:])


def _look(words: list[str]) -> int:
    parser = make_parser(
        "data look",
        "Show what is in files of samples: how many, their columns, the first few.",
        """\
Types and sizes are of 64 samples, spread over all. An index of a tar or jsonl file is made where
there is none, and kept beside it.

examples:
  echelon data look data/train                     a folder
  echelon data look 'data/*.tar' -n 10             ten samples
  echelon data look photos --html photos.html      one page with pictures, which needs nothing else
  echelon data look train.bin --dtype uint32       files of tokens; those of uint16 without --dtype

--json prints {version: 1, format, files, size_bytes, samples, chunks, median_chunk_bytes,
columns: [{name, type, median_bytes, max_bytes, samples}], class_names,
first_samples: [{file, number, key, values: {column: text}, fault}]}. Of files of tokens, `samples`
are the tokens, and each of the first samples is about a file.""",
    )
    _add_paths(parser, "paths")
    parser.add_argument(
        "-n",
        type=parse_line_count,
        metavar="N",
        help="samples to show (default: 3, and 24 with --html)",
    )
    parser.add_argument(
        "--dtype",
        choices=("uint8", "uint16", "uint32", "int32", "int64"),
        default="uint16",
        help="of the tokens in .bin files (default: uint16)",
    )
    parser.add_argument("--html", metavar="FILE", help="write a page with the samples")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args(words)
    from echelon.views.data_tables import show_files

    page = Path(given.html) if given.html else None
    shown = given.n if given.n is not None else 24 if page else 3
    return show_files(given.paths, given.format, given.dtype, shown, page, given.json)


def _check(words: list[str]) -> int:
    parser = make_parser(
        "data check",
        "Read and decode every sample, and name those that cannot be: file, number, key, and why. "
        "Shards of `echelon data pack` are also compared with their checksums.",
        """\
The exit code is 0 if all can be read, 1 if some cannot, 2 if there are no such files.
Piped: file, number, key and why, between tabs; the number is empty for a file that cannot be read
at all, and 0-99 for a row group of Parquet.

examples:
  echelon data check data/train
  echelon data check 'data/*.parquet' --procs 4
  echelon data check data/train > bad.tsv || less bad.tsv

--json prints {version: 1, files, samples, bad_samples, bad_files,
bad: [{file, first, samples, key, why}]}; of very many the first 10,000.""",
    )
    _add_paths(parser, "paths")
    _add_procs(parser)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args(words)
    from echelon.views.data_tables import check_files

    return check_files(given.paths, given.format, given.procs, given.json)


def _pack(words: list[str]) -> int:
    parser = make_parser(
        "data pack",
        "Write samples as shards: tar files in the way of WebDataset, or Parquet files, of about a "
        "given size, with a list of their checksums, shards.json. They are read again and compared "
        "with the source.",
        """\
After an interruption, also a kill, type the same again: shards that are whole are kept. The same
source gives the same bytes, with any number of processes.

In a tar a sample has a member for each column. A picture of a folder is KEY.jpg, its class KEY.cls.
Other columns get an ending that says how to decode them: text.txt, label.json, vector.npy.

examples:
  echelon data pack photos -o data/train                     data/train/train-000000.tar …
  echelon data pack 'raw/*.jsonl' -o data/texts --shard-size 100MB
  echelon data pack old/*.tar -o data/train --format parquet

--json prints {version: 1, folder, format, samples, shards, size_bytes, kept}, where `kept` counts
shards that were there before.""",
    )
    _add_paths(parser, "sources", "--source-format")
    parser.add_argument("-o", "--output", required=True, metavar="DIR", help="a new folder")
    parser.add_argument(
        "--format",
        choices=("tar", "parquet"),
        help="what to write (default: tar for pictures and other bytes, else parquet)",
    )
    parser.add_argument(
        "--shard-size",
        type=parse_size_bytes,
        default=256_000_000,
        metavar="SIZE",
        help="of a shard, about (default: 256MB)",
    )
    parser.add_argument("--name", help="of the files, NAME-000000.tar (default: that of DIR)")
    _add_procs(parser)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_intermixed_args(words)
    folder = Path(given.output)
    name = given.name or folder.resolve().name
    if not name or "/" in name or name.startswith((".", "_")):
        parser.error(f"--name {name!r} is not a name of files that are read")
    from echelon.views.data_tables import pack_files

    return pack_files(
        given.sources,
        given.source_format,
        folder,
        given.format,
        name,
        given.shard_size,
        given.procs,
        given.json,
    )


def _add_paths(parser: argparse.ArgumentParser, name: str, format_option: str = "--format") -> None:
    parser.add_argument(name, nargs="+", metavar=name.removesuffix("s").upper(), help=_PATHS_HELP)
    parser.add_argument(
        format_option, choices=_FORMATS, help="what they are, where their endings do not say it"
    )


def _add_procs(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--procs", type=parse_positive_int, metavar="N", help="processes (default: one per core)"
    )
