"""Echelon takes a PyTorch training from a laptop to a cluster without changing its code.

A file with an experiment and one call is all that is needed:

    import echelon
    import torch

    def experiment(cfg):
        model = torch.nn.Linear(8, 1)
        return echelon.Experiment(
            model=model,
            optimizer=torch.optim.SGD(model.parameters(), lr=cfg.lr),
            loss=torch.nn.functional.mse_loss,
            train_data=(torch.randn(1000, 8), torch.randn(1000, 1)),
        )

    if __name__ == "__main__":
        echelon.main(experiment)

It runs as `python file.py lr=0.1`, and on four processes with `launch=local launch.procs=4`.

    echelon.main          makes a file runnable from the command line; it never returns
    echelon.session       a block in which a script of your own is a training
    echelon.Experiment    the parts to train, which an experiment function returns
    echelon.TrainingInfo  what an experiment function may know of its training
    echelon.Session       what a function with a training loop of its own is given
    echelon.Image         an image, or a grid of them, for Session.log
    echelon.Histogram     a histogram of a tensor, for Session.log
    echelon.TransientError  raised by your code, has its process replaced and not the run ended
    echelon.submit        runs a command or a function as a job, and returns an object to wait for
    echelon.load          returns the trained model of a run with its weights, for inference
    echelon.load_weights  returns the weights of a snapshot, for another program
    echelon.data          files as data, mixtures of them, and streams without a length
    echelon.optim         RowAdam and RowSGD, for models with large embedding tables
    echelon.__version__   the version of this package, as a string

Each of these has its own help page, such as `help(echelon.Experiment)`. A name is imported when it
is first used, so `import echelon` is fast and does not import torch.

Everything else in the package is internal and may change. Programs that need the results of a run
read them with `echelon runs --json` and `echelon show --json`.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from echelon import data, optim
    from echelon.commands.train import main
    from echelon.errors import TransientError
    from echelon.experiment.definition import Experiment
    from echelon.experiment.training_info import TrainingInfo
    from echelon.python_api import submit
    from echelon.script_api import session
    from echelon.snapshot.load_model import load
    from echelon.snapshot.reader import load_weights
    from echelon.train.media import Histogram, Image
    from echelon.train.session import Session

__version__ = "0.2.0"
__all__ = [
    "Experiment",
    "Histogram",
    "Image",
    "Session",
    "TrainingInfo",
    "TransientError",
    "__version__",
    "data",
    "load",
    "load_weights",
    "main",
    "optim",
    "session",
    "submit",
]


_MODULE_OF = {
    "Experiment": "echelon.experiment.definition",
    "TrainingInfo": "echelon.experiment.training_info",
    "TransientError": "echelon.errors",
    "Session": "echelon.train.session",
    "Image": "echelon.train.media",
    "Histogram": "echelon.train.media",
    "load": "echelon.snapshot.load_model",
    "load_weights": "echelon.snapshot.reader",
    "main": "echelon.commands.train",
    "session": "echelon.script_api",
    "submit": "echelon.python_api",
}


def __getattr__(name: str) -> Any:
    """Imports a public name at its first use (PEP 562)."""
    if name in ("data", "optim"):
        return import_module(f"echelon.{name}")
    if name in _MODULE_OF:
        return getattr(import_module(_MODULE_OF[name]), name)
    raise AttributeError(f"module 'echelon' has no attribute {name!r}")


def __dir__() -> list[str]:
    """Lists the public names, also those not imported yet, for `help` and for completion."""
    return sorted({*globals(), *__all__})
