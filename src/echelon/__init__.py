"""Echelon takes a PyTorch training from a laptop to a cluster.

Nothing is imported until it is used, so that the command line starts in a blink.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from echelon import optim
    from echelon.entrypoint import main
    from echelon.experiment.definition import Experiment
    from echelon.snapshot.reader import load_weights

__version__ = "0.1.0"
__all__ = ["Experiment", "__version__", "load_weights", "main", "optim"]


def __getattr__(name: str) -> Any:
    if name == "Experiment":
        from echelon.experiment.definition import Experiment

        return Experiment
    if name == "load_weights":
        from echelon.snapshot.reader import load_weights

        return load_weights
    if name == "main":
        from echelon.entrypoint import main

        return main
    if name == "optim":
        return import_module("echelon.optim")
    raise AttributeError(f"module 'echelon' has no attribute {name!r}")
