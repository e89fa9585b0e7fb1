"""torch._dynamo is imported when something is compiled, and not before.

torch's optimizers and DDP import it with their first step, for functions that do nothing unless
something is compiled. That import takes longer than all others of a training together, in every
process of it.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
import threading
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace
from typing import Any

_NAME = "torch._dynamo"


def defer_dynamo() -> None:
    """Let `import torch._dynamo` give a stand-in from now on. It does what a training without
    compilation asks for, and imports the module itself once anything else of it is asked for.

    Nothing is done where the module is imported already.
    """
    spec = importlib.util.find_spec(_NAME) if _NAME not in sys.modules else None
    if spec is not None:
        _DeferredDynamo(spec).install()


def is_dynamo_imported() -> bool:
    """Return whether torch._dynamo itself is there, without which nothing can be compiled."""
    return not isinstance(sys.modules.get(_NAME), _DeferredDynamo | None)


def _ignore() -> None:
    pass


class _DeferredDynamo(ModuleType):
    """What of torch._dynamo is used in a training in which nothing is compiled."""

    def __init__(self, spec: ModuleSpec) -> None:
        super().__init__(_NAME)
        self._imported: ModuleType | None = None
        self._lock = threading.RLock()
        self._finder = _SubmoduleFinder(self)
        self.__spec__, self.__file__ = spec, spec.origin  # `inspect` asks every module for it
        self.__path__ = list(spec.submodule_search_locations or ())
        self._marks: dict[str, Any] = {
            "graph_break": _ignore,
            "disable": self._disable,
            "utils": SimpleNamespace(get_optimize_ddp_mode=lambda: "ddp_optimizer"),  # the default
            "trace_rules": SimpleNamespace(clear_lru_cache=_ignore),  # nothing is in it yet
        }
        """What only the compiler takes notice of."""

    def __getattr__(self, name: str) -> Any:
        if self._imported is None and name in self._marks:
            return self._marks[name]
        if self._imported is None and name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.import_now(), name)

    def install(self) -> None:
        """Take the place of the module."""
        import torch

        stand_in: Any = self
        sys.modules[_NAME] = torch._dynamo = stand_in
        sys.meta_path.insert(0, self._finder)

    def import_now(self) -> ModuleType:
        """Import the module itself, which gets its place back."""
        import torch

        with self._lock:
            if self._imported is None:
                sys.meta_path.remove(self._finder)
                del sys.modules[_NAME], torch._dynamo
                try:
                    self._imported = importlib.import_module(_NAME)
                except BaseException:
                    self.install()
                    raise
            return self._imported

    def _disable(self, function: Callable[..., Any] | None = None, *how: Any, **more: Any) -> Any:
        """`torch._dynamo.disable`: the function is marked once there is a compiler."""
        if function is None:
            return self.import_now().disable(function, *how, **more)
        marked: Callable[..., Any] | None = None

        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal marked
            if self._imported is None:
                return function(*args, **kwargs)
            if marked is None:
                marked = self._imported.disable(function, *how, **more)
            return marked(*args, **kwargs)

        return call


class _SubmoduleFinder(MetaPathFinder):
    """Has `import torch._dynamo.NAME` begin with the package itself, as ever."""

    def __init__(self, stand_in: _DeferredDynamo) -> None:
        self._stand_in = stand_in

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if not name.startswith(f"{_NAME}."):
            return None
        self._stand_in.import_now()
        # Python would load once more what the package has imported already.
        module = sys.modules.pop(name, None)
        return None if module is None else ModuleSpec(name, _LoadedModule(module))


class _LoadedModule(Loader):
    """Gives a module that is loaded already."""

    def __init__(self, module: ModuleType) -> None:
        self._module, self._spec = module, module.__spec__

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return self._module

    def exec_module(self, module: ModuleType) -> None:
        vars(module)["__spec__"] = self._spec  # a module of settings refuses to be changed
