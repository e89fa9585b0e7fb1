"""What a step of the user's own refers to, as far as its code says.

A CUDA graph repeats the kernels of a step, not its Python. So a step can be a graph only where all
that its code refers to is known to stay as it is: modules, optimizers, tensors, settings, and
functions of the same kind. An iterator, a clock, a file, or an object that nothing is known of
would be read once, when the step is captured, and never again. What may stay or change, such as a
setting that an evaluation lowers, is compared before every replay.
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
_MODULE_TABLES = {name for name in vars(nn.Module()) if name.startswith("_")}
"""What torch keeps in every module: its parts and its hooks."""
_MODULE_ATTRIBUTE_TYPES = (Mapping, list, tuple, Tensor, types.SimpleNamespace)
"""What a module may keep beside its parts, and change. Objects of libraries are left alone."""
_MAX_ARRAY_BYTES = 1000
"""Larger arrays are not compared before every replay."""
_HOST_BUILTINS = {"print": "prints", "next": "calls next()", "open": "opens a file"}
_HOST_MODULES = {"time", "datetime", "os", "queue", "threading", "secrets", "uuid", "subprocess"}
"""Modules whose functions give another answer every time. Random numbers are compared, not
listed."""


class HostReference(Exception):
    """The step refers to something that a graph would not follow; the text says to what."""


def find_step_references(**parts: Any) -> StepReferences:
    """Return the values that the parts of a step, by name, refer to: those in the closure of a
    function, in its module's globals, in its object, and the same of all functions and modules of
    the user that it refers to.

    Raises HostReference where one of them is known, or not known not, to change from step to step.
    """
    references = StepReferences()
    for name, part in parts.items():
        references.visit(name, part)
    return references


class StepReferences:
    """What a step refers to, by name, and whether it is still what it was."""

    def __init__(self) -> None:
        self.found: dict[str, Any] = {}
        self._slots: list[tuple[str, Any, Any, Any]] = []
        """Where each value stands: its name, what holds it, its key there, the value."""
        self._cells: list[tuple[str, types.CellType, Any]] = []
        """The same of values in the closures of functions."""
        self._sizes: list[tuple[str, Any, int]] = []
        """Containers by name, and how many items each has."""
        self._contents: list[tuple[str, Any, Any]] = []
        """Tensors on the CPU and small arrays by name, and what tells that they have changed."""
        self._seen: dict[int, Any] = {}
        """By id, what was visited; kept, so that no id is given again."""

    def find_change(self) -> str | None:
        """Return the name of a value that is not what it was, or None. Takes some 50 ns a value."""
        for name, holder, key, value in self._slots:
            try:
                now = holder[key]
            except (KeyError, IndexError):
                return name
            if now is not value and not _are_equal_values(now, value):
                return name
        for name, cell, value in self._cells:
            now = _read_cell(cell)
            if now is not value and not _are_equal_values(now, value):
                return name
        for name, container, size in self._sizes:
            if len(container) != size:
                return name
        for name, part, content in self._contents:
            if _read_content(part) != content:
                return name
        return None

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
        elif isinstance(value, (Tensor, np.ndarray)):
            self._visit_numbers(name, value)
        elif isinstance(value, nn.Module):
            self.found[name] = value
            for inner, module in value.named_modules():
                self._visit_module(f"{name}.{inner}" if inner else name, module)
        elif isinstance(value, torch.optim.Optimizer):
            self.found[name] = value
        elif isinstance(value, torch.Generator) or hasattr(value, "__next__"):
            raise HostReference(f"it uses {name}, a {type(value).__name__}, on the host")
        elif isinstance(value, _CONTAINER_TYPES):
            self._visit_items(name, value)
        else:
            self._visit_object(name, value)

    def _visit_slot(self, name: str, holder: Any, key: Any) -> None:
        """Look at what stands in a place that may be given another value later."""
        value = holder[key]
        self._slots.append((name, holder, key, value))
        self.visit(name, value)

    def _visit_numbers(self, name: str, value: Tensor | np.ndarray) -> None:
        if isinstance(value, np.ndarray) and value.nbytes > _MAX_ARRAY_BYTES:
            raise HostReference(f"it uses {name}, an array on the host")
        self.found[name] = value
        if isinstance(value, np.ndarray) or value.device.type == "cpu":
            self._contents.append((name, value, _read_content(value)))

    def _visit_items(self, name: str, value: Any) -> None:
        self.found[name] = value
        self._sizes.append((name, value, len(value)))
        if isinstance(value, (set, frozenset)):
            for item in value:
                self.visit(f"{name}'s items", item)
            return
        for key in list(value) if isinstance(value, Mapping) else range(len(value)):
            self._visit_slot(f"{name}[{key!r}]", value, key)

    def _visit_class(self, name: str, value: type) -> None:
        """Look at a class of the user's: at its functions, and at what it has for all objects."""
        for base in value.__mro__:
            if _is_of_library(base.__module__):
                continue
            for key, member in vars(base).items():
                if isinstance(member, (staticmethod, classmethod)):
                    self.visit(f"{name}.{key}", member.__func__)
                elif isinstance(member, property):
                    self.visit(f"{name}.{key}", member.fget)
                elif isinstance(member, types.FunctionType):
                    self.visit(f"{name}.{key}", member)
                elif not key.startswith("__") and isinstance(
                    member, (*_PLAIN_TYPES, *_CONTAINER_TYPES)
                ):
                    self._visit_slot(f"{name}.{key}", vars(base), key)

    def _visit_object(self, name: str, value: Any) -> None:
        """Look at an object by its attributes and its class. Without attributes it may keep its
        state where nobody can look."""
        if not hasattr(value, "__dict__"):
            raise HostReference(
                f"it uses {name}, a {type(value).__name__}, which may change on the host"
            )
        self._sizes.append((name, vars(value), len(vars(value))))
        for key in list(vars(value)):
            self._visit_slot(f"{name}.{key}", vars(value), key)
        self.visit(f"{name}'s class", type(value))

    def _visit_module(self, name: str, module: nn.Module) -> None:
        """Look at what a module is made of, and at the functions that its forward pass calls. Other
        methods, such as one that builds optimizers, are no part of a step."""
        for parts in (module._parameters, module._buffers, module._modules):
            self._sizes.append((name, parts, len(parts)))
            self._slots += [(f"{name}.{key}", parts, key, part) for key, part in parts.items()]
        attributes = vars(module)
        for key, value in attributes.items():
            if isinstance(value, _PLAIN_TYPES):
                self._slots.append((f"{name}.{key}", attributes, key, value))
            elif key not in _MODULE_TABLES and (
                isinstance(value, _MODULE_ATTRIBUTE_TYPES)
                or not _is_of_library(type(value).__module__)
            ):
                self._visit_slot(f"{name}.{key}", attributes, key)
        self._visit_forward(name, type(module), "forward")

    def _visit_forward(self, name: str, cls: type, method: str) -> None:
        """Look at a method of a module's class, and at those that it names."""
        function = getattr(cls, method, None)
        if (
            not isinstance(function, types.FunctionType)
            or _is_of_library(function.__module__ or "")
            or id(function) in self._seen
        ):
            return
        self.visit(f"{name}.{method}", function)
        for code in _iter_codes(function.__code__):
            for called in code.co_names:
                self._visit_forward(name, cls, called)

    def _visit_function(self, name: str, function: types.FunctionType) -> None:
        if _is_of_library(function.__module__ or ""):
            _require_steady_module(function.__module__ or "")
            return
        for cell_name, cell in zip(
            function.__code__.co_freevars, function.__closure__ or (), strict=True
        ):
            content = _read_cell(cell)
            self._cells.append((cell_name, cell, content))
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
            self._visit_slot(word, known, word)
            module = known[word]
            if isinstance(module, types.ModuleType) and not _is_of_library(module.__name__):
                for attribute in attributes & set(vars(module)):
                    self._visit_slot(f"{word}.{attribute}", vars(module), attribute)


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


def _are_equal_values(a: Any, b: Any) -> bool:
    """Return whether two values that are not the same object are equal all the same."""
    return isinstance(a, _PLAIN_TYPES) and type(a) is type(b) and bool(a == b)


def _read_content(part: Tensor | np.ndarray) -> Any:
    """Return what changes when a tensor on the CPU or a small array is written to."""
    return part._version if isinstance(part, Tensor) else part.tobytes()


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
