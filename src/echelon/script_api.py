"""`echelon.session`, for a script that has a command line and a main program of its own."""

from __future__ import annotations

import dataclasses
import json
import multiprocessing
import os
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from echelon.config.schema import Config
from echelon.errors import EchelonError, Fault

if TYPE_CHECKING:
    from echelon.train.script_session import ScriptSession


@dataclasses.dataclass
class _NoSettings:
    """A script declares no settings: it has read them itself."""


def session(*overrides: str, settings: Mapping[str, Any] | None = None) -> ScriptSession:
    """Return a block in which this process is one rank of a training, with its own loop:

        with echelon.session("run.name=gan", "trainer.save.minutes=10") as session:
            model, optimizer = session.prepare(model, optimizer)
            for x, y in session.batches(data, batch_size=64, epochs=3):
                loss = torch.nn.functional.cross_entropy(model(x), y)
                session.backward(loss)
                session.step(optimizer)
                session.log(loss=loss)

    The script keeps its command line, which is not read here, and is started as before: `python
    script.py` alone, `torchrun --nproc_per_node=4 script.py`, `srun`, `echelon run`, `echelon
    submit`. Started again with the same run.name it continues from the newest snapshot; without a
    name every start is a new run, named after the script.

    The end of the block is the end of the training. An error in the block is reported once, with
    the rank and the step, to all processes, and the script exits with its code. A stop by a signal
    ends the block after an iteration, and the script exits with 75. `session` is an
    echelon.Session.

    Parameters:

    overrides  Settings of Echelon as on the command line: "trainer.batch_size=64".
    settings   Values of the script's own to keep with the run, such as {"lr": args.lr}. They are
               shown by `echelon runs`; a run that continues must have the same.
    """
    from echelon.train.script_session import ScriptSession

    return ScriptSession(partial(_compose_config, overrides, settings or {}))


def _compose_config(overrides: Sequence[str], settings: Mapping[str, Any]) -> Config:
    """Return the configuration of a script's session, or raise all its faults."""
    from echelon.config.compose import UserExperiment, compose
    from echelon.entrypoint import check_run_in_process, load_project_defaults
    from echelon.launch.registry import make_launcher
    from echelon.runs.submitted_run import place_beside_submitted_run

    _require_main_program()
    words = [str(word) for word in overrides]
    script = getattr(sys.modules.get("__main__"), "__file__", None)
    entry = f"{Path(script).resolve() if script else 'notebook'}:"
    config = compose(words, UserExperiment(entry, _NoSettings), defaults=load_project_defaults())
    if not (launcher := make_launcher(config)).trains_in_process:
        raise EchelonError(
            Fault(
                f"launch={launcher.name}, but echelon.session is in a process that runs already",
                f"let it start the script: echelon run launch={launcher.name} … -- python SCRIPT",
            )
        )
    kept = json.loads(json.dumps(dict(settings), default=str))
    config = dataclasses.replace(config, experiment=kept | config.experiment)
    return check_run_in_process(place_beside_submitted_run(config, os.environ))


def _require_main_program() -> None:
    """Raise where a file is imported by a process that the script itself has started."""
    from echelon.experiment.loading import is_loading

    if is_loading() or getattr(multiprocessing.current_process(), "_inheriting", False):
        raise EchelonError(
            Fault(
                "echelon.session is called while its file is being imported",
                'put what the script does under `if __name__ == "__main__":`',
            )
        )
