"""`echelon pull`: snapshots of a run that is on a cluster (`launch.login`)."""

from __future__ import annotations

from echelon.commands.arguments import RUN_HELP, add_dir_argument, make_parser
from echelon.errors import EchelonError, ExitCode, Fault


def pull(words: list[str]) -> int:
    """`echelon pull`: bring snapshots of a run here."""
    parser = make_parser(
        "pull",
        "Bring snapshots of a run that is on a cluster (launch.login) into its folder here, with "
        "its logs. Metrics and status come by themselves; snapshots are large, and come on demand.",
        """\
examples:
  echelon pull latest              the newest snapshot
  echelon pull latest --best       the one with the best value
  echelon pull latest --all        all that are kept

A pull that was cut short goes on where it stopped when it is typed again.

--json prints {version: 1, run, host, snapshots: [folders here]}.""",
    )
    parser.add_argument("run", help=RUN_HELP)
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--best", action="store_true", help="the best one; default: the newest")
    which.add_argument("--all", action="store_true", help="all that the run has kept")
    parser.add_argument("--json", action="store_true")
    add_dir_argument(parser)
    given = parser.parse_args(words)
    import json

    from echelon.login.pull import pull_snapshots
    from echelon.runs.find import find_run
    from echelon.runs.origin import read_origin

    run = find_run(given.run, given.dir)
    origin = read_origin(run)
    if origin is None:
        raise EchelonError(
            Fault(
                f"run {run.name} is a run of this machine, not one on a cluster",
                f"its snapshots are in {run.snapshots_folder}",
            )
        )
    folders = pull_snapshots(run, "best" if given.best else "all" if given.all else "last")
    if given.json:
        named = [str(folder) for folder in folders]
        print(json.dumps({"version": 1, "run": run.name, "host": origin.host, "snapshots": named}))
    else:
        for folder in folders:
            print(folder)
    return ExitCode.OK
