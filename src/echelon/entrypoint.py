"""From settings to a run: what `echelon train` and `echelon run` call once their words are parsed.

`train`, `train_multirun` and `launch_program` compose a configuration and end in `start_run`, which
takes it through the four steps of its launcher (`launch/launcher.py`).
"""

from __future__ import annotations

import inspect
import json
import os
import socket
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from echelon.config.schema import Config, build_config
from echelon.errors import EchelonError, ExitCode, Fault
from echelon.runs.create import assign_name, assign_numbered_names, create_run
from echelon.runs.run_folder import Run
from echelon.runs.submitted_run import place_beside_submitted_run
from echelon.utils.streams import use_tolerant_streams

if TYPE_CHECKING:
    from echelon.config.compose import UserExperiment
    from echelon.config.defaults_files import FileDefaults
    from echelon.config.untrusted import WandbTrial
    from echelon.launch.launcher import Launcher, LaunchServices
    from echelon.launch.plan import LaunchPlan


# --- what is called ---


def train(
    overrides: Sequence[str],
    experiment: UserExperiment | None = None,
    dry_run: bool = False,
    as_json: bool = False,
    wait: bool = False,
) -> int:
    """`echelon train`: compose, plan and start one run; returns the exit code.

    A dry run prints the plan, as JSON if asked, and stops before anything happens. `wait` follows a
    queued job to its end.
    """
    from echelon.config.untrusted import read_wandb_trial

    trial = read_wandb_trial(os.environ)
    # `wandb agent` would take the end of a submission for the end of the trial.
    waits = wait or trial is not None
    config = None
    if not dry_run and trial is None and experiment is None:
        config = _compose_by_login(overrides)
    elif not dry_run:
        _begin_connection(overrides)
    config = config or compose_config(overrides, experiment, trial=trial)
    return start_run(config, dry_run, as_json, waits)


def train_multirun(
    overrides: Sequence[str],
    experiment: UserExperiment | None = None,
    dry_run: bool = False,
    wait: bool = False,
) -> int:
    """`echelon train --multirun`: one run for every combination of the values that are listed.

    Returns 0 once they are queued; if they were waited for or run here, not 0 if one failed.
    """
    from echelon.config.compose import compose
    from echelon.config.multirun import expand_multirun
    from echelon.launch.registry import make_launcher

    if not dry_run:
        _begin_connection(overrides)
    rest, named_experiment = extract_user_experiment(overrides)
    experiment = named_experiment or experiment
    conf_dir = _find_conf_folder(experiment) if experiment else None
    defaults = load_project_defaults()
    composed = (
        compose(words, experiment, conf_dir, defaults=defaults) for words in expand_multirun(rest)
    )
    unnamed = [place_beside_submitted_run(c, os.environ) for c in composed]
    configs = assign_numbered_names(unnamed)
    if configs[0].launch.login is not None:
        return _start_by_login(configs, unnamed[0].run.name, dry_run, False, wait)
    launcher = make_launcher(configs[0])
    if wait and not launcher.is_followed_by_folder:
        raise EchelonError(
            Fault(
                f"--wait cannot follow several runs of launch={launcher.name}: their folders are "
                "not to be seen here",
                "leave it out; the command prints how to follow each of them",
            )
        )
    code = launcher.start_multirun(configs, dry_run, start_run)
    if dry_run or not (wait and launcher.queue):  # without a queue they are over by now
        return code
    from echelon.jobs.wait import wait_for_runs

    return wait_for_runs([Run.from_config(config) for config in configs])


def launch_program(
    overrides: Sequence[str],
    program: Sequence[str],
    dry_run: bool = False,
    as_json: bool = False,
    wait: bool = False,
) -> int:
    """`echelon run`: start any program in place of an experiment; returns the exit code."""
    from echelon.config.compose import compose

    if not program:
        raise EchelonError(
            Fault("no program is given", "echelon run launch=local launch.procs=2 -- python FILE")
        )
    if not dry_run:
        _begin_connection(overrides)
    config = compose(overrides, program=program, defaults=load_project_defaults())
    config = place_beside_submitted_run(config, os.environ)
    return start_run(config, dry_run, as_json, wait)


def start_from_json(text: str) -> NoReturn:
    """Start a run whose configuration was composed by another process, and end this one.

    A sweep calls it in a process that was forked for one trial.
    """
    from echelon.cli import run_and_report_faults
    from echelon.train.worker import exit_process

    config = build_config(json.loads(text))
    exit_process(run_and_report_faults(lambda: start_run(config)))


def start_run(
    config: Config, dry_run: bool = False, as_json: bool = False, wait: bool = False
) -> int:
    """Take a configuration through the steps of its launcher; returns the exit code."""
    from echelon.launch.registry import make_launcher

    if config.launch.login is not None:
        return _start_by_login([assign_name(config)], config.run.name, dry_run, as_json, wait)
    launcher = make_launcher(config)
    config, plan = _plan_run(launcher, config, dry_run)
    if dry_run:
        plan.print_plan(as_json)
        return ExitCode.OK
    # 3. What has to hold before anything is written; this may take a while.
    services = _make_launch_services()
    launcher.check(config, plan, services)
    # 4. The run, or its job; and what to do until that is over.
    with use_tolerant_streams():
        code = launcher.start(config, plan, services)
        return launcher.follow(config, code, wait, services)


def _start_by_login(
    configs: Sequence[Config], given_name: str | None, dry_run: bool, as_json: bool, wait: bool
) -> int:
    """Submit runs by the login node of a cluster (`launch.login`); returns the exit code."""
    from echelon.login.refresh import following
    from echelon.login.submission import LoginSubmission, plan_by_login, submit_by_login

    if dry_run:
        submission = LoginSubmission.from_configs(configs)
        plan_by_login(submission, os.environ).print_plan(as_json)
        return ExitCode.OK
    submission = submit_by_login(configs, given_name)
    with following(submission.runs if wait else [], is_new=True):
        if len(submission.runs) == 1:
            return _make_launch_services().follow_queued_run(submission.configs[0], wait)
        if not wait:
            return ExitCode.OK
        from echelon.jobs.wait import wait_for_runs

        return wait_for_runs(submission.runs)


def check_run_in_process(config: Config) -> Config:
    """Take a configuration through all steps of launch=inline but the start, for a script that is
    the training itself; returns it completed."""
    from echelon.launch.registry import make_launcher

    launcher = make_launcher(config)
    config, plan = _plan_run(launcher, config)
    launcher.check(config, plan, _make_launch_services())
    return config


def _plan_run(
    launcher: Launcher, config: Config, dry_run: bool = False
) -> tuple[Config, LaunchPlan]:
    """Return the completed configuration and its plan, or raise all faults that it shows."""
    from echelon.gpus import count_visible_gpus
    from echelon.launch.plan import LocalMachine

    # 1. Names and secrets first: the plan shows the one and may have to carry the other.
    config = launcher.complete_config(config, dry_run)
    machine = LocalMachine(os.environ, socket.gethostname(), count_visible_gpus(os.environ))
    # 2. The plan, and all faults that it shows, together. Nothing was touched so far.
    plan = launcher.plan(config, machine)
    if faults := launcher.find_config_faults(config, plan, machine):
        raise EchelonError(*faults)
    launcher.check_trackers(config, plan, machine)
    if config.notify.to and not dry_run:
        from echelon.launch.launcher import read_launch_secrets
        from echelon.notify.registry import require_channels

        require_channels(config.notify, os.environ | read_launch_secrets(config, dry_run))
    return config, plan


def _make_launch_services() -> LaunchServices:
    """Return the functions of higher packages that a launcher may call.

    Each imports its package when it is called: `launch` must not depend on them, and a dry run must
    not pay for the import of torch.
    """
    from echelon.launch.launcher import LaunchServices

    def train_in_process(config: Config) -> int:
        from echelon.train import worker

        return worker.train_in_process(config)

    def run_preflight(config: Config) -> int:
        from echelon.preflight.check_nodes import run_node_checks

        return run_node_checks(config)

    def run_wandb_agent(config: Config) -> int:
        from echelon.submission.wandb_agent import run_agent_here

        return run_agent_here(config, create_run(config))

    def follow_queued_run(config: Config, wait: bool) -> int:
        from echelon.jobs import attach

        return attach.attach_or_print_hint(config, wait)

    return LaunchServices(train_in_process, run_preflight, run_wandb_agent, follow_queued_run)


# --- composing ---


def compose_config(
    overrides: Sequence[str],
    experiment: UserExperiment | None = None,
    program: Sequence[str] = (),
    trial: WandbTrial | None = None,
) -> Config:
    """Return the configuration of one run of an experiment or a program.

    `experiment=FILE.py:FUNCTION` among the overrides takes precedence over `experiment`. The
    parameters of a `trial` are applied last, unless the launcher leaves that to rank 0.
    """
    from echelon.config.compose import compose
    from echelon.config.untrusted import apply_trial
    from echelon.launch.registry import make_launcher

    rest, named_experiment = extract_user_experiment(overrides)
    experiment = named_experiment or experiment
    conf_dir = _find_conf_folder(experiment) if experiment else None
    config = compose(rest, experiment, conf_dir, program, defaults=load_project_defaults())
    config = place_beside_submitted_run(config, os.environ)
    if trial is None or not make_launcher(config).applies_trial:
        return config
    return apply_trial(config, trial, experiment)


def _begin_connection(overrides: Sequence[str]) -> None:
    """Begin the connection to the login node, if these words name one: it takes as long as the
    configuration does."""
    defaults = load_project_defaults()
    if _may_log_in(overrides, defaults):
        from echelon.login.early import begin_connection

        begin_connection(overrides, defaults)


def _may_log_in(overrides: Sequence[str], defaults: FileDefaults) -> bool:
    """Return whether a login node is named at all; most commands name none."""
    key = "launch.login"
    return key in defaults.launch or any(word.startswith(f"{key}=") for word in overrides)


def _compose_by_login(overrides: Sequence[str]) -> Config | None:
    """Return the configuration of a run that is submitted by a login node; None if these words name
    none. To submit what was submitted before, neither Hydra nor torch is imported."""
    defaults = load_project_defaults()
    if not _may_log_in(overrides, defaults):
        return None
    from echelon.login.composition_cache import CompositionCache
    from echelon.login.early import begin_connection, find_probable_login

    if find_probable_login(overrides, defaults) is None:
        return None
    begin_connection(overrides, defaults)
    cache = CompositionCache(overrides, defaults, os.environ)
    if (known := cache.read()) is not None:
        return known
    cache.watch()
    config = compose_config(overrides)
    cache.write(config)
    return config


def load_project_defaults(*folders: Path) -> FileDefaults:
    """Return the defaults in the echelon.yaml files of the user, the current folder and `folders`.

    The variables that such a file sets are also set in this process, unless they are set already:
    what a person types in front of a command takes precedence over a file.
    """
    from echelon.config.defaults_files import load_defaults

    defaults = load_defaults(os.environ, [Path(), *folders])
    for name, value in defaults.variables.items():
        os.environ.setdefault(name, value)
    return defaults


# --- a user's experiment ---


def make_user_experiment(function: Callable[..., Any]) -> UserExperiment:
    """Return the name, file and declared settings of a function that is an experiment.

    Raises an EchelonError if a worker could not import it, or if its file is being imported by one.
    """
    from echelon.experiment.loading import is_loading
    from echelon.experiment.settings_declaration import describe_experiment

    name, file = function.__qualname__, Path(inspect.getfile(function)).resolve()
    if is_loading():
        raise EchelonError(
            Fault(
                f"{file.name} calls echelon.main while it is being imported",
                'put the call under `if __name__ == "__main__":`',
            )
        )
    if not name.isidentifier():
        raise EchelonError(
            Fault(
                f"the experiment {name!r} is made inside a function, where no worker finds it",
                "define it at the top level of its file",
            )
        )
    return describe_experiment(f"{file}:{name}", function)


def extract_user_experiment(overrides: Sequence[str]) -> tuple[list[str], UserExperiment | None]:
    """Return the overrides without `experiment=FILE.py:FUNCTION`, and that experiment.

    The file is imported, so its top level runs here. A plain name such as `experiment=toy` stays in
    the overrides, for Hydra.
    """
    rest, experiment = [], None
    for word in overrides:
        key, _, value = word.partition("=")
        if key == "experiment" and (":" in value or value.endswith(".py")):
            from echelon.experiment.loading import load_function

            experiment = make_user_experiment(load_function(value))
        else:
            rest.append(word)
    return rest, experiment


def _find_conf_folder(experiment: UserExperiment) -> Path | None:
    """Return the folder `conf` beside the file of an experiment, if it has a config.yaml."""
    folder = Path(experiment.entry.rpartition(":")[0]).parent / "conf"
    return folder if (folder / "config.yaml").exists() else None
