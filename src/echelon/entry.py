"""From a configuration to a run: the way in for `echelon train` and for a user's own file."""

from __future__ import annotations

import inspect
import os
import socket
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from echelon.config.schema import Config
from echelon.errors import EchelonError, Exit, Fault

if TYPE_CHECKING:
    from echelon.config.compose import OwnExperiment


def main(experiment: Callable[..., Any], overrides: Sequence[str] | None = None) -> NoReturn:
    """Make a file runnable: `python my_experiment.py lr=0.1 launch=local launch.procs=4`.

    `experiment` is a function from its settings to an echelon.Experiment. A `conf` folder beside
    the file, with a config.yaml in it, is composed the Hydra way.
    """
    from echelon.cli import guarded, train_words
    from echelon.train.experiment import loading

    if loading():
        own_experiment(experiment)  # raises, and who is importing the file reports it
    words = list(sys.argv[1:] if overrides is None else overrides)
    sys.exit(guarded(lambda: train_words(words, own_experiment(experiment))))


def train(
    overrides: Sequence[str],
    own: OwnExperiment | None = None,
    dry_run: bool = False,
    as_json: bool = False,
) -> int:
    """Compose, plan, and carry it out; a dry run stops before anything happens."""
    from echelon.config.compose import compose

    rest, named = _experiment_by_path(overrides)
    own = named or own
    config = compose(rest, own, _conf_beside(own) if own else None)
    return start(config, dry_run, as_json)


def start(config: Config, dry_run: bool = False, as_json: bool = False) -> int:
    from echelon.config.check import batch_fault
    from echelon.gpus import visible_count
    from echelon.launch.plan import make_plan

    plan = make_plan(config, os.environ, socket.gethostname(), visible_count(os.environ))
    if fault := batch_fault(config.trainer.batch_size, len(plan.places)):
        raise EchelonError(fault)
    if dry_run:
        plan.show(as_json)
        return Exit.OK
    if config.launch.kind == "inline":
        from echelon.train.worker import train_here

        return train_here(config)
    from echelon import runs
    from echelon.launch.local import launch

    return launch(runs.create(config), config.launch, plan)


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


def _experiment_by_path(overrides: Sequence[str]) -> tuple[list[str], OwnExperiment | None]:
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
