"""Finds what a step changes on the host, which a CUDA graph of the step would not repeat.

The state is compared before and after a step: random-number generators, attributes of modules, and
what the loss and other functions of the user keep in attributes, closures and globals. What is in
tensors on the GPU is not compared, as a replay does change it.
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
from torch.optim import Optimizer

from echelon.experiment.definition import Experiment

_PLAIN_TYPES = (bool, int, float, complex, str, bytes, type(None))
_MAX_DEPTH = 3
_MAX_ITEMS = 100
"""Items of a container that are compared."""

HostState = tuple[dict[str, Any], Any]


def read_host_state(
    experiment: Experiment, references: Mapping[str, Any] | None = None
) -> HostState:
    """Return what can be compared of the host's state: values by name, and the states of the
    generators.

    `references` are the values that a step of the user's own refers to (`step_references.py`).
    """
    found: dict[str, Any] = {}
    for name, module in experiment.model.named_modules():
        found |= _read_module(f"the model's {name}." if name else "the model's ", module)
    for what in ("loss", "predict"):
        function = getattr(experiment, what)
        found |= {f"the {what}'s {key}": value for key, value in _read_callable(function)}
    for name, value in (references or {}).items():
        found |= _read_reference(f"the step's {name}", value)
    return found, _read_rng_states()


def _read_reference(name: str, value: Any) -> dict[str, Any]:
    """Reads what a step refers to by a name: a graph keeps the tensor that stood there when it was
    captured, and what an optimizer keeps outside of tensors."""
    if isinstance(value, nn.Module):
        parts = value.named_modules()
        return {
            k: v for key, part in parts for k, v in _read_module(f"{name}.{key}.", part).items()
        }
    if isinstance(value, Tensor):
        return {name: (id(value), _fingerprint_value(value))}
    if isinstance(value, Optimizer):
        return {
            f"{name}.state": [
                {key: (id(part), _fingerprint_value(part)) for key, part in state.items()}
                for state in value.state.values()
            ],
            f"{name}.param_groups": _fingerprint_value(read_group_settings(value)),
        }
    return {name: _fingerprint_value(value)}


def read_group_settings(optimizer: Optimizer) -> list[tuple[Any, ...]]:
    """Return the settings of every group of an optimizer, which a graph holds as they were. One
    that is a tensor on a GPU is read by the graph in every step."""
    return [
        tuple(
            id(value) if isinstance(value, Tensor) else value
            for key, value in group.items()
            if key != "params"
        )
        for group in optimizer.param_groups
    ]


def find_host_change(before: HostState, after: HostState) -> str | None:
    """Return why a step with these states before and after it cannot be captured, or None."""
    if before[1] != after[1]:
        return "the step draws random numbers on the host"
    for name, value in after[0].items():
        if [before[0].get(name)] != [value]:  # in lists, because NaN != NaN, but [NaN] == [NaN]
            return f"{name} changes from step to step"
    return None


def _read_module(prefix: str, module: nn.Module) -> dict[str, Any]:
    """Reads a module's attributes and what its forward refers to. A buffer may change, but it may
    not be replaced by another tensor, which the graph would not read."""
    own = {f"{prefix}{key}": id(value) for key, value in module._buffers.items()}
    own |= {f"{prefix}{key}": _fingerprint_value(value) for key, value in vars(module).items()}
    return own | {f"{prefix}{key}": value for key, value in _read_function(type(module).forward)}


def _read_callable(function: Any) -> Iterator[tuple[str, Any]]:
    """Yields what a function, a bound method, a partial or a callable object keeps."""
    if isinstance(function, nn.Module):
        for name, module in function.named_modules():
            yield from _read_module(f"{name}." if name else "", module).items()
    elif isinstance(function, functools.partial):
        yield "arguments", _fingerprint_value([function.args, function.keywords])
        yield from _read_callable(function.func)
    elif isinstance(function, types.MethodType):
        yield from _fingerprint_values(
            vars(function.__self__) if hasattr(function.__self__, "__dict__") else {}
        )
        yield from _read_function(function.__func__)
    elif isinstance(function, types.FunctionType):
        yield from _read_function(function)
    elif hasattr(function, "__dict__"):
        yield from _fingerprint_values(vars(function))
        yield from _read_function(type(function).__call__)


def _read_function(function: Any) -> Iterator[tuple[str, Any]]:
    """Yields what a function keeps in its closure, its defaults and its module's globals."""
    if not isinstance(function, types.FunctionType) or _is_from_torch(function):
        return
    code, cells = function.__code__, function.__closure__ or ()
    for name, cell in zip(code.co_freevars, cells, strict=True):
        yield name, _fingerprint_value(cell.cell_contents if _is_cell_assigned(cell) else None)
    yield "defaults", _fingerprint_value([function.__defaults__, function.__kwdefaults__])
    known = function.__globals__
    yield from _fingerprint_values({f"global {n}": known[n] for n in code.co_names if n in known})


def _is_from_torch(function: types.FunctionType) -> bool:
    """Return whether a function is torch's own; these keep nothing that matters."""
    return (function.__module__ or "").partition(".")[0] == "torch"


def _is_cell_assigned(cell: types.CellType) -> bool:
    """Return whether a closure's cell has been assigned."""
    try:
        return cell.cell_contents is not cell
    except ValueError:
        return False


def _fingerprint_values(values: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yields the names with something to compare each value by."""
    return ((key, _fingerprint_value(value)) for key, value in values.items())


def _fingerprint_value(value: Any, depth: int = _MAX_DEPTH) -> Any:
    """Return something to compare a value by: cheap, and never equal after a change that matters.

    Tensors on the CPU are compared by torch's version counter, containers by their first items down
    to a small depth, other objects by their identity and attributes.
    """
    if isinstance(value, _PLAIN_TYPES):
        return value
    if isinstance(value, Tensor):
        return (id(value), value._version) if value.device.type == "cpu" else None
    if isinstance(value, np.ndarray):
        return value.tobytes() if value.nbytes < 1000 else id(value)
    if depth == 0 or isinstance(value, type | types.ModuleType | types.FunctionType | nn.Module):
        return id(value)
    if isinstance(value, Mapping):
        items = islice(value.items(), _MAX_ITEMS)
        return len(value), [
            (_fingerprint_value(k, depth - 1), _fingerprint_value(v, depth - 1)) for k, v in items
        ]
    if isinstance(value, list | tuple | set | frozenset | deque):
        return len(value), [
            _fingerprint_value(item, depth - 1) for item in islice(value, _MAX_ITEMS)
        ]
    return id(value), _fingerprint_value(vars(value), depth - 1) if hasattr(
        value, "__dict__"
    ) else None


def _read_rng_states() -> Any:
    """Return the states of Python's, numpy's and torch's generators on the host."""
    _, keys, *rest = np.random.get_state(legacy=True)
    torch_ = torch.get_rng_state().numpy().tobytes()
    return random.getstate(), np.asarray(keys).tobytes(), rest, torch_
