"""`echelon sweep` by a login node: the laptop plans and checks, an array of jobs there searches.

What is needed of the sweep's folder is here as a copy, like that of a run, and each trial is a copy
of a run beside it. The laptop may sleep or be switched off: workers depend on nothing but the
folder there, and the same command continues the sweep.
"""

from __future__ import annotations

import os
import secrets
import shutil
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from echelon.config.defaults_files import FileDefaults
from echelon.config.schema import Config, LaunchConfig, NotifyConfig
from echelon.errors import EchelonError, ExitCode, Fault
from echelon.login.connection import LoginLostError, LoginTarget, open_connection
from echelon.login.local_copy import create_sweep_copy
from echelon.login.refresh import Follower, refresh_copies
from echelon.login.source_manifest import find_source_folder, read_manifest
from echelon.login.submission import (
    LoginSubmission,
    prepare_jobs,
    render_secrets,
    submit_request,
)
from echelon.runs.origin import RunOrigin, list_changing_copies, read_copy_state, read_origin
from echelon.runs.run_folder import Run
from echelon.sweep.optuna_study import require_optuna
from echelon.sweep.plan import SweepPlan
from echelon.sweep.run_sweep import (
    StartRun,
    SweepOptions,
    follow_workers,
    has_study,
    print_plan,
    report_outcome,
)
from echelon.sweep.slurm_workers import WorkerArray
from echelon.sweep.sweep_file import SweepFile
from echelon.sweep.sweep_folder import SweepFolder
from echelon.sweep.trial_command import format_override_value
from echelon.sweep.trial_store import TrialStore, TrialSummary
from echelon.utils.files import read_json_object, write_json_atomically
from echelon.utils.text import format_count, print_to_stderr

_ID_FILE = ".submission"
"""In the folder of the sweep here: the id of a submission of which nobody knows what became."""
_ELSEWHERE = ("login", "remote_dir", "python", "ssh", "secrets")
"""Settings of launch that are about this machine, or that are set there."""
_LOOK_EVERY_S = 0.5


def run_sweep_by_login(
    file: SweepFile,
    plan: SweepPlan,
    options: SweepOptions,
    defaults: FileDefaults,
    start: StartRun,
) -> int:
    """Submit the workers of a sweep by the login node, and return the exit code.

    `defaults` are those of the files of this machine, which workers do not have.
    """
    _require_offered(plan, options)
    submission = _make_submission(plan)
    if options.dry_run:
        return print_plan(file, plan, options, start, _render_script(submission, plan, options))
    require_optuna()
    earlier = TrialStore(plan.sweep).summarize_trials() if _is_continued(plan.sweep) else []
    job = _submit(submission, plan, options, defaults, file.path.read_text(encoding="utf-8"))
    workers = format_count(options.parallel, "worker")
    host = submission.target.host
    print(f"job {job}: {workers} of sweep {plan.sweep.name} on {host}", flush=True)
    if not options.wait:
        print(f"  look at it  echelon sweep show {plan.sweep.name}")
        print(f"  end it      echelon cancel {plan.sweep.name}")
        return ExitCode.OK
    _follow(plan.sweep, earlier)
    return report_outcome(plan.sweep, options.as_json)


def _list_changing_trials(sweep: SweepFolder) -> list[Run]:
    names = {run.name for run in sweep.find_trial_runs()}
    return [run for run in list_changing_copies(sweep.folder.parent) if run.name in names]


def _require_offered(plan: SweepPlan, options: SweepOptions) -> None:
    login = plan.first_config.launch.login
    faults = []
    if options.engine == "wandb":
        faults.append(
            Fault(
                f"launch.login={login}: --engine wandb starts a job for each trial from where it "
                "is typed, and has to stay there",
                f"leave --engine out, or type it on {login}",
            )
        )
    if options.storage:
        faults.append(
            Fault(
                f"launch.login={login}: --storage is a database that workers may not reach",
                "leave it out: results are in the sweep's folder there, and come here",
            )
        )
    if faults:
        raise EchelonError(*faults)


def _make_submission(plan: SweepPlan) -> LoginSubmission:
    config = plan.first_config
    source = find_source_folder(config)
    target = LoginTarget.from_launch(config.launch, (source or Path.cwd()).name or "project")
    return LoginSubmission(target, [config], source, extra="sweep")


def _render_script(submission: LoginSubmission, plan: SweepPlan, options: SweepOptions) -> str:
    """Return the script of the workers, as far as it is known before anybody was asked."""
    root = submission.target.remote_dir
    config = submission.make_remote_config(plan.first_config, root)
    sweep = SweepFolder(Path(root) / "runs" / plan.sweep.name)
    python = submission.target.python or "python3"
    return WorkerArray(sweep, config, [], options.parallel, python).render_script()


# --- the submission ---


def _submit(
    submission: LoginSubmission,
    plan: SweepPlan,
    options: SweepOptions,
    defaults: FileDefaults,
    text: str,
) -> str:
    """Submit the workers once, and return the id of their array."""
    sweep, target = plan.sweep, submission.target
    _require_free(sweep, target.host)
    had_folder = sweep.folder.exists()
    id_file = sweep.folder / _ID_FILE
    earlier = (read_json_object(id_file) or {}).get("id")
    submission_id = str(earlier or secrets.token_hex(12))
    config = plan.first_config
    runs = Path(config.run.dir).absolute()
    manifest = read_manifest(submission.source, runs, os.environ, config.launch.secrets)
    with open_connection(target) as connection:
        python = prepare_jobs(connection, submission, manifest)
        remote = submission.make_remote_config(config, connection.root)
        words = _make_remote_overrides(plan, submission.source, remote, defaults)
        # What is here from now on is enough to find out what became of the id.
        sweep.write_files(plan.settings, text)
        write_json_atomically(id_file, {"id": submission_id}, durable=True)
        folder = f"{remote.run.dir}/{sweep.name}"
        copy = create_sweep_copy(sweep, _make_origin(submission, folder, config))
        request = {"do": "sweep", "id": submission_id, "digest": manifest.digest}
        wanted = {
            "name": sweep.name,
            "config": remote.to_dict(),
            "settings": asdict(replace(plan.settings, overrides=words)),
            "text": text,
            "parallel": options.parallel,
            "secrets": render_secrets(config),
        }
        try:
            result = submit_request(connection, request | python, wanted)
        except LoginLostError:
            raise
        except EchelonError:  # it was refused: nothing was queued
            id_file.unlink()
            if not had_folder:
                shutil.rmtree(sweep.folder)
            raise
        id_file.unlink()
        _expect_changes(sweep)
        refresh_copies(connection, [copy], with_logs=False)
    if earlier:
        print_to_stderr("an earlier command, which did not come to its end, had begun this")
    return str(result["runs"][0]["job"])


def _is_continued(sweep: SweepFolder) -> bool:
    return Run(sweep.folder).origin_file.exists() and has_study(sweep)


def _require_free(sweep: SweepFolder, host: str) -> None:
    """Raise a fault if a sweep of that name is here that is not a copy of one on this cluster."""
    if not sweep.folder.exists() or not any(sweep.folder.iterdir()):
        return
    origin = read_origin(Run(sweep.folder))
    if origin is None or origin.host != host:
        where = f"on {origin.host}" if origin else "of this machine"
        raise EchelonError(
            Fault(
                f"{sweep.folder} is there already, {where} and not on {host}",
                "choose another name with --name",
            )
        )


def _make_origin(submission: LoginSubmission, folder: str, config: Config) -> RunOrigin:
    target, source = submission.target, str(submission.source or "")
    return RunOrigin(
        *(target.host, target.ssh, target.remote_dir, folder, target.python, source),
        config.to_dict(),
        is_sweep=True,
    )


def _expect_changes(sweep: SweepFolder) -> None:
    """Have trials brought up to date again that were over: a continued sweep goes on with them."""
    for run in sweep.find_trial_runs():
        if run.origin_file.exists():
            replace(read_copy_state(run), is_settled=False).write(run)


def _make_remote_overrides(
    plan: SweepPlan, source: Path | None, remote: Config, defaults: FileDefaults
) -> list[str]:
    """Return the overrides of a trial as a worker composes it there, in a copy of the source.

    What the launch and the news are was decided here, by files that are not there.
    """
    local = plan.first_config
    words = []
    for word in plan.settings.overrides:
        key, _, value = word.partition("=")
        if key == "experiment":
            words.append(f"experiment={_map_experiment(value, source)}")
        elif key == "trainer.resume":
            words.append(f"{key}={format_override_value(remote.trainer.resume)}")
        elif not key.startswith(("launch.", "notify")):
            words.append(word)
    launch = _list_changes("launch", remote.launch, LaunchConfig(), defaults)
    news = _list_changes("notify", remote.notify, NotifyConfig(), defaults)
    words += [word for word in launch if word.partition("=")[0] != "launch.kind"]
    words += [f"launch.{key}=null" for key in _ELSEWHERE if key != "ssh"]
    words += news
    for key in ("project", "entity"):  # of wandb, where variables of this machine have them
        value = getattr(remote.track.wandb, key)
        if value != getattr(local.track.wandb, key):
            words.append(f"track.wandb.{key}={format_override_value(value)}")
    return words


def _map_experiment(value: str, source: Path | None) -> str:
    file, colon, function = value.rpartition(":")
    if not colon and value.endswith(".py"):
        file, function = value, ""
    if source is None or not file.endswith(".py"):
        return value
    inside = Path(file).resolve().relative_to(source).as_posix()
    return f"{inside}{colon}{function}"


def _list_changes(section: str, given: Any, usual: Any, defaults: FileDefaults) -> Iterator[str]:
    """Yield an override for every setting that is not the usual one, or that a file on the cluster
    may set otherwise."""
    in_files = {*defaults.launch, *defaults.others}
    for key, value in _flatten(asdict(given)):
        name = f"{section}.{key}"
        if key in _ELSEWHERE or key.startswith("k8s."):
            continue
        if value != dict(_flatten(asdict(usual)))[key] or name in in_files:
            yield f"{name}={format_override_value(value)}"


def _flatten(values: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, dict):
            yield from _flatten(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


# --- following ---


def _follow(sweep: SweepFolder, earlier: Sequence[TrialSummary]) -> None:
    """Show the progress beyond `earlier` trials until no worker waits or runs, whatever the
    connection does."""
    run = Run(sweep.folder)

    def list_wanted() -> Sequence[Run]:
        return [run, *_list_changing_trials(sweep)]

    def are_over() -> bool:
        return read_copy_state(run).is_settled and not _list_changing_trials(sweep)

    follower = Follower(list_wanted, with_logs=False)
    follower.start()
    try:
        while not has_study(sweep) and not are_over():  # the first worker has to begin
            time.sleep(_LOOK_EVERY_S)
        if has_study(sweep):
            follow_workers(sweep, earlier, are_over)
    finally:
        follower.stop()
