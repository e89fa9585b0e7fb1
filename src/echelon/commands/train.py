"""The commands that start a run: `echelon train`, `echelon resume` and `echelon run`.

`echelon.main` is here too. With it, a user's own file is `echelon train` for its experiment.
"""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from echelon.commands.arguments import (
    RUN_HELP,
    add_help_topics,
    add_plan_arguments,
    make_parser,
    parse_with_overrides,
    split_at_double_dash,
)
from echelon.config.settings_help import (
    ExperimentHelp,
    describe_bundled_settings,
    describe_user_settings,
    list_settings,
    render_overview,
    render_topic,
)
from echelon.errors import EchelonError, ExitCode, Fault

if TYPE_CHECKING:
    from echelon.config.compose import UserExperiment
    from echelon.config.schema import Config
    from echelon.runs.run_folder import Run


def main(
    experiment: Callable[..., Any],
    overrides: Sequence[str] | None = None,
    defaults: Sequence[str] = (),
) -> NoReturn:
    """Train an experiment with the settings of the command line, and exit with its exit code.

    Call it at the end of the file that defines the experiment:

        if __name__ == "__main__":
            echelon.main(experiment)

    The file then takes the arguments of `echelon train`:

        python my_experiment.py lr=0.1 launch=local launch.procs=4
        python my_experiment.py --help

    The condition on `__name__` is required. Workers import the file to find the function, and a
    call during that import would start another training; it is reported as an error instead.

    Parameters:

    experiment  A function at the top level of the file that takes its settings and returns an
                echelon.Experiment. A setting is overridden by its name alone, such as lr=0.1.
    overrides   The words to use instead of those of the command line, such as ["lr=0.1"].
    defaults    Settings of this file, such as ["trainer.epochs=10", "trainer.ema=0.98"]. What is
                typed wins. They hold where the file is run, not for `echelon train experiment=…`.

    main never returns. It raises SystemExit with 0 after a training that ended well, and otherwise
    with one of the codes in echelon.errors.ExitCode. A folder `conf` beside the file that contains
    a config.yaml is composed as Hydra composes it.
    """
    from echelon.cli import run_and_report_faults
    from echelon.entrypoint import make_user_experiment
    from echelon.experiment.loading import is_loading

    if is_loading():
        make_user_experiment(experiment)  # raises; the code that imports the file reports it
    words = [*defaults, *(sys.argv[1:] if overrides is None else overrides)]
    sys.exit(run_and_report_faults(lambda: train(words, make_user_experiment(experiment))))


def train(words: Sequence[str], experiment: UserExperiment | None = None) -> int:
    """Run `echelon train`, and return its exit code.

    A user's own file calls this too, through `echelon.main`, and passes its experiment.
    """
    from echelon.config.untrusted import drop_trial_arguments, read_wandb_trial

    # `wandb agent` appends the parameters of its trial to the command line as text. They are
    # dropped here and applied later from its parameter file, which has them with their types.
    trial = read_wandb_trial(os.environ)

    parser = make_parser(
        "train",
        "Train an experiment. Every setting can be overridden: KEY=VALUE, as in Hydra.",
        lambda: render_overview(_describe_experiment_settings(words, experiment)),
    )
    add_help_topics(
        parser, lambda topic: render_topic(topic, _describe_experiment_settings(words, experiment))
    )
    if experiment is not None:
        parser.prog = f"python {Path(experiment.entry.rpartition(':')[0]).name}"
    add_plan_arguments(parser)
    parser.add_argument(
        "-m",
        "--multirun",
        action="store_true",
        help="a run for each combination: lr=0.1,0.2 seed=range(0,5); on slurm as an array",
    )
    parser.add_argument(
        "--like", metavar="RUN", help="a new run with the settings of this one; what is typed wins"
    )
    given = parse_with_overrides(
        parser,
        drop_trial_arguments(words, trial),
        lambda: _list_setting_names(_describe_experiment_settings(words, experiment)),
    )
    from echelon.entrypoint import train, train_multirun

    if given.multirun and trial:
        parser.error("`wandb agent` asks for one run, so --multirun cannot be")
    if given.multirun and given.json:
        parser.error("--json is for one run")
    if given.like is not None:
        if given.multirun or experiment is not None or trial:
            parser.error("--like is for `echelon train` and one run")
        return _train_like(given.like, given.overrides, given.dry_run, given.json, given.wait)
    if given.multirun:
        return train_multirun(given.overrides, experiment, given.dry_run, given.wait)
    return train(
        given.overrides, experiment, dry_run=given.dry_run, as_json=given.json, wait=given.wait
    )


def _train_like(where: str, overrides: list[str], dry_run: bool, as_json: bool, wait: bool) -> int:
    """Start a new run with the settings of another one, beside it, and return its exit code."""
    from echelon.config.compose import recompose
    from echelon.entrypoint import start_run
    from echelon.runs.find import find_run

    run = find_run(where)
    config = _read_settings(run)
    _require_no_command_elsewhere(run)
    if run.submission_file is not None:
        raise EchelonError(
            Fault(
                f"run {run.name} is a submitted command, whose code and settings are its own",
                "submit the command again with `echelon submit`",
            )
        )
    _require_no_script(run, config)
    experiment = _find_resumed_experiment(config, overrides)
    new = recompose(config, overrides, None, run.folder.parent, user_experiment=experiment)
    return start_run(new, dry_run, as_json, wait)


def _require_no_script(run: Run, config: Config) -> None:
    """Raise EchelonError for a run of a script, which nobody but its author can start."""
    if config.script is not None:
        raise EchelonError(
            Fault(
                f"run {run.name} is of a script with a training loop of its own, {config.script}",
                f"start the script again, with run.name={run.name}",
            )
        )


def _describe_experiment_settings(
    words: Sequence[str], experiment: UserExperiment | None
) -> ExperimentHelp:
    """Return the help on the settings of the experiment that the command line chooses.

    A file that is named with `experiment=FILE.py:FUNCTION` is imported for this.
    """
    from echelon.entrypoint import extract_user_experiment

    rest, named = extract_user_experiment(words)
    if experiment := named or experiment:
        names = experiment.names if experiment.has_exact_names else None
        return describe_user_settings(experiment.entry, experiment.settings, names)
    chosen = [word.partition("=")[2] for word in rest if word.startswith("experiment=")]
    return describe_bundled_settings(chosen[-1] if chosen else "toy")


def _list_setting_names(experiment: ExperimentHelp | None = None) -> list[str]:
    """Return the names of all settings, those of the experiment first."""
    own = experiment.settings if experiment is not None else []
    return [setting.name for setting in [*own, *list_settings()]]


def run(words: list[str]) -> int:
    """Run `echelon run`, which starts any program where a training would run."""
    parser = make_parser(
        "run",
        "Run any program on one process, many, or many machines: echelon run launch=slurm "
        "launch.nodes=2 -- python train.py",
        "modes:\n"
        "  mode=torchrun    an agent per node and torchrun's variables: plain torch,\n"
        "                   Accelerate, Lightning (the default)\n"
        "  mode=srun        one Slurm task per process\n"
        "  mode=lightning   the same, as Lightning expects it; its arguments get\n"
        "                   the world by launch.nodes_flag=--num_nodes and\n"
        "                   launch.gpus_flag=--gpus\n"
        "  mode=plain       once per node, left alone\n"
        "  mode=wandb       for `wandb agent`: one of them, its trial on all nodes\n\n"
        "`echelon train --help` lists the settings of launch.",
    )
    add_plan_arguments(parser)
    parser.add_argument("program", nargs="*", metavar="-- PROGRAM ARGS")
    options, program = split_at_double_dash(words)
    _require_settings_before_double_dash(options, program)
    given = parser.parse_intermixed_args(options)
    from echelon.entrypoint import launch_program

    return launch_program(given.overrides, program, given.dry_run, given.json, given.wait)


def _require_settings_before_double_dash(options: list[str], program: list[str]) -> None:
    """Raise EchelonError if a word before `--` is part of a program.

    Everything that may stand there is an option or KEY=VALUE, so any other word begins the program,
    and its own options must not be parsed as ours.
    """
    first = next((i for i, word in enumerate(options) if word[:1] != "-" and "=" not in word), None)
    if first is None:
        return
    command = ["echelon", "run", *options[:first], "--", *options[first:], *program]
    raise EchelonError(
        Fault(
            f"{options[first]!r} is not a setting KEY=VALUE; a program comes after --",
            shlex.join(command),
        )
    )


def resume(words: list[str]) -> int:
    """Run `echelon resume`, which continues an old run in its own folder."""
    parser = make_parser("resume", "Go on with a run where its newest valid snapshot is.")
    parser.add_argument("run", help=RUN_HELP)
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="e.g. trainer.epochs=10")
    parser.add_argument("--dry-run", action="store_true", help="print the plan and stop")
    given = parse_with_overrides(parser, words, _list_setting_names)
    from echelon.config.compose import recompose
    from echelon.entrypoint import start_run
    from echelon.login.listing import refresh_named
    from echelon.runs.find import find_run
    from echelon.runs.finished_run import describe_finished_run

    run = find_run(given.run)
    refresh_named([given.run], "runs")
    config = _read_settings(run)
    _require_no_command_elsewhere(run)
    if run.submission_file is not None and config.program:
        raise EchelonError(
            Fault(
                f"run {run.name} is a submitted command, whose program knows how to go on",
                "submit the command again, with --requeue if it resumes by itself",
            )
        )
    _require_no_script(run, config)
    if _is_queued_command(run) and not any(word.startswith("launch=") for word in words):
        return _queue_command_again(run, config, given.overrides, given.run, given.dry_run)
    if run.work_folder.is_dir():
        os.chdir(run.work_folder)  # where the experiment's relative paths lead
    if config.trainer.resume == "never" or _has_saved(run):
        # The run may have begun from a snapshot of another run, or with resume=never. Now it has
        # to continue from its own snapshots. First in the list, so that the user can override it.
        given.overrides.insert(0, "trainer.resume=auto")
    experiment = _find_resumed_experiment(config, given.overrides)
    resumed = recompose(
        config, given.overrides, run.name, run.folder.parent, user_experiment=experiment
    )
    if (answer := describe_finished_run(run, config, resumed, given.run)) is not None:
        print(answer)
        return ExitCode.OK
    return start_run(resumed, given.dry_run)


def _read_settings(run: Run) -> Config:
    """Return the settings of a run; of one on a cluster, as they were composed on this machine."""
    from echelon.config.schema import build_config
    from echelon.runs.origin import read_origin
    from echelon.runs.trusted_code import require_trusted_file

    origin = read_origin(run)
    if origin is None:
        return run.read_config()
    require_trusted_file(run.origin_file)
    return build_config(origin.config)


def _require_no_command_elsewhere(run: Run) -> None:
    """Raise EchelonError for a command that was submitted to a cluster by its login node."""
    from echelon.runs.origin import read_origin

    origin = read_origin(run)
    if origin is not None and origin.sweep:
        raise EchelonError(
            Fault(
                f"run {run.name} is a trial of the sweep {origin.sweep} on {origin.host}",
                "the command that began the sweep continues it, typed again",
            )
        )
    if origin is not None and origin.is_command:
        raise EchelonError(
            Fault(
                f"run {run.name} is a submitted command on {origin.host}",
                f"submit it again, or type `echelon resume {origin.folder}` on {origin.host}",
            )
        )


def _has_saved(run: Run) -> bool:
    """Return whether the run has snapshots; those of a run on a cluster are there."""
    is_copy = run.origin_file.exists()
    return run.has_snapshots() or (is_copy and bool(run.read_status_file().get("snapshot")))


def _is_queued_command(run: Run) -> bool:
    """Return whether a run is a training of a submitted command that a queue had started."""
    from echelon.launch.registry import make_launcher

    return run.command_file.exists() and bool(make_launcher(run.read_launch_config()).queue)


def _queue_command_again(
    run: Run, config: Config, overrides: list[str], typed: str, dry_run: bool
) -> int:
    """Continue a training of a submitted command where it ran: in a job of the same command.

    Settings cannot be changed then, as the training has those of its command.
    """
    from echelon.jobs.attach import attach_or_print_hint
    from echelon.runs.finished_run import describe_finished_run
    from echelon.submission.enqueue import enqueue_again

    how = ""
    if overrides:
        how = f"{shlex.join(overrides)} cannot be given to it"
    elif config.trainer.resume != "auto":
        how = f"its trainer.resume={config.trainer.resume} would not continue the run"
    if how:
        raise EchelonError(
            Fault(
                f"run {run.name} is a training of a submitted command, and {how}",
                "train without the command: add launch=inline for this machine, or launch=slurm "
                "with launch.nodes and its like",
            )
        )
    if (answer := describe_finished_run(run, config, config, typed)) is not None:
        print(f"{answer} launch=inline")  # its last word is a setting, for which see above
        return ExitCode.OK
    if dry_run:
        print(f"run {run.name} is queued again, with {run.script_file}")
        return ExitCode.OK
    print(enqueue_again(run))
    return attach_or_print_hint(run.read_launch_config(), wait=False)


def _find_resumed_experiment(config: Config, overrides: Sequence[str]) -> UserExperiment | None:
    """Return the experiment of a run, if it is a user's and one of its settings is changed.

    Its file is imported for that, which takes seconds; otherwise its settings stay as they are.
    """
    from echelon.config.given_values import SECTIONS

    entry = str(config.experiment.get("entry", ""))
    changes_own = any(
        word.lstrip("+~").partition("=")[0].partition(".")[0] not in SECTIONS[1:]
        for word in overrides
    )
    if not changes_own or not entry.rpartition(":")[0].endswith(".py"):
        return None
    from echelon.experiment.loading import load_function
    from echelon.experiment.settings_declaration import describe_experiment

    return describe_experiment(entry, load_function(entry))
