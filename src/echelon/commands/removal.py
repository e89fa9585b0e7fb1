"""`echelon rm` and `archive`: runs that are not wanted any more, or not in sight."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from echelon.commands.arguments import RUN_HELP, add_dir_argument, make_parser
from echelon.errors import EchelonError, ExitCode, Fault

_RUNS_HELP = f"{RUN_HELP}, what several were submitted as, or a pattern: 'seed-*'"


def rm(words: list[str]) -> int:
    """`echelon rm`: move runs into the trash, get them back, or delete them for good."""
    parser = make_parser(
        "rm",
        "Move runs into the trash, the folder `.trash` beside them. Nothing is deleted before the "
        "trash is emptied. A run that is queued or running is refused.",
        """\
examples:
  echelon rm bad-run 'seed-*'    asks, then moves them to runs/.trash
  echelon rm --undo bad-run      brings it back, with everything in it
  echelon rm --list              what is in the trash, and how large it is
  echelon rm --empty-trash       asks, then deletes it for good

`echelon archive` only takes runs out of the lists. `echelon runs --all` lists also those that ended
before their first step.

--list --json prints {version: 1, trash: [{run, folder, removed, size_bytes}]}; `removed` is in
seconds since 1970.""",
    )
    parser.add_argument("run", nargs="*", metavar="RUN", help=_RUNS_HELP)
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--undo", action="store_true", help="bring these back from the trash")
    what.add_argument("--list", action="store_true", help="show what is in the trash")
    what.add_argument("--empty-trash", action="store_true", help="delete it for good")
    parser.add_argument("--yes", "-y", action="store_true", help="do not ask")
    parser.add_argument("--json", action="store_true", help="with --list")
    add_dir_argument(parser)
    given = parser.parse_intermixed_args(words)
    needs_runs = not (given.list or given.empty_trash)
    if needs_runs != bool(given.run):
        action = "get back; --list shows what is in the trash" if given.undo else "remove"
        parser.error(f"name the runs to {action}" if needs_runs else "this takes no RUN")
    if given.json and not given.list:
        parser.error("--json is for --list")
    root = Path(given.dir)
    if given.undo:
        return _restore(given.run, root)
    if given.list:
        from echelon.views.removal_lists import show_trash

        return show_trash(root, given.json)
    if given.empty_trash:
        return _empty_trash(root, given.yes)
    return _remove(given.run, given.dir, given.yes)


def _remove(words: Sequence[str], root: str, yes: bool) -> int:
    from echelon.runs.removal import TRASH, find_runs_to_remove, move_to_trash
    from echelon.utils.text import format_count, join_names

    runs = find_runs_to_remove(words, root)
    folders = {run.folder.parent for run in runs}
    names = {folder: [r.name for r in runs if r.folder.parent == folder] for folder in folders}
    counted = {
        folder: f"{format_count(len(names[folder]), 'run')} to {_shorten(folder / TRASH)}: "
        f"{join_names(names[folder])}"
        for folder in sorted(folders)
    }
    _require_consent(" and ".join(f"move {text}" for text in counted.values()), yes)
    from echelon.login.remote_commands import run_there, split_by_place

    # Of a run on a cluster, the run there goes first: it may be at work, which is refused.
    code = run_there(split_by_place(runs)[1], lambda there: ["rm", "--yes", *there])
    if code != ExitCode.OK:
        return code
    move_to_trash(runs)
    for folder, text in counted.items():
        option = "" if folder == Path("runs").absolute() else f" --dir {_shorten(folder)}"
        print(f"moved {text}")
        print(f"  get back  echelon rm --undo {' '.join(names[folder])}{option}")
        print(f"  for good  echelon rm --empty-trash{option}")
    return ExitCode.OK


def _restore(words: Sequence[str], root: Path) -> int:
    from echelon.login.remote_commands import run_there, split_by_place
    from echelon.runs.removal import restore_from_trash
    from echelon.runs.run_folder import Run

    restored = restore_from_trash(words, root)
    for path in restored:
        print(f"brought back {_shorten(path.absolute())}")
    runs = split_by_place([Run(path.absolute()) for path in restored])[1]
    return run_there(runs, lambda there: ["rm", "--undo", *(Path(each).name for each in there)])


def _empty_trash(root: Path, yes: bool) -> int:
    from echelon.runs.removal import TRASH, empty_trash, list_trash
    from echelon.utils.text import format_bytes, format_count, join_names

    entries = list_trash(root)
    if not entries:
        print(f"{root / TRASH} is empty")
        return ExitCode.OK
    names = [entry.folder.name for entry in entries]
    size = format_bytes(sum(entry.size_bytes for entry in entries))
    what = f"{format_count(len(names), 'folder')} of {root / TRASH}, {size}: {join_names(names)}"
    _require_consent(f"delete for good {what}", yes)
    empty_trash(entries)
    print(f"deleted {what}")
    return ExitCode.OK


def archive(words: list[str]) -> int:
    """`echelon archive`: take runs out of the lists, or back into them."""
    parser = make_parser(
        "archive",
        "Take runs out of the lists of `echelon runs` and `echelon jobs`. Nothing is moved: they "
        "are still found by name, shown, plotted and resumed, and resuming one lists it again.",
        """\
examples:
  echelon archive old-run 'seed-*'
  echelon archive --undo old-run    lists it again
  echelon archive --list            what is archived; `runs --all` lists it too

--list --json prints {version: 1, archived: [{run, folder}]}.""",
    )
    parser.add_argument("run", nargs="*", metavar="RUN", help=_RUNS_HELP)
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--undo", action="store_true", help="list these again")
    what.add_argument("--list", action="store_true", help="show what is archived")
    parser.add_argument("--json", action="store_true", help="with --list")
    add_dir_argument(parser)
    given = parser.parse_intermixed_args(words)
    if given.list == bool(given.run):
        parser.error("this takes no RUN" if given.list else "name the runs to archive")
    if given.json and not given.list:
        parser.error("--json is for --list")
    from echelon.runs.removal import archive_runs, find_runs_to_remove, unarchive_runs
    from echelon.utils.text import format_count, join_names

    if given.list:
        from echelon.views.removal_lists import show_archived_runs

        return show_archived_runs(Path(given.dir), given.json)
    runs = find_runs_to_remove(given.run, given.dir)
    names = [run.name for run in runs]
    what_runs = f"{format_count(len(runs), 'run')}: {join_names(names)}"
    if given.undo:
        unarchive_runs(runs)
        print(f"listed again {what_runs}")
        return ExitCode.OK
    archive_runs(runs)
    option = "" if given.dir == "runs" else f" --dir {given.dir}"
    print(f"archived {what_runs}")
    print(f"  undo      echelon archive --undo {' '.join(names)}{option}")
    return ExitCode.OK


def _require_consent(question: str, yes: bool) -> None:
    """Raise unless ``--yes`` was given or a person agrees."""
    if yes:
        return
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise EchelonError(
            Fault(f"{question}: there is no terminal to ask at", "type the same with --yes")
        )
    try:
        answer = input(f"{question}? [y/N] ").strip().lower()
    except EOFError:
        answer = ""
    if answer not in ("y", "yes"):
        raise EchelonError(Fault("nothing was changed", "answer y, or type the same with --yes"))


def _shorten(path: Path) -> str:
    from echelon.tracking.summary import shorten_path

    return shorten_path(path)
