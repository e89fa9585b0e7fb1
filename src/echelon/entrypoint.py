"""From a configuration to a run: the way in for `echelon train` and for a user's own file."""

from __future__ import annotations

import importlib
import inspect
import json
import os
import signal
import socket
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from echelon.config.schema import Config, build_config
from echelon.errors import EchelonError, Exit, Fault
from echelon.runs import run_folder

if TYPE_CHECKING:
    from echelon.config.compose import UserExperiment
    from echelon.config.untrusted import WandbTrial
    from echelon.config.user_defaults import UserDefaults
    from echelon.launch.plan import RankPlacement
    from echelon.submit.plan import Submission, SubmitRequest


LAUNCHER_MODULES = {
    "inline": "inline",
    "local": "local",
    "env": "env",
    "ssh": "ssh.launcher",
    "slurm": "slurm.launcher",
}
"""Where in `launch` each has its `plan` and `carry_out`."""


def main(experiment: Callable[..., Any], overrides: Sequence[str] | None = None) -> NoReturn:
    """Make a file runnable: `python my_experiment.py lr=0.1 launch=local launch.procs=4`.

    `experiment` is a function from its settings to an echelon.Experiment. A `conf` folder beside
    the file, with a config.yaml in it, is composed the Hydra way.
    """
    from echelon.cli import run_guarded
    from echelon.commands.train import train as train_words
    from echelon.experiment.definition import is_loading

    if is_loading():
        inspect_experiment(experiment)  # raises, and who is importing the file reports it
    words = list(sys.argv[1:] if overrides is None else overrides)
    sys.exit(run_guarded(lambda: train_words(words, inspect_experiment(experiment))))


def train(
    overrides: Sequence[str],
    experiment: UserExperiment | None = None,
    dry_run: bool = False,
    as_json: bool = False,
    wait: bool = False,
) -> int:
    """Compose, plan, and carry it out; a dry run stops before anything happens."""
    from echelon.config.untrusted import read_trial

    trial = read_trial(os.environ)
    # An agent would take the end of a submission for the end of the trial.
    waits = wait or trial is not None
    return start_run(compose_config(overrides, experiment, trial=trial), dry_run, as_json, waits)


def compose_config(
    overrides: Sequence[str],
    experiment: UserExperiment | None = None,
    program: Sequence[str] = (),
    trial: WandbTrial | None = None,
) -> Config:
    """The configuration of one run, of whatever experiment or program."""
    from echelon.config.compose import compose
    from echelon.config.untrusted import apply_trial

    rest, named_experiment = split_experiment_path(overrides)
    experiment = named_experiment or experiment
    conf_dir = _find_conf_folder(experiment) if experiment else None
    config = compose(rest, experiment, conf_dir, program, defaults=_load_defaults())
    inline = config.launch.kind == "inline"  # there rank 0 takes the parameters, once it is known
    return config if inline else apply_trial(config, trial, experiment)


def start_from_json(text: str) -> NoReturn:
    """A configuration that was composed elsewhere, in a process that was forked for it."""
    from echelon.cli import run_guarded
    from echelon.train.worker import exit_process

    config = build_config(json.loads(text))
    if config.launch.kind == "ssh":  # the others listen before they let signals in
        signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGTERM, signal.SIGUSR2))
    exit_process(run_guarded(lambda: start_run(config)))


def train_multirun(
    overrides: Sequence[str], experiment: UserExperiment | None = None, dry_run: bool = False
) -> int:
    """One run for every combination of the values that are listed."""
    from echelon.config.compose import compose
    from echelon.config.multirun import expand_multirun

    rest, named_experiment = split_experiment_path(overrides)
    experiment = named_experiment or experiment
    conf_dir = _find_conf_folder(experiment) if experiment else None
    defaults = _load_defaults()
    configs = run_folder.assign_numbered_names(
        [compose(words, experiment, conf_dir, defaults=defaults) for words in expand_multirun(rest)]
    )
    if configs[0].launch.kind == "slurm":
        from echelon.launch.slurm.job_array import submit_arrays

        _load_secrets(configs[0], "slurm", dry_run)
        return submit_arrays(configs, dry_run)
    return max(_run_until_stopped(start_run(config, dry_run) for config in configs))


def _run_until_stopped(codes: Iterable[int]) -> list[int]:
    """Who stops one run means those after it too."""
    exit_codes: list[int] = []
    for code in codes:
        exit_codes.append(code)
        if code in (Exit.PREEMPTED, Exit.INTERRUPTED):
            break
    return exit_codes


def run_program(
    overrides: Sequence[str],
    program: Sequence[str],
    dry_run: bool = False,
    as_json: bool = False,
    wait: bool = False,
) -> int:
    """Somebody else's program where an experiment would be."""
    from echelon.config.compose import compose

    if not program:
        raise EchelonError(
            Fault("no program is given", "echelon run launch=local launch.procs=2 -- python FILE")
        )
    config = compose(overrides, program=program, defaults=_load_defaults())
    return start_run(config, dry_run, as_json, wait)


def submit_commands(request: SubmitRequest, dry_run: bool, as_json: bool, wait: bool) -> int:
    """The commands of a file, from the code as it is now, each as a run of its own."""
    from echelon.submit import enqueue
    from echelon.submit import plan as plans
    from echelon.submit.prerequisites import require_prerequisites
    from echelon.submit.render import print_submission

    submission = plans.plan_submission(
        request, _load_defaults(request.source or Path()), os.environ
    )
    require_prerequisites(submission, os.environ)
    if dry_run:
        print_submission(submission, submission.build_jobs(), as_json)
        return Exit.OK
    with enqueue.prepare_submission(submission, os.environ) as submission:
        if submission.kind != "slurm":
            return _run_submission_here(submission)  # what is printed is the programs' own
        queued = []
        for queued_job in enqueue.enqueue_jobs(submission.build_jobs()):
            queued.append(queued_job.to_dict())
            if not as_json:
                print(queued_job, flush=True)
    if as_json:
        print(json.dumps(submission.to_dict() | {"jobs": queued}, indent=2))
    if len(submission.commands) == 1 and not as_json:
        return follow_run(submission.configs[0], wait)
    if not as_json:
        place = submission.folder.parent
        where = "" if place == Path("runs").absolute() else f" --dir {place}"
        print(f"  follow it  echelon jobs {submission.name} --watch{where}")
        print(f"  end it     echelon cancel {submission.name}{where}")
    return enqueue.wait_for_runs(submission.runs) if wait else Exit.OK


def _run_submission_here(submission: Submission) -> int:
    """One after the other; as in an array, one that fails does not keep the others from running."""
    from echelon.submit.enqueue import capture_shell_environment

    variables = capture_shell_environment(
        submission.render_environment_setup(), submission.source_copy, dict(os.environ)
    )
    os.chdir(submission.source_copy)

    def start_afresh(config: Config) -> int:
        os.environ.clear()
        os.environ.update(variables)
        return start_run(config)

    codes = _run_until_stopped(map(start_afresh, submission.configs))
    return next((code for code in codes if code), Exit.OK)


def _load_defaults(*folders: Path) -> UserDefaults:
    """Of the user and of the project that is here, or in these folders."""
    from echelon.config.user_defaults import load_defaults

    found = load_defaults(os.environ, [Path(), *folders])
    for name, value in found.variables.items():
        os.environ.setdefault(name, value)
    return found


def start_run(
    config: Config, dry_run: bool = False, as_json: bool = False, wait: bool = False
) -> int:
    """Plan it, and carry out the plan."""
    from echelon.config.validate import check_batch_size, check_cpu_support, check_fsdp_world_size
    from echelon.gpus import count_visible_gpus
    from echelon.launch.plan import LaunchMachine
    from echelon.tracking.create import require_trackers

    kind = "local" if config.program and config.launch.kind == "inline" else config.launch.kind
    launcher = importlib.import_module(f"echelon.launch.{LAUNCHER_MODULES[kind]}")
    if kind in ("ssh", "slurm"):
        config = run_folder.assign_name(config)
    config = _load_secrets(config, kind, dry_run)
    here = LaunchMachine(os.environ, socket.gethostname(), count_visible_gpus(os.environ))
    plan = launcher.plan(config, here)
    faults: list[Fault] = []
    if not config.program and (
        fault := check_batch_size(config.trainer.batch_size, len(plan.places))
    ):
        faults.append(fault)
    if kind in ("local", "env", "slurm") and (
        fault := check_fsdp_world_size(config, len(plan.places))
    ):
        faults.append(fault)
    if kind == "local" and not config.program and not here.visible_devices:
        faults += check_cpu_support(config)
    if faults:
        raise EchelonError(*faults)
    if not config.program and kind != "ssh" and plan.places[0].rank == 0:
        require_trackers(config, os.environ)
    if dry_run:
        plan.print_plan(as_json)
        return Exit.OK
    if kind in ("local", "ssh", "slurm"):
        _require_not_running(config)
    if config.launch.preflight and kind in ("local", "ssh"):
        _require_preflight_passes(config)
    if kind in ("inline", "local") and here.visible_devices:
        _warn_of_shared_devices(plan.places, config.launch.share_devices)
    if config.program and config.mode == "wandb" and kind == "local":
        from echelon.submit.wandb_agent import run_agent_here

        return run_agent_here(config, run_folder.create_run(config))
    if kind == "inline":
        from echelon.train.worker import train_in_process

        return train_in_process(config)
    code: int = launcher.start(config, plan)
    return follow_run(config, wait) if kind == "slurm" else code


def _warn_of_shared_devices(places: Sequence[RankPlacement], shared: bool) -> None:
    """Somebody else's training on the same device makes both slow, or one run out of memory."""
    from echelon.gpus.occupancy import describe_other_users

    devices = [device for place in places for device in place.devices]
    for line in describe_other_users(devices, os.environ, shared):
        print(f"warning: {line}", file=sys.stderr, flush=True)


def _load_secrets(config: Config, kind: str, dry_run: bool) -> Config:
    """A batch job reads them itself, other hosts get them with the variables that are carried."""
    if not config.launch.secrets or dry_run:
        return config
    from echelon.config.user_defaults import read_secrets

    secrets = read_secrets(config.launch.secrets)
    if kind != "slurm":
        os.environ.update(secrets)
    if kind != "ssh":
        return config
    carry = [*config.launch.carry, *secrets]
    return replace(config, launch=replace(config.launch, carry=carry))


def run_preflight(
    overrides: Sequence[str],
    run_name: str | None,
    root: str,
    as_json: bool,
    limit_s: float,
    wait_s: float,
) -> int:
    """`echelon preflight`, of what would be typed after `echelon train`, or of a run."""
    from echelon.preflight.command import check_job_nodes

    if run_name is not None:
        run = run_folder.find_run(run_name, root)
        config = run.read_config()
        config = replace(config, run=replace(config.run, name=run.name, dir=str(run.folder.parent)))
    else:
        config = compose_config(overrides)
    return check_job_nodes(config, as_json, limit_s, wait_s)


def _require_preflight_passes(config: Config) -> None:
    """launch.preflight=true. With Slurm the batch script does it, on the nodes of the job."""
    from echelon.preflight.command import check_job_nodes

    code = check_job_nodes(config)
    if code != Exit.OK:
        raise EchelonError(
            Fault(
                "launch.preflight=true, and the machines are not ready: see above",
                "mend what failed, or start without launch.preflight",
            ),
            exit=Exit(code),
        )


def _require_not_running(config: Config) -> None:
    """Two at once would write over each other's snapshots."""
    from echelon.launch.process_record import is_alive

    run = run_folder.Run.from_config(config)
    status = run.read_status() if config.run.name else {}
    is_active = status.get("state") in ("starting", "running")
    if is_active and is_alive(status.get("process")):
        raise EchelonError(
            Fault(
                f"run {run.name} is running already, as process {status['process']['pid']}",
                f"follow it with `echelon attach {run.name}`, or end it with "
                f"`echelon cancel {run.name}`",
            )
        )


def follow_run(config: Config, wait: bool) -> int:
    """A job that is queued: say how to look at it, or look at it to its end."""
    run = run_folder.find_run(str(config.run.name), config.run.dir)
    if wait:
        from echelon.jobs.attach import attach_run

        return attach_run(run, initial_lines=0)
    dir_option = "" if run.folder.parent == Path("runs").absolute() else f" --dir {config.run.dir}"
    print(
        f"  follow it  echelon logs {run.name} -f{dir_option}\n  all runs   echelon jobs{dir_option}"
    )
    return Exit.OK


def inspect_experiment(function: Callable[..., Any]) -> UserExperiment:
    from echelon.config.compose import UserExperiment
    from echelon.experiment.definition import find_settings_class, is_loading

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
    return UserExperiment(f"{file}:{name}", find_settings_class(function))


def split_experiment_path(overrides: Sequence[str]) -> tuple[list[str], UserExperiment | None]:
    """`experiment=path/to/file.py:function` is ours to read; a plain name is Hydra's."""
    rest, experiment = [], None
    for word in overrides:
        key, _, value = word.partition("=")
        if key == "experiment" and (":" in value or value.endswith(".py")):
            from echelon.experiment.definition import load_function

            experiment = inspect_experiment(load_function(value))
        else:
            rest.append(word)
    return rest, experiment


def _find_conf_folder(experiment: UserExperiment) -> Path | None:
    folder = Path(experiment.entry.rpartition(":")[0]).parent / "conf"
    return folder if (folder / "config.yaml").exists() else None
