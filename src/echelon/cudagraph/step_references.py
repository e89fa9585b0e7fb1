"""What a step of the user's own refers to, as far as its code says.

A CUDA graph repeats the kernels of a step, not its Python. So a step can be a graph only where all
that its code refers to is known to stay as it is: modules, optimizers, tensors, settings, and
functions of the same kind. An iterator, a clock, a file, or an object that nothing is known of
would be read once, when the step is captured, and never again.
"""

from __future__ import annotations

import builtins
import dis
import enum
import functools
import sys
import types
from collections import deque
from collections.abc import Iterator, Mapping
from pathlib import PurePath
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

_MAX_VALUES = 5000
"""Values that are looked at; a step that refers to more is not captured."""

_PLAIN_TYPES = (
    *(bool, int, float, complex, str, bytes, type(None), enum.Enum, PurePath, np.generic),
    *(torch.dtype, torch.device, torch.Size, torch.layout, torch.memory_format),
)
_CONTAINER_TYPES = (Mapping, list, tuple, set, frozenset, deque)
_BUILTIN_TYPES = (
    types.BuiltinFunctionType,
    types.MethodDescriptorType,
    types.WrapperDescriptorType,
)
_HOST_BUILTINS = {"print": "prints", "next": "calls next()", "open": "opens a file"}
_HOST_MODULES = {"time", "datetime", "os", "queue", "threading", "secrets", "uuid", "subprocess"}
"""Modules whose functions give another answer every time. Random numbers are compared, not
listed."""


class HostReference(Exception):
    """The step refers to something that a graph would not follow; the text says to what."""


def find_step_references(step: Any) -> dict[str, Any]:
    """Return the values that a step's code refers to, by name: of its closure, its module's
    globals, its object, and the same of all functions of the user that it refers to.

    Raises HostReference where one of them is known, or not known not, to change from step to step.
    """
    walk = _ReferenceWalk()
    walk.visit("step", step)
    return walk.found


class _ReferenceWalk:
    def __init__(self) -> None:
        self.found: dict[str, Any] = {}
        self._seen: dict[int, Any] = {}
        """By id, what was visited; kept, so that no id is given again."""

    def visit(self, name: str, value: Any) -> None:
        """Look at a value that the step refers to by this name, and at what it refers to."""
        if isinstance(value, _PLAIN_TYPES):
            self.found[name] = value
            return
        if id(value) in self._seen:
            return
        self._seen[id(value)] = value
        if len(self._seen) > _MAX_VALUES:
            raise HostReference(f"it refers to more than {_MAX_VALUES} values")
        if isinstance(value, type):
            self._visit_class(name, value)
        elif isinstance(value, types.FunctionType):
            self._visit_function(name, value)
        elif isinstance(value, types.MethodType):
            self.visit(name, value.__self__)
            self.visit(name, value.__func__)
        elif isinstance(value, functools.partial):
            for part in (value.func, value.args, value.keywords):
                self.visit(name, part)
        elif isinstance(value, types.ModuleType):
            _require_steady_module(value.__name__)
        elif isinstance(value, _BUILTIN_TYPES):
            _require_steady_module(getattr(value, "__module__", None) or "")
        elif isinstance(value, (Tensor, np.ndarray, nn.Module, torch.optim.Optimizer)):
            self.found[name] = value
        elif isinstance(value, torch.Generator) or hasattr(value, "__next__"):
            raise HostReference(f"it uses {name}, a {type(value).__name__}, on the host")
        elif isinstance(value, _CONTAINER_TYPES):
            self._visit_items(name, value)
        else:
            self._visit_object(name, value)

    def _visit_items(self, name: str, value: Any) -> None:
        self.found[name] = value
        items = value.items() if isinstance(value, Mapping) else enumerate(value)
        for key, item in items:
            self.visit(f"{name}[{key!r}]", item)

    def _visit_class(self, name: str, value: type) -> None:
        if not _is_of_library(value.__module__):
            for key, member in vars(value).items():
                if isinstance(member, types.FunctionType):
                    self.visit(f"{name}.{key}", member)

    def _visit_object(self, name: str, value: Any) -> None:
        """Look at an object by its attributes and its class. Without attributes it may keep its
        state where nobody can look."""
        if not hasattr(value, "__dict__"):
            raise HostReference(
                f"it uses {name}, a {type(value).__name__}, which may change on the host"
            )
        for key, attribute in vars(value).items():
            self.visit(f"{name}.{key}", attribute)
        self.visit(f"{name}'s class", type(value))

    def _visit_function(self, name: str, function: types.FunctionType) -> None:
        if _is_of_library(function.__module__ or ""):
            _require_steady_module(function.__module__ or "")
            return
        for cell_name, cell in zip(
            function.__code__.co_freevars, function.__closure__ or (), strict=True
        ):
            if (content := _read_cell(cell)) is not None:
                self.visit(cell_name, content)
        for default in (function.__defaults__ or (), function.__kwdefaults__ or {}):
            self.visit(f"{name}'s defaults", default)
        for code in _iter_codes(function.__code__):
            self._visit_globals(function, code)

    def _visit_globals(self, function: types.FunctionType, code: types.CodeType) -> None:
        known, attributes = function.__globals__, set(code.co_names)
        for instruction in dis.get_instructions(code):
            if instruction.opname not in ("LOAD_GLOBAL", "LOAD_NAME"):
                continue
            word = instruction.argval
            if word not in known:
                if word in _HOST_BUILTINS and hasattr(builtins, word):
                    raise HostReference(f"it {_HOST_BUILTINS[word]}")
                continue
            self.visit(word, known[word])
            module = known[word]
            if isinstance(module, types.ModuleType) and not _is_of_library(module.__name__):
                for attribute in attributes & set(vars(module)):
                    self.visit(f"{word}.{attribute}", getattr(module, attribute))


def _iter_codes(code: types.CodeType) -> Iterator[types.CodeType]:
    """Yield a function's code and that of the functions within it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _iter_codes(constant)


def _read_cell(cell: types.CellType) -> Any:
    """Return what a closure's cell holds; None where nothing was assigned yet."""
    try:
        return cell.cell_contents
    except ValueError:
        return None


def _require_steady_module(module: str) -> None:
    top = module.partition(".")[0]
    if top in _HOST_MODULES:
        raise HostReference(f"it uses {top}, which a graph would ask only once")


@functools.cache
def _is_of_library(module: str) -> bool:
    """Return whether a module is not the user's own: of Python, or installed."""
    top = module.partition(".")[0]
    if top in sys.stdlib_module_names:
        return top != "__main__"
    file = getattr(sys.modules.get(module), "__file__", None) or ""
    return top in ("torch", "echelon") or "site-packages" in file or "dist-packages" in file
