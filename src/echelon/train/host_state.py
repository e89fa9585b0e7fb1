"""What a step changes on the host, which a CUDA graph of it would not.

Looked at before and after a step: random numbers, what the modules remember, and what the loss and
other functions of the user's keep in themselves, in closures and in globals. Numbers on the GPU are
not looked at: those a graph does change.
"""

from __future__ import annotations

import functools
import random
import types
from collections import deque
from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from echelon.train.experiment import Experiment

_PLAIN = (bool, int, float, complex, str, bytes, type(None))
_DEEP = 3
_MOST = 100
"""Items of a list that are looked at."""

State = tuple[dict[str, Any], Any]


def host_state(experiment: Experiment) -> State:
    found: dict[str, Any] = {}
    for name, module in experiment.model.named_modules():
        found |= _named(f"the model's {name}." if name else "the model's ", module)
    for what in ("loss", "predict"):
        function = getattr(experiment, what)
        found |= {f"the {what}'s {key}": value for key, value in _of_callable(function)}
    return found, _drawn()


def host_change(before: State, after: State) -> str | None:
    """Why a step with these states around it cannot be captured."""
    if before[1] != after[1]:
        return "the step draws random numbers on the host"
    for name, value in after[0].items():
        if [before[0].get(name)] != [value]:  # in a list, what is not a number equals itself
            return f"{name} changes from step to step"
    return None


def _named(prefix: str, module: nn.Module) -> dict[str, Any]:
    own = {f"{prefix}{key}": _seen(value) for key, value in vars(module).items()}
    return own | {f"{prefix}{key}": value for key, value in _of_function(type(module).forward)}


def _of_callable(made: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(made, nn.Module):
        for name, module in made.named_modules():
            yield from _named(f"{name}." if name else "", module).items()
    elif isinstance(made, functools.partial):
        yield "arguments", _seen([made.args, made.keywords])
        yield from _of_callable(made.func)
    elif isinstance(made, types.MethodType):
        yield from _seen_in(vars(made.__self__) if hasattr(made.__self__, "__dict__") else {})
        yield from _of_function(made.__func__)
    elif isinstance(made, types.FunctionType):
        yield from _of_function(made)
    elif hasattr(made, "__dict__"):
        yield from _seen_in(vars(made))
        yield from _of_function(type(made).__call__)


def _of_function(function: Any) -> Iterator[tuple[str, Any]]:
    """What it keeps in its closure, its defaults and its module's globals."""
    if not isinstance(function, types.FunctionType) or _is_torchs(function):
        return
    code, cells = function.__code__, function.__closure__ or ()
    for name, cell in zip(code.co_freevars, cells, strict=True):
        yield name, _seen(cell.cell_contents if _is_filled(cell) else None)
    yield "defaults", _seen([function.__defaults__, function.__kwdefaults__])
    known = function.__globals__
    yield from _seen_in({f"global {n}": known[n] for n in code.co_names if n in known})


def _is_torchs(function: types.FunctionType) -> bool:
    return (function.__module__ or "").partition(".")[0] == "torch"


def _is_filled(cell: types.CellType) -> bool:
    try:
        return cell.cell_contents is not cell
    except ValueError:
        return False


def _seen_in(values: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    return ((key, _seen(value)) for key, value in values.items())


def _seen(value: Any, deep: int = _DEEP) -> Any:
    """Something to compare it by."""
    if isinstance(value, _PLAIN):
        return value
    if isinstance(value, Tensor):
        return (id(value), value._version) if value.device.type == "cpu" else None
    if isinstance(value, np.ndarray):
        return value.tobytes() if value.nbytes < 1000 else id(value)
    if deep == 0 or isinstance(value, type | types.ModuleType | types.FunctionType | nn.Module):
        return id(value)
    if isinstance(value, Mapping):
        items = islice(value.items(), _MOST)
        return len(value), [(_seen(k, deep - 1), _seen(v, deep - 1)) for k, v in items]
    if isinstance(value, list | tuple | set | frozenset | deque):
        return len(value), [_seen(item, deep - 1) for item in islice(value, _MOST)]
    return id(value), _seen(vars(value), deep - 1) if hasattr(value, "__dict__") else None


def _drawn() -> Any:
    _, keys, *rest = np.random.get_state(legacy=True)
    torch_ = torch.get_rng_state().numpy().tobytes()
    return random.getstate(), np.asarray(keys).tobytes(), rest, torch_
