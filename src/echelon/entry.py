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

from echelon import runs
from echelon.config.schema import Config, build
from echelon.errors import EchelonError, Exit, Fault

if TYPE_CHECKING:
    from echelon.config.compose import OwnExperiment
    from echelon.config.defaults import Defaults
    from echelon.config.outside import Trial
    from echelon.launch.plan import Place
    from echelon.submit.plan import Request, Submission


LAUNCHERS = {
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
    from echelon.cli import guarded
    from echelon.train.experiment import loading
    from echelon.verbs.training import train as train_words

    if loading():
        own_experiment(experiment)  # raises, and who is importing the file reports it
    words = list(sys.argv[1:] if overrides is None else overrides)
    sys.exit(guarded(lambda: train_words(words, own_experiment(experiment))))


def train(
    overrides: Sequence[str],
    own: OwnExperiment | None = None,
    dry_run: bool = False,
    as_json: bool = False,
    wait: bool = False,
) -> int:
    """Compose, plan, and carry it out; a dry run stops before anything happens."""
    from echelon.config.outside import trial_of

    trial = trial_of(os.environ)
    # An agent would take the end of a submission for the end of the trial.
    waits = wait or trial is not None
    return start(composed(overrides, own, trial=trial), dry_run, as_json, waits)


def composed(
    overrides: Sequence[str],
    own: OwnExperiment | None = None,
    program: Sequence[str] = (),
    trial: Trial | None = None,
) -> Config:
    """The configuration of one run, of whatever experiment or program."""
    from echelon.config.compose import compose
    from echelon.config.outside import as_trial

    rest, named = experiment_by_path(overrides)
    own = named or own
    conf_dir = _conf_beside(own) if own else None
    config = compose(rest, own, conf_dir, program, defaults=_defaults())
    inline = config.launch.kind == "inline"  # there rank 0 takes the parameters, once it is known
    return config if inline else as_trial(config, trial, own)


def start_resolved(text: str) -> NoReturn:
    """A configuration that was composed elsewhere, in a process that was forked for it."""
    from echelon.cli import guarded
    from echelon.train.worker import leave

    config = build(json.loads(text))
    if config.launch.kind == "ssh":  # the others listen before they let signals in
        signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGTERM, signal.SIGUSR2))
    leave(guarded(lambda: start(config)))


def train_all(
    overrides: Sequence[str], own: OwnExperiment | None = None, dry_run: bool = False
) -> int:
    """One run for every combination of the values that are listed."""
    from echelon.config.compose import compose
    from echelon.config.several import expand

    rest, named = experiment_by_path(overrides)
    own = named or own
    conf_dir = _conf_beside(own) if own else None
    defaults = _defaults()
    configs = runs.numbered(
        [compose(words, own, conf_dir, defaults=defaults) for words in expand(rest)]
    )
    if configs[0].launch.kind == "slurm":
        from echelon.launch.slurm.array import submit_all

        _with_secrets(configs[0], "slurm", dry_run)
        return submit_all(configs, dry_run)
    return max(_until_stopped(start(config, dry_run) for config in configs))


def _until_stopped(codes: Iterable[int]) -> list[int]:
    """Who stops one run means those after it too."""
    made: list[int] = []
    for code in codes:
        made.append(code)
        if code in (Exit.PREEMPTED, Exit.INTERRUPTED):
            break
    return made


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
    config = compose(overrides, program=program, defaults=_defaults())
    return start(config, dry_run, as_json, wait)


def submit(request: Request, dry_run: bool, as_json: bool, wait: bool) -> int:
    """The commands of a file, from the code as it is now, each as a run of its own."""
    from echelon.submit import plan as plans
    from echelon.submit import send
    from echelon.submit.missing import require_all_there
    from echelon.submit.show import show

    submission = plans.plan(request, _defaults(request.source or Path()), os.environ)
    require_all_there(submission, os.environ)
    if dry_run:
        show(submission, submission.jobs(), as_json)
        return Exit.OK
    with send.prepared(submission, os.environ) as submission:
        if submission.kind != "slurm":
            return _run_here(submission)  # what is printed is the programs' own
        queued = []
        for each in send.queue(submission.jobs()):
            queued.append(each.to_dict())
            if not as_json:
                print(each, flush=True)
    if as_json:
        print(json.dumps(submission.to_dict() | {"jobs": queued}, indent=2))
    if len(submission.entries) == 1 and not as_json:
        return follow(submission.configs[0], wait)
    if not as_json:
        place = submission.folder.parent
        where = "" if place == Path("runs").absolute() else f" --dir {place}"
        print(f"  follow it  echelon jobs {submission.name} --watch{where}")
        print(f"  end it     echelon cancel {submission.name}{where}")
    return send.wait_for(submission.runs) if wait else Exit.OK


def _run_here(submission: Submission) -> int:
    """One after the other; as in an array, one that fails does not keep the others from running."""
    from echelon.submit.send import entered

    variables = entered(submission.enter(), submission.copy, dict(os.environ))
    os.chdir(submission.copy)

    def start_afresh(config: Config) -> int:
        os.environ.clear()
        os.environ.update(variables)
        return start(config)

    codes = _until_stopped(map(start_afresh, submission.configs))
    return next((code for code in codes if code), Exit.OK)


def _defaults(*folders: Path) -> Defaults:
    """Of the user and of the project that is here, or in these folders."""
    from echelon.config.defaults import load

    found = load(os.environ, [Path(), *folders])
    for name, value in found.variables.items():
        os.environ.setdefault(name, value)
    return found


def start(config: Config, dry_run: bool = False, as_json: bool = False, wait: bool = False) -> int:
    """Plan it, and carry out the plan."""
    from echelon.config.check import batch_fault, cpu_faults, replica_fault
    from echelon.gpus import visible_count
    from echelon.launch.plan import Here
    from echelon.track.choice import require

    kind = "local" if config.program and config.launch.kind == "inline" else config.launch.kind
    launcher = importlib.import_module(f"echelon.launch.{LAUNCHERS[kind]}")
    if kind in ("ssh", "slurm"):
        config = runs.named(config)
    config = _with_secrets(config, kind, dry_run)
    here = Here(os.environ, socket.gethostname(), visible_count(os.environ))
    plan = launcher.plan(config, here)
    faults: list[Fault] = []
    if not config.program and (fault := batch_fault(config.trainer.batch_size, len(plan.places))):
        faults.append(fault)
    if kind in ("local", "env", "slurm") and (fault := replica_fault(config, len(plan.places))):
        faults.append(fault)
    if kind == "local" and not config.program and not here.visible:
        faults += cpu_faults(config)
    if faults:
        raise EchelonError(*faults)
    if not config.program and kind != "ssh" and plan.places[0].rank == 0:
        require(config, os.environ)
    if dry_run:
        plan.show(as_json)
        return Exit.OK
    if kind in ("local", "ssh", "slurm"):
        _require_idle(config)
    if config.launch.preflight and kind in ("local", "ssh"):
        _require_ready(config)
    if kind in ("inline", "local") and here.visible:
        _warn_of_company(plan.places, config.launch.share_devices)
    if config.program and config.mode == "wandb" and kind == "local":
        from echelon.submit.trial import run_here

        return run_here(config, runs.create(config))
    if kind == "inline":
        from echelon.train.worker import train_here

        return train_here(config)
    code: int = launcher.carry_out(config, plan)
    return follow(config, wait) if kind == "slurm" else code


def _warn_of_company(places: Sequence[Place], shared: bool) -> None:
    """Somebody else's training on the same device makes both slow, or one run out of memory."""
    from echelon.gpus.busy import company

    devices = [device for place in places for device in place.devices]
    for line in company(devices, os.environ, shared):
        print(f"warning: {line}", file=sys.stderr, flush=True)


def _with_secrets(config: Config, kind: str, dry_run: bool) -> Config:
    """A batch job reads them itself, other hosts get them with the variables that are carried."""
    if not config.launch.secrets or dry_run:
        return config
    from echelon.config.defaults import secrets_of

    found = secrets_of(config.launch.secrets)
    if kind != "slurm":
        os.environ.update(found)
    if kind != "ssh":
        return config
    carry = [*config.launch.carry, *found]
    return replace(config, launch=replace(config.launch, carry=carry))


def check_nodes(
    overrides: Sequence[str],
    run_name: str | None,
    root: str,
    as_json: bool,
    limit_s: float,
    wait_s: float,
) -> int:
    """`echelon preflight`, of what would be typed after `echelon train`, or of a run."""
    from echelon.check.preflight import preflight

    if run_name is not None:
        run = runs.open_run(run_name, root)
        config = run.config()
        config = replace(config, run=replace(config.run, name=run.name, dir=str(run.folder.parent)))
    else:
        config = composed(overrides)
    return preflight(config, as_json, limit_s, wait_s)


def _require_ready(config: Config) -> None:
    """launch.preflight=true. With Slurm the batch script does it, on the nodes of the job."""
    from echelon.check.preflight import preflight

    code = preflight(config)
    if code != Exit.OK:
        raise EchelonError(
            Fault(
                "launch.preflight=true, and the machines are not ready: see above",
                "mend what failed, or start without launch.preflight",
            ),
            exit=Exit(code),
        )


def _require_idle(config: Config) -> None:
    """Two at once would write over each other's snapshots."""
    from echelon.launch.process import is_alive

    run = runs.Run.of(config)
    status = run.status() if config.run.name else {}
    at_work = status.get("state") in ("starting", "running")
    if at_work and is_alive(status.get("process")):
        raise EchelonError(
            Fault(
                f"run {run.name} is running already, as process {status['process']['pid']}",
                f"follow it with `echelon attach {run.name}`, or end it with "
                f"`echelon cancel {run.name}`",
            )
        )


def follow(config: Config, wait: bool) -> int:
    """A job that is queued: say how to look at it, or look at it to its end."""
    run = runs.open_run(str(config.run.name), config.run.dir)
    if wait:
        from echelon.jobs.attach import attach

        return attach(run, begin_with=0)
    where = "" if run.folder.parent == Path("runs").absolute() else f" --dir {config.run.dir}"
    print(f"  follow it  echelon logs {run.name} -f{where}\n  all runs   echelon jobs{where}")
    return Exit.OK


def own_experiment(function: Callable[..., Any]) -> OwnExperiment:
    from echelon.config.compose import OwnExperiment
    from echelon.train.experiment import declared_settings, loading

    name, file = function.__qualname__, Path(inspect.getfile(function)).resolve()
    if loading():
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
    return OwnExperiment(f"{file}:{name}", declared_settings(function))


def experiment_by_path(overrides: Sequence[str]) -> tuple[list[str], OwnExperiment | None]:
    """`experiment=path/to/file.py:function` is ours to read; a plain name is Hydra's."""
    rest, own = [], None
    for word in overrides:
        key, _, value = word.partition("=")
        if key == "experiment" and (":" in value or value.endswith(".py")):
            from echelon.train.experiment import load_function

            own = own_experiment(load_function(value))
        else:
            rest.append(word)
    return rest, own


def _conf_beside(own: OwnExperiment) -> Path | None:
    folder = Path(own.entry.rpartition(":")[0]).parent / "conf"
    return folder if (folder / "config.yaml").exists() else None
