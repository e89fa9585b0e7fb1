"""Finds the experiment function that a setting names, calls it, and checks what it returns."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
import types
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from echelon.errors import EchelonError, ExitCode, Fault, suggest_nearest
from echelon.experiment.checks import describe_wrong_type, find_closure_faults, find_part_faults
from echelon.experiment.definition import Experiment
from echelon.experiment.loss_counts import infer_count
from echelon.experiment.settings_declaration import build_settings, list_provided_parameters
from echelon.experiment.step_checks import find_step_faults, join_models
from echelon.experiment.training_info import TrainingInfo, find_info_parameter

_is_loading = False


def load_function(entry: str) -> Callable[..., Any]:
    """Return the experiment function of `MODULE:FUNCTION` or `FILE.py:FUNCTION`."""
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
    """Imports a module by name; a name that does not exist becomes a fault."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name and not name.startswith(error.name):
            raise  # the module exists, but something it imports does not: the traceback says which
        raise _make_usage_error(
            f"experiment={entry}: there is no module {name!r}",
            "give a file with its path: experiment=path/to/file.py:function",
        ) from None


def _import_file(path: Path, entry: str) -> types.ModuleType:
    """Imports a user's file as `python path/to/file.py` would: its neighbours can be imported.

    The file that is running as `__main__` is not imported a second time.
    """
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
    # As `python path/to/file.py` does it: neighbours can be imported, and pickle finds the module.
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
    """Return whether a user's file is being imported right now; `echelon.main` in it then does
    nothing."""
    return _is_loading


def _is_from_file(module: types.ModuleType, path: Path) -> bool:
    """Return whether a module was loaded from this file."""
    file = getattr(module, "__file__", None)
    return file is not None and Path(file).resolve() == path.resolve()


def takes_session(function: Callable[..., Any]) -> bool:
    """Return whether a function has a loop of its own, instead of returning an Experiment."""
    return "session" in inspect.signature(function).parameters


def accepts_devices(function: Callable[..., Any]) -> bool:
    """Return whether the experiment places its layers itself."""
    return "devices" in inspect.signature(function).parameters


def build_experiment(
    function: Callable[..., Any],
    entry: str,
    settings: Mapping[str, Any],
    devices: tuple[torch.device, ...],
    get_info: Callable[[], TrainingInfo],
) -> tuple[Experiment, bool]:
    """Calls the experiment function with its settings and checks what it returns.

    `get_info` is called only where the function wants to know of its training. Returns the
    experiment, and whether it has placed its layers itself.
    """
    given: dict[str, Any] = {"devices": devices} if accepts_devices(function) else {}
    if info_parameter := find_info_parameter(function):
        given[info_parameter] = get_info()
    result = call_function(function, entry, settings, **given)
    _require_valid(result, entry)
    experiment: Experiment = result
    if experiment.step is not None:
        experiment.model = join_models(experiment.model)
        return experiment, accepts_devices(function)
    # Now, as the loss may be wrapped later and would not be recognised any more.
    experiment.count = experiment.count or infer_count(experiment.loss)
    return experiment, accepts_devices(function)


def call_function(
    function: Callable[..., Any], entry: str, settings: Mapping[str, Any], **provided: Any
) -> Any:
    """Calls a user's function with its settings object and with `provided`, in whatever order it
    takes them."""
    cfg = build_settings(function, settings)
    own_parameters = _find_settings_parameters(function, entry)
    if own_parameters and next(iter(inspect.signature(function).parameters)) in provided:
        return function(**provided, **{own_parameters[0]: cfg})
    return function(*([cfg] if own_parameters else []), **provided)


def _find_settings_parameters(function: Callable[..., Any], entry: str) -> list[str]:
    """Return the parameters besides those that are provided: one for the settings, or none."""
    parameters = inspect.signature(function).parameters.values()
    provided = list_provided_parameters(function)
    own = [p for p in parameters if p.name not in provided]
    any_number = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    more = [p.name for p in own[1:] if p.default is p.empty and p.kind not in any_number]
    if more:
        raise _make_usage_error(
            f"experiment={entry} takes {', '.join(map(repr, more))}, which it is not given",
            "take the settings, `devices` where it places layers, `training` where it needs to "
            "know of its training, or `session` for a loop of its own: def "
            f"{entry.rpartition(':')[2]}(cfg, devices): …",
        )
    return [p.name for p in own]


def _require_valid(experiment: Any, entry: str) -> None:
    """Raises all faults of what an experiment function returned, at once."""
    if not isinstance(experiment, Experiment):
        raise _make_usage_error(
            f"experiment={entry} returned {type(experiment).__name__}, not an echelon.Experiment",
            "return echelon.Experiment(model=…, optimizer=…, loss=…, train_data=…)",
        )
    faults = list(
        find_step_faults(experiment)
        if experiment.step is not None
        else _find_faults_without_step(experiment)
    )
    if faults:
        raise EchelonError(*faults)


def _find_faults_without_step(experiment: Experiment) -> list[Fault]:
    """Return the faults of an experiment that Echelon makes the steps of."""
    faults = []
    expected = {
        "model": (nn.Module, "give a torch.nn.Module"),
        "optimizer": (torch.optim.Optimizer, "give a torch.optim.Optimizer"),
    }
    for part, (kind, hint) in expected.items():
        value = getattr(experiment, part)
        if not isinstance(value, kind):
            if isinstance(value, type) and issubclass(value, kind):
                given = "…" if part == "model" else "model.parameters(), …"
                hint = f"make one: {part}={value.__name__}({given})"
            if isinstance(value, Mapping):
                hint = "give one, or say how several are trained: echelon.Experiment(…, step=…)"
            faults.append(Fault(f"the experiment's {part} is {describe_wrong_type(value)}", hint))
    if not faults:
        faults += find_part_faults(experiment)
    faults += find_closure_faults(experiment.optimizer, "the optimizer")
    if experiment.loss is None:
        faults.append(
            Fault(
                "the experiment has neither a loss nor a step",
                "give loss=…, (output, target) → Tensor, or step=… for a step of your own",
            )
        )
    elif not callable(experiment.loss):
        faults.append(
            Fault("the experiment's loss cannot be called", "give (output, target) → Tensor")
        )
    return faults


def _make_usage_error(what: str, do: str) -> EchelonError:
    """Return an error with one fault about how an experiment was named."""
    return EchelonError(Fault(what, do), exit=ExitCode.USAGE)
