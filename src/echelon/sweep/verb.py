"""`echelon sweep FILE`: read it, check it, and run its trials where the launcher says."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from echelon.errors import EchelonError, Exit, Fault
from echelon.sweep import slurm
from echelon.sweep.begin import Prepared, prepare
from echelon.sweep.book import Book
from echelon.sweep.file import SweepFile, read
from echelon.sweep.folder import Sweep, open_sweep
from echelon.sweep.given import written
from echelon.sweep.report import report
from echelon.sweep.show import show, watching
from echelon.sweep.space import Parameter
from echelon.sweep.study import require
from echelon.sweep.supervise import supervise
from echelon.sweep.worker import Compose

Start = Callable[..., int]
_BANDS = 4
"""Shown of those at which trials are compared; with min_iter there is no last one."""


class Wanted(NamedTuple):
    parallel: int
    name: str | None
    root: Path
    storage: str | None
    lease_s: float
    dry_run: bool
    as_json: bool
    wait: bool
    engine: str


def sweep(path: Path, words: Sequence[str], wanted: Wanted, compose: Compose, start: Start) -> int:
    file = read(path)
    for note in file.notes:
        print(f"note: {note}", file=sys.stderr)
    if wanted.engine == "wandb" and wanted.storage:
        raise EchelonError(
            Fault(
                "--storage is where Optuna keeps results, and with --engine wandb the server does",
                "leave one of them out",
            )
        )
    where = (wanted.name, wanted.root, wanted.storage, wanted.lease_s)
    prepared = prepare(file, words, *where, compose)
    on_slurm = prepared.first.launch.kind == "slurm" and wanted.engine == "embedded"
    wanted = wanted._replace(parallel=min(wanted.parallel, prepared.settings.cap))
    if wanted.dry_run:
        return _plan(file, prepared, wanted, start, on_slurm)
    if prepared.first.launch.kind == "env":
        raise EchelonError(
            Fault("launch=env is typed on every node, and a sweep is typed once", "use launch=ssh")
        )
    if wanted.engine == "wandb":
        from echelon.sweep.wandb.engine import serve

        return serve(file, prepared, wanted.parallel, wanted.as_json)
    if prepared.sweep.server_file.exists():
        raise EchelonError(
            Fault(
                f"the sweep {prepared.sweep.name} in {prepared.sweep.folder} is on wandb's server",
                "go on with it with --engine wandb, or choose another name with --name",
            )
        )
    require(wanted.storage)
    if on_slurm:
        slurm.check(prepared, wanted.parallel)
    prepared.sweep.write(prepared.settings, path.read_text(encoding="utf-8"))
    if on_slurm:
        return _queue(prepared, wanted)
    return _here(prepared, wanted)


def look(name: str, root: str, as_json: bool, all_of_them: bool, picture: str | None) -> int:
    """`echelon sweep show`, whoever searches."""
    sweep = open_sweep(name, root)
    if sweep.server_file.exists():
        from echelon.sweep.wandb.look import looked_at

        told = looked_at(sweep)
    else:
        told = report(Book(sweep))
    return show(told, as_json, all_of_them, Path(picture) if picture else None)


def _here(prepared: Prepared, wanted: Wanted) -> int:
    with watching() as screen:
        code = supervise(prepared.sweep, wanted.parallel, screen.tell)
    if code == Exit.OK:
        return _outcome(prepared.sweep, wanted.as_json)
    show(report(Book(prepared.sweep)), wanted.as_json)
    print("the same command goes on with this sweep", file=sys.stderr)
    return code


def _outcome(sweep: Sweep, as_json: bool) -> int:
    """Of a sweep whose workers are gone by themselves."""
    told = report(Book(sweep))
    show(told, as_json)
    if told.ending and told.best is None:
        what, do = f"ended: {told.ending}", "mend it and choose another --name"
    elif not told.ending and told.done < told.cap:
        what = f"is not over, but its workers are: {told.done} of {told.cap} results"
        do = f"see {sweep.logs}; the same command goes on with it"
    else:
        return Exit.OK
    raise EchelonError(Fault(f"the sweep {sweep.name} {what}", do), exit=Exit.FAILED)


def _queue(prepared: Prepared, wanted: Wanted) -> int:
    sweep = prepared.sweep
    Book(sweep)  # made here, so that no worker has to wait for another
    job = slurm.submit_workers(prepared, wanted.parallel)
    workers = f"{wanted.parallel} worker{'s' * (wanted.parallel > 1)}"
    print(f"job {job}: {workers} of sweep {sweep.name} in {sweep.folder}")
    if not wanted.wait:
        print(f"  look at it  echelon sweep show {sweep.name}")
        return Exit.OK
    slurm.follow(sweep)
    return _outcome(sweep, wanted.as_json)


def _plan(file: SweepFile, prepared: Prepared, wanted: Wanted, start: Start, on_slurm: bool) -> int:
    """What would happen, of the first trial in full."""
    settings, sweep = prepared.settings, prepared.sweep
    if wanted.as_json:
        told = {
            "sweep": sweep.name,
            "folder": str(sweep.folder),
            "method": file.method,
            "metric": settings.metric,
            "run_cap": settings.cap,
            "bands": list(file.early.bands) if file.early else None,
            "parameters": {p.name: p.distribution for p in file.parameters.values()},
            "words": settings.words,
            "program": settings.program,
            "script": slurm.script(prepared, wanted.parallel) if on_slurm else None,
        }
        print(json.dumps(told, indent=2))
        return Exit.OK
    print(
        f"sweep {sweep.name}: {settings.cap:,} trials, {wanted.parallel} at once, in {sweep.folder}"
    )
    goal = "largest" if settings.metric["goal"] == "maximize" else "smallest"
    who = " on wandb's server" if wanted.engine == "wandb" else ""
    print(f"{file.method} for the {goal} {settings.metric['name']}{who}")
    if file.early:
        more = ", …" if len(file.early.bands) > _BANDS else ""
        bands = ", ".join(map(str, file.early.bands[:_BANDS])) + more
        print(f"after {bands} evaluations the best 1/{file.early.eta:g} go on")
    width = max(len(name) for name in file.parameters)
    for p in file.parameters.values():
        print(f"  {p.name:<{width}}  {p.distribution} {_range(p)}")
    if on_slurm:
        print(f"\n{slurm.script(prepared, wanted.parallel)}")
        return Exit.OK
    print("\nA trial:")
    return start(prepared.first, dry_run=True)


def _range(parameter: Parameter) -> str:
    if parameter.values:
        return ", ".join(written(value) for value in parameter.values)
    if parameter.distribution.endswith("normal"):
        return f"mu {parameter.mu:g}, sigma {parameter.sigma:g}"
    if parameter.distribution.endswith("beta"):
        return f"a {parameter.a:g}, b {parameter.b:g}"
    return f"{parameter.min:g} to {parameter.max:g}"
