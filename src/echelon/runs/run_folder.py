"""A run and its folder: every path of it, atomic writes, its status. Nothing else knows a path."""

from __future__ import annotations

import contextlib
import json
import re
import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from echelon.config import bundled_experiments
from echelon.config.schema import Config, build_config, find_differences
from echelon.config.validate import NAME_CHARACTERS, check_run_name
from echelon.errors import EchelonError, Exit, Fault, suggest_nearest, suggest_other_folder
from echelon.utils.files import read_json_object, replace_file, write_json_atomically
from echelon.utils.os_errors import describe_os_error

SUBMISSION_FILE = "submission.json"
MANIFEST_FILE = "manifest.json"
"""What makes a folder a snapshot."""
BEST_FILE = "best"
"""Names the best of the snapshots beside it."""


@dataclass(frozen=True)
class Run:
    """All paths of one run."""

    folder: Path

    @classmethod
    def from_config(cls, config: Config) -> Run:
        """The one that a configuration names."""
        return cls(Path(config.run.dir).absolute() / str(config.run.name))

    @property
    def name(self) -> str:
        return self.folder.name

    @property
    def config_file(self) -> Path:
        return self.folder / "config.json"

    @property
    def status_file(self) -> Path:
        return self.folder / "status.json"

    @property
    def metrics_file(self) -> Path:
        return self.folder / "metrics.jsonl"

    @property
    def snapshots_folder(self) -> Path:
        return self.folder / "snapshots"

    @property
    def logs_folder(self) -> Path:
        return self.folder / "logs"

    @property
    def traces_folder(self) -> Path:
        """What trainer.profile recorded."""
        return self.folder / "traces"

    def heartbeat_file(self, node: int) -> Path:
        return self.folder / f".pulse-{node}"

    def stamps_file(self, node: int) -> Path:
        """When the logs of a node's ranks grew to which size."""
        return self.logs_folder / f"node-{node}.stamps"

    def code_folder(self, node: int) -> Path:
        """A copy of the experiment's folder, on a node that does not share the original."""
        return self.folder / f"code-{node}"

    def get_entry(self, config: Config, node: int) -> str:
        """The experiment's, on that node."""
        entry = str(config.experiment.get("entry"))
        file, _, function = entry.rpartition(":")
        copy = self.code_folder(node) / Path(file).name
        return f"{copy}:{function}" if file.endswith(".py") and copy.exists() else entry

    @property
    def script_file(self) -> Path:
        return self.folder / "job.sh"

    @property
    def submission_file(self) -> Path | None:
        """What `echelon submit` wrote down of this run, alone or with others; None without."""
        group = self.folder.with_name(self.name.rpartition("-")[0] or self.name)
        files = [folder / SUBMISSION_FILE for folder in (self.folder, group)]
        return next((file for file in files if file.exists()), None)

    @property
    def arguments_file(self) -> Path:
        """The words of a program, for the batch script of an array."""
        return self.folder / "words"

    @property
    def array_file(self) -> Path:
        """Of an array whose first run this is: which folder each task works in."""
        return self.folder.with_name(f".{self.name}.array")

    @property
    def exit_code_file(self) -> Path:
        """The exit code of a batch job, once its script is at its end."""
        return self.folder / "exit"

    @property
    def agent_exit_file(self) -> Path:
        """The exit code of node 0's agent, for the batch script."""
        return self.folder / ".code"

    @property
    def cancel_file(self) -> Path:
        """Made by who does not want the run to go on; its status is the run's own to write."""
        return self.folder / "cancelled"

    @property
    def job_id_file(self) -> Path:
        """Slurm's number of the newest job. Not in the status, which is the job's own to write as
        soon as it is queued."""
        return self.folder / "job"

    def read_job_id(self) -> str:
        with contextlib.suppress(OSError):
            return self.job_id_file.read_text(encoding="utf-8").strip()
        return ""

    @property
    def job_log_file(self) -> Path:
        """What the batch script itself said."""
        return self.logs_folder / "job.log"

    @property
    def wandb_file(self) -> Path:
        """Which run of wandb's this one is, and what may not have reached its server."""
        return self.folder / "wandb.json"

    def read_wandb_id(self) -> str | None:
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            return str(json.loads(self.wandb_file.read_text(encoding="utf-8"))["id"])
        return None

    def tracker_progress_file(self, tracker: str) -> Path:
        """How much of the metrics a tracker has."""
        return self.folder / f".mark-{tracker}"

    def find_newest_step(self) -> int:
        """Of its snapshots; 0 without one."""
        names = (path.name.partition("-")[2] for path in self.snapshots_folder.glob("step-*"))
        return max((int(name) for name in names if name.isdecimal()), default=0)

    def node_log_file(self, node: int) -> Path:
        """What the agent of a node said."""
        return self.logs_folder / f"node-{node}.log"

    def rank_log_file(self, rank: int) -> Path:
        return self.logs_folder / f"rank-{rank}.log"

    def stack_file(self, rank: int) -> Path:
        """Where a rank that hangs is asked to write its stack."""
        return self.logs_folder / f"rank-{rank}.stack"

    def read_config(self) -> Config:
        try:
            return build_config(json.loads(self.config_file.read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError) as error:
            raise EchelonError(
                Fault(
                    f"{self.config_file} cannot be read: {error}",
                    "restore the file, or start a run of another name",
                ),
                exit=Exit.NOT_FOUND,
            ) from error

    def read_status(self) -> dict[str, Any]:
        return read_json_object(self.status_file) or {}

    def update_status(self, **fields: Any) -> None:
        """Merge fields into status.json. A full disk must not end a training over its status."""
        with contextlib.suppress(OSError):
            write_json_atomically(
                self.status_file, self.read_status() | fields | {"updated": time.time()}
            )


def assign_name(config: Config) -> Config:
    """With a name, so that a plan can say where things will be."""
    if config.run.name:
        return config
    return replace(config, run=replace(config.run, name=_generate_name(config)))


def assign_numbered_names(configs: list[Config]) -> list[Config]:
    """Each with a name of its own: that of the first, and a number."""
    name = assign_name(configs[0]).run.name
    return [
        replace(config, run=replace(config.run, name=f"{name}-{number}"))
        for number, config in enumerate(configs)
    ]


def create_run(config: Config) -> Run:
    """The folder of a new run, or of the named one when it exists; holds the resolved config."""
    root = Path(config.run.dir).absolute()
    run = Run(root / (config.run.name or _generate_name(config)))
    _require_snapshot(config)
    if run.config_file.exists() and config.trainer.resume == "never":
        _move_aside(run)
    elif run.config_file.exists():
        _require_same_experiment(run, config)
        newest = max(run.snapshots_folder.glob("step-*"), default=None)
        if newest is not None and config.trainer.resume == "auto":
            # Here already: the refused configuration must not take the place of the run's own.
            require_same_settings(run, run.read_config().numerics_settings(), config, newest)
    _make_folder(run, config)
    for outdated in (run.exit_code_file, run.cancel_file, run.job_id_file):
        outdated.unlink(missing_ok=True)
    _update_latest_link(root, run)
    return run


def _require_snapshot(config: Config) -> None:
    """Before anything of a run is replaced. Whether it is whole is looked at where it is read,
    which with ssh is elsewhere."""
    given = config.trainer.resume
    if given in ("auto", "never") or config.launch.kind == "ssh":
        return
    best = Path(given).name == BEST_FILE and Path(given).is_file()
    if not best and not (Path(given) / MANIFEST_FILE).is_file():
        lacks = f"it has no {MANIFEST_FILE}" if Path(given).is_dir() else "there is no such folder"
        raise EchelonError(
            Fault(
                f"trainer.resume={given} is no snapshot: {lacks}",
                "give a folder such as runs/NAME/snapshots/step-000000100",
            ),
            exit=Exit.NOT_FOUND,
        )


def _make_folder(run: Run, config: Config) -> None:
    try:
        run.logs_folder.mkdir(parents=True, exist_ok=True)
        write_json_atomically(run.config_file, config.to_dict())
    except OSError as error:
        raise EchelonError(
            Fault(
                f"run.dir={config.run.dir}: the run folder {run.folder} cannot be written: "
                f"{describe_os_error(error)}",
                suggest_other_folder(error, "run.dir=PATH"),
            )
        ) from error


def adopt_run(folder: Path, config: Config) -> Run:
    """The folder of a run that node 0 made, here: the same one, or a machine's own at that path."""
    run = Run(folder)
    if not run.config_file.exists() or run.read_config() != config:
        _make_folder(run, config)
    return run


def get_launch_id(env: Mapping[str, str]) -> str | None:
    """What stays the same when torchrun or Slurm starts the same thing again."""
    return env.get("TORCHELASTIC_RUN_ID") or env.get("SLURM_JOB_ID")


def find_restarted_run(config: Config, env: Mapping[str, str]) -> Run | None:
    """The run that this restart of torchrun's or Slurm's belongs to, when it has no name."""
    count = env.get("TORCHELASTIC_RESTART_COUNT") or env.get("SLURM_RESTART_COUNT") or "0"
    if count == "0" or config.run.name:
        return None
    folders = Path(config.run.dir).absolute().glob("*/status.json")
    for status in sorted(folders, key=lambda p: p.stat().st_mtime, reverse=True):
        run = Run(status.parent)
        if run.read_status().get("launch_id") == get_launch_id(env) and not run.folder.is_symlink():
            return run
    return None


def find_run(where: str, root: str = "runs") -> Run:
    """The one run of that path, name or job, or `latest`."""
    runs = find_runs(where, root)
    if len(runs) > 1:
        names = [run.name for run in runs]
        raise EchelonError(
            Fault(
                f"{where} is {len(runs)} runs",
                f"name one of them: {', '.join(names[:12])}" + ", …" * (len(names) > 12),
            )
        )
    return runs[0]


def find_runs(where: str, root: str = "runs") -> list[Run]:
    """Runs by path, by name, `latest`, by the number of their job, or by the name that several
    were submitted under."""
    for folder in (Path(where), Path(root) / where):
        if (folder / "config.json").exists():
            return [Run(folder.resolve())]
    if runs := [*_find_by_job(where, Path(root)), *_find_by_group(where, Path(root))]:
        return runs
    known = {p.parent.name for p in Path(root).glob("*/config.json")}
    raise EchelonError(
        Fault(
            f"no run {where!r} here or in {Path(root).absolute()}",
            suggest_nearest(where, known) if known else "start one with `echelon train`",
        ),
        exit=Exit.NOT_FOUND,
    )


def _find_by_job(job: str, root: Path) -> Iterator[Run]:
    """The number of an array stands for all its tasks."""
    if not re.fullmatch(r"\d+(_\d+)?", job):
        return
    for file in sorted(root.glob("*/job")):
        own = Run(file.parent).read_job_id()
        if not file.parent.is_symlink() and job in (own, own.partition("_")[0]):
            yield Run(file.parent.resolve())


def _find_by_group(name: str, root: Path) -> list[Run]:
    """Runs that were started together. One may be named as if it were of them, on its own."""
    group_files = (root / name / SUBMISSION_FILE, Run(root / f"{name}-0").array_file)
    if check_run_name(name) or not any(file.exists() for file in group_files):
        return []
    return [
        run for run in find_numbered_runs(name, root) if not (run.folder / SUBMISSION_FILE).exists()
    ]


def find_numbered_runs(name: str, root: Path) -> list[Run]:
    """NAME-0, NAME-1, …"""
    folders = [file.parent for file in root.glob(f"{name}-*/config.json")]
    numbers = {folder: folder.name.removeprefix(f"{name}-") for folder in folders}
    found = [folder for folder, number in numbers.items() if number.isdecimal()]
    return [Run(folder.resolve()) for folder in sorted(found, key=lambda f: int(numbers[f]))]


_SCRIPTS = (".py", ".sh")


def get_short_subject(entry: str, program: Sequence[str]) -> str:
    """What is run, in a word: the experiment's name, file or module, or the program's."""
    if entry in bundled_experiments.list_entries():
        return bundled_experiments.list_entries()[entry]
    entry = entry or _find_script(program)
    where = entry.rpartition(":")[0] or entry
    stem = Path(where).stem if where.endswith(_SCRIPTS) else where
    return "".join(c for c in stem.rpartition(".")[2] if c in NAME_CHARACTERS) or "run"


def _generate_name(config: Config) -> str:
    return generate_run_name(config.program, str(config.experiment.get("entry") or ""))


def generate_run_name(program: Sequence[str], entry: str = "") -> str:
    """Of a run of these words, or of this experiment."""
    short = get_short_subject(entry, program).lstrip(".-")[:60] or "run"
    return f"{short}-{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}"


def _find_script(program: Sequence[str]) -> str:
    """The word of a program that names it best: its first file, or what is run."""
    files = [word for word in program if word.endswith(_SCRIPTS)]
    return f"{files[0]}:" if files else Path(program[0]).name if program else "run"


def _require_same_experiment(run: Run, config: Config) -> None:
    before, now = run.read_config().experiment.get("entry"), config.experiment.get("entry")
    if before != now:
        raise EchelonError(
            Fault(
                f"run.name={run.name}: {run.folder} is a run of the experiment {before!r}, "
                f"not of {now!r}",
                "choose another run.name, or trainer.resume=never to set the old run aside",
            )
        )


def require_same_settings(
    run: Run, recorded: dict[str, Any], config: Config, snapshot: Path
) -> None:
    """A run goes on only with the numbers it had; a snapshot given by its path, with any."""
    different = find_differences(recorded, config.numerics_settings())
    if different:
        raise EchelonError(
            *(
                Fault(
                    f"{key}={now}, but run {run.name} was trained with {key}={before}",
                    "set it back, choose another run.name, or take the snapshot on purpose with "
                    f"trainer.resume={snapshot}",
                )
                for key, (before, now) in different.items()
            )
        )


def _move_aside(run: Run) -> None:
    for number in range(1, 10_000):
        aside = run.folder.with_name(f"{run.name}.{number}")
        if not aside.exists():
            run.folder.rename(aside)
            return


def _update_latest_link(root: Path, run: Run) -> None:
    """`latest` is a convenience; a file system without links does without it."""
    with contextlib.suppress(OSError), replace_file(root / "latest") as temporary:
        temporary.symlink_to(run.name)
