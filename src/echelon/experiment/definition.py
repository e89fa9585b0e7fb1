"""What a user gives us: the parts to train. And how a name becomes those parts."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_type_hints

import torch
from torch import Tensor, nn

from echelon.errors import EchelonError, Exit, Fault, suggest_nearest
from echelon.experiment.checks import describe_wrong_type, find_part_faults

if TYPE_CHECKING:
    from torchmetrics import Metric

    Metrics = Metric | Mapping[str, Metric]

_is_loading = False

Predict = Callable[[nn.Module, Any], tuple[Any, Any]]


@dataclass
class Experiment:
    """The parts to train, the same on every rank and at any scale.

    model       what is trained. It is moved to its device for you, and put into training mode, but
                for parts that are in eval mode and frozen.
    optimizer   of the model's parameters. Models with sparse embeddings take
                echelon.optim.RowAdam or RowSGD.
    loss        loss(output, target) → one number: the mean over the samples of the batch.
                Every torch.nn.functional loss does so by itself.
    train_data  a tuple of tensors or numpy arrays, (*inputs, target), with one row per sample; or
                a Dataset with a length. Batches are made of it by trainer.batch_size, shuffled
                anew in every epoch, and fetched ahead by trainer.loader_workers.
    eval_data   the same, to evaluate by; without it nothing is evaluated.
    metrics     a torchmetrics.Metric, or several as {name: Metric}: updated with (output, target)
                of every batch of eval_data. Or a function that makes them, which is called when
                the first evaluation needs them, so that a start does not wait for their import.
    schedule    a learning-rate schedule of your own (torch.optim.lr_scheduler), stepped once per
                optimizer step; without it, trainer.schedule and trainer.warmup_steps decide.
    scaler      a torch.amp.GradScaler, for half precision: it scales the loss, and skips a step
                whose gradients overflow.
    predict     predict(model, batch) → (output, target). Without it a batch is (*inputs, target),
                and the output is model(*inputs). Give one where batches are something else, such
                as dicts, or where the model returns more than the loss takes:

                    def predict(model, batch):
                        return model(batch["tokens"]).logits, batch["label"]
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    loss: Callable[[Any, Any], Tensor]
    train_data: Any
    eval_data: Any = None
    metrics: Metrics | Callable[[], Metrics] | None = None
    schedule: torch.optim.lr_scheduler.LRScheduler | None = None
    scaler: torch.amp.GradScaler | None = None
    predict: Predict | None = None


def default_predict(model: nn.Module, batch: Any) -> tuple[Any, Any]:
    *inputs, target = batch
    return model(*inputs), target


def load_function(entry: str) -> Callable[..., Any]:
    """The experiment function of MODULE:FUNCTION or FILE.py:FUNCTION."""
    where, _, name = entry.rpartition(":")
    if not where or not name:
        raise _make_usage_error(f"experiment={entry} names no function", "write FILE.py:FUNCTION")
    module = (
        _import_file(Path(where), entry) if where.endswith(".py") else _import_module(where, entry)
    )
    function = getattr(module, name, None)
    if not callable(function):
        functions = [n for n, v in vars(module).items() if inspect.isfunction(v)]
        hint = suggest_nearest(name, functions) if functions else f"define it: def {name}(cfg): …"
        raise _make_usage_error(f"experiment={entry}: {where} has no function {name!r}", hint)
    found: Callable[..., Any] = function
    return found


def _import_module(name: str, entry: str) -> types.ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name and not name.startswith(error.name):
            raise  # the module is there, something it imports is not: its traceback says which
        raise _make_usage_error(
            f"experiment={entry}: there is no module {name!r}",
            "give a file with its path: experiment=path/to/file.py:function",
        ) from None


def _import_file(path: Path, entry: str) -> types.ModuleType:
    if not path.is_file():
        raise _make_usage_error(
            f"experiment={entry}: there is no file {path.absolute()}", "check the path"
        )
    main_module = sys.modules.get("__main__")
    if main_module is not None and _is_from_file(main_module, path):
        return main_module
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # As `python path/to/file.py` would have it: neighbours can be imported, pickles find the name.
    sys.path.insert(0, str(path.resolve().parent))
    sys.modules[path.stem] = module
    global _is_loading
    _is_loading = True
    try:
        spec.loader.exec_module(module)
    finally:
        _is_loading = False
    return module


def is_loading() -> bool:
    """Whether a user's file is being imported right now."""
    return _is_loading


def _is_from_file(module: types.ModuleType, path: Path) -> bool:
    file = getattr(module, "__file__", None)
    return file is not None and Path(file).resolve() == path.resolve()


def find_settings_class(function: Callable[..., Any]) -> type | None:
    """The dataclass an experiment annotates its argument with, if it does."""
    own = [name for name in inspect.signature(function).parameters if name != "devices"]
    if not own:
        return None
    first = own[0]
    hint = get_type_hints(function).get(first)
    if hint in (bool, int, float, str):
        name = function.__name__
        raise _make_usage_error(
            f"{name} takes {first}: {hint.__name__}, but all settings come as one object",
            f"declare them in a dataclass, def {name}(cfg: Settings), and use cfg.{first}",
        )
    return hint if isinstance(hint, type) and is_dataclass(hint) else None


def accepts_devices(function: Callable[..., Any]) -> bool:
    """Whether the experiment places its layers itself."""
    return "devices" in inspect.signature(function).parameters


def build_experiment(
    entry: str, settings: Mapping[str, Any], devices: tuple[torch.device, ...]
) -> tuple[Experiment, bool]:
    """Call the experiment function with its settings and check what it returns; and whether it has
    placed its layers itself."""
    function = load_function(entry)
    declared = find_settings_class(function)
    cfg = declared(**settings) if declared else types.SimpleNamespace(**settings)
    places_layers = accepts_devices(function)
    own_parameters = _find_settings_parameters(function, entry)
    if own_parameters and next(iter(inspect.signature(function).parameters)) == "devices":
        result = function(devices, cfg)
    else:
        result = function(
            *([cfg] if own_parameters else []), **({"devices": devices} if places_layers else {})
        )
    _require_valid(result, entry)
    experiment: Experiment = result
    return experiment, places_layers


def _find_settings_parameters(function: Callable[..., Any], entry: str) -> list[str]:
    """Beside `devices`: the settings, or nothing."""
    parameters = inspect.signature(function).parameters.values()
    own = [p for p in parameters if p.name != "devices"]
    any_number = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    more = [p.name for p in own[1:] if p.default is p.empty and p.kind not in any_number]
    if more:
        raise _make_usage_error(
            f"experiment={entry} takes {', '.join(map(repr, more))}, which nobody gives it",
            "take the settings, and devices where it places layers: "
            f"def {entry.rpartition(':')[2]}(cfg, devices): …",
        )
    return [p.name for p in own]


def _require_valid(experiment: Any, entry: str) -> None:
    if not isinstance(experiment, Experiment):
        raise _make_usage_error(
            f"experiment={entry} returned {type(experiment).__name__}, not an echelon.Experiment",
            "return echelon.Experiment(model=…, optimizer=…, loss=…, train_data=…)",
        )
    faults = []
    expected = {"model": nn.Module, "optimizer": torch.optim.Optimizer}
    for part, kind in expected.items():
        value = getattr(experiment, part)
        if not isinstance(value, kind):
            faults.append(
                Fault(
                    f"the experiment's {part} is {describe_wrong_type(value)}",
                    f"give a {kind.__module__}.{kind.__qualname__}",
                )
            )
    if not faults:
        faults += find_part_faults(experiment)
    if isinstance(experiment.optimizer, torch.optim.LBFGS):
        faults.append(
            Fault(
                "the optimizer LBFGS computes the loss several times in a step (it takes a "
                "closure), but a step here computes it once",
                "give an optimizer that trains with one gradient a step, such as torch.optim.AdamW",
            )
        )
    if isinstance(experiment.schedule, torch.optim.lr_scheduler.ReduceLROnPlateau):
        faults.append(
            Fault(
                "the schedule ReduceLROnPlateau waits for a number of every evaluation, but a "
                "schedule here is stepped once per optimizer step, without one",
                "leave it out and set trainer.schedule=cosine, or give another scheduler",
            )
        )
    if not callable(experiment.loss):
        faults.append(
            Fault("the experiment's loss cannot be called", "give (output, target) → Tensor")
        )
    if faults:
        raise EchelonError(*faults)


def _make_usage_error(what: str, do: str) -> EchelonError:
    return EchelonError(Fault(what, do), exit=Exit.USAGE)
