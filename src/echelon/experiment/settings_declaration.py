"""Which settings an experiment function takes, and the object that it receives them in.

A function declares its settings with the class of its first parameter: a dataclass, a NamedTuple or
a TypedDict. Without a class its source says which settings it reads, so that a misspelt one is
refused all the same.
"""

from __future__ import annotations

import ast
import inspect
import sys
import sysconfig
import textwrap
import types
import typing
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from echelon.config.scalar_types import format_path
from echelon.config.settings_classes import is_settings_class, list_union_members
from echelon.config.typed_values import ValueConverter, ValueProblem
from echelon.errors import EchelonError, Fault
from echelon.experiment.training_info import find_info_parameter

if TYPE_CHECKING:
    from echelon.config.compose import UserExperiment

_MAPPINGS = (dict, typing.get_origin(typing.Mapping[str, Any]), types.MappingProxyType)
_VARIABLE = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


class SettingNames(NamedTuple):
    """The settings that an experiment without a class may read."""

    names: frozenset[str] | None
    """None if its source cannot be read."""
    is_exact: bool
    """Whether they are those that it reads, rather than all words of its files that could be."""


class MissingSettingError(EchelonError, AttributeError):
    """A setting that an experiment reads and nobody has given.

    It is an AttributeError too, so that getattr(cfg, "lr", 0.1) and hasattr work.
    """


class UndeclaredSettings(types.SimpleNamespace):
    """The settings of an experiment that declares none: whatever was given, as attributes."""

    def __getattr__(self, name: str) -> Any:
        """Say how a setting is given that the experiment reads and nobody has set."""
        if name.startswith("__"):  # pickle and copy ask for such
            raise AttributeError(name)
        raise MissingSettingError(
            Fault(
                f"the experiment reads the setting {name!r}, which has no value",
                f"give one: {name}=VALUE; or declare it with a default in a dataclass, "
                "def experiment(cfg: Settings)",
            )
        )


def describe_experiment(entry: str, function: Callable[..., Any]) -> UserExperiment:
    """Return the settings that an experiment declares, or without a class those that it reads."""
    from echelon.config.compose import UserExperiment  # with Hydra, which a worker does without

    declared = find_settings_class(function)
    if declared is not None:
        return UserExperiment(entry, declared)
    found = find_setting_names(function)
    return UserExperiment(entry, None, found.names, found.is_exact)


def build_settings(function: Callable[..., Any], plain: Mapping[str, Any]) -> Any:
    """Return the object that an experiment receives, from the plain values of a configuration."""
    declared = find_settings_class(function)
    if declared is None:
        if _takes_mapping(function):
            return dict(plain)
        return UndeclaredSettings(**plain)
    converter = ValueConverter()
    converted = converter.convert(declared, plain, ("experiment",))
    if converted is None:
        raise EchelonError(*map(_describe_stored_value, converter.problems))
    return converted.typed


def _describe_stored_value(problem: ValueProblem) -> Fault:
    """Return the fault of a value in config.json. It fitted when it was written, so the class has
    changed since."""
    if problem.kind in ("missing", "declaration"):
        return Fault(problem.what, problem.do)
    return Fault(f"{format_path(problem.path)} of this run: {problem.what}", problem.do)


# --- the class ---


def find_settings_class(function: Callable[..., Any]) -> type | None:
    """Return the class that an experiment annotates its settings with; None if there is none.

    Raises an EchelonError for a function that takes its settings one by one.
    """
    first = _find_settings_parameter(function)
    if first is None:
        return None
    hint = _read_hint(function, first)
    records = [member for member in list_union_members(hint) if is_settings_class(member)]
    if records:
        return records[0]  # type: ignore[no-any-return]
    has_default = first.default is not first.empty and first.default is not None
    if hint in (bool, int, float, str) or has_default or first.kind in _VARIABLE:
        raise _refuse_single_settings(function, first)
    if _is_class_without_decorator(hint, function):
        name = hint.__name__
        raise EchelonError(
            Fault(
                f"{function.__name__} takes {first.name}: {name}, which is not a dataclass",
                f"write @dataclass above `class {name}`",
            )
        )
    return None


def list_provided_parameters(function: Callable[..., Any]) -> list[str]:
    """Return the parameters of a user's function that are not settings: the devices, a session, and
    that for a TrainingInfo."""
    info = find_info_parameter(function)
    return ["devices", "session", *([info] if info else [])]


def _find_settings_parameter(function: Callable[..., Any]) -> inspect.Parameter | None:
    parameters = inspect.signature(function).parameters.values()
    provided = list_provided_parameters(function)
    return next((p for p in parameters if p.name not in provided), None)


def _read_hint(function: Callable[..., Any], parameter: inspect.Parameter) -> Any:
    """Return the annotation of a parameter; raises an EchelonError if it cannot be resolved."""
    try:
        return typing.get_type_hints(function, include_extras=True).get(parameter.name, Any)
    except NameError as error:
        if isinstance(parameter.annotation, str) and str(error.name) in parameter.annotation:
            raise EchelonError(
                Fault(
                    f"{function.__name__} takes {parameter.name}: {parameter.annotation}, which "
                    f"cannot be resolved: {error}",
                    "import or define the class at the top level of the file, not under "
                    "TYPE_CHECKING or in a function",
                )
            ) from None
        return Any  # another annotation, such as that of what it returns


def _refuse_single_settings(function: Callable[..., Any], first: inspect.Parameter) -> EchelonError:
    """Return the error of a function that takes its settings as arguments."""
    name = function.__name__
    return EchelonError(
        Fault(
            f"{name} takes {first}, but all settings come as one object",
            f"declare them in a dataclass, def {name}(cfg: Settings), and use "
            f"cfg.{'NAME' if first.kind in _VARIABLE else first.name}",
        )
    )


def _is_class_without_decorator(hint: Any, function: Callable[..., Any]) -> bool:
    """Return whether an annotation is a class of the same file that lists fields as a dataclass
    does."""
    if not isinstance(hint, type) or hint.__module__ != function.__module__:
        return False
    return bool(inspect.get_annotations(hint)) and not getattr(hint, "_is_protocol", False)


def _takes_mapping(function: Callable[..., Any]) -> bool:
    """Return whether an experiment reads its settings as cfg["lr"]."""
    first = _find_settings_parameter(function)
    hint = None if first is None else _read_hint(function, first)
    return (typing.get_origin(hint) or hint) in _MAPPINGS


# --- without a class ---


def find_setting_names(function: Callable[..., Any]) -> SettingNames:
    """Return the settings that the source of an experiment reads.

    They are exact where the settings stay in the function, as in cfg.lr and getattr(cfg, "lr", 0).
    Where it passes them on, every attribute, parameter and text of its own files may be the name of
    a setting.
    """
    first = _find_settings_parameter(function)
    if first is None:
        return SettingNames(frozenset(), is_exact=True)
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
        reader = _SettingReads(first.name)
        reader.visit(tree)
        if not reader.is_passed_on:
            return SettingNames(frozenset(reader.names), is_exact=True)
        file = Path(inspect.getfile(function)).resolve()
        words = {word for path in _list_own_files(file) for word in _list_words(path)}
        return SettingNames(frozenset(words), is_exact=False)
    except (OSError, TypeError, SyntaxError, ValueError):  # typed into a prompt, or generated
        return SettingNames(None, is_exact=False)


class _SettingReads(ast.NodeVisitor):
    """Collects what is read of a variable, and whether it is used in any other way."""

    def __init__(self, variable: str) -> None:
        self.names: set[str] = set()
        self.is_passed_on = False
        self._variable = variable

    def visit_Attribute(self, node: ast.Attribute) -> None:
        """cfg.lr reads a setting; cfg.get("lr") is a method of a mapping."""
        if not self._is_variable(node.value):
            self.generic_visit(node)
        elif node.attr in ("__dict__", "items", "keys", "values", "copy"):
            self.is_passed_on = True
        else:
            self.names.add(node.attr)

    def visit_Call(self, node: ast.Call) -> None:
        """getattr(cfg, "lr", 0.1) and cfg.get("lr", 0.1) read a setting by its text."""
        function, rest = node.func, list(node.args)
        is_method = (
            isinstance(function, ast.Attribute)
            and self._is_variable(function.value)
            and function.attr in ("get", "pop", "setdefault")
        )
        is_lookup = isinstance(function, ast.Name) and function.id in ("getattr", "hasattr")
        if is_lookup and rest and self._is_variable(rest[0]):
            rest = rest[1:]
        elif not is_method:
            self.generic_visit(node)
            return
        self._add_text(rest[0] if rest else None)
        for argument in rest[1:]:
            self.visit(argument)

    def visit_Subscript(self, node: ast.Subscript) -> None:
        """cfg["lr"] reads a setting."""
        if self._is_variable(node.value):
            self._add_text(node.slice)
        else:
            self.generic_visit(node)

    def visit_Compare(self, node: ast.Compare) -> None:
        """`"lr" in cfg` asks for a setting."""
        if len(node.comparators) == 1 and self._is_variable(node.comparators[0]):
            self._add_text(node.left)
        else:
            self.generic_visit(node)

    def visit_Name(self, node: ast.Name) -> None:
        """Any other use may read whatever it likes."""
        self.is_passed_on |= self._is_variable(node)

    def _add_text(self, node: ast.AST | None) -> None:
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            self.names.add(node.value)
        else:
            self.is_passed_on = True

    def _is_variable(self, node: ast.AST) -> bool:
        return isinstance(node, ast.Name) and node.id == self._variable


def _list_own_files(start: Path) -> list[Path]:
    """Return a file and the files that it imports, without those of installed packages."""
    found: list[Path] = []
    pending = [start]
    while pending:
        file = pending.pop()
        if file in found or _is_installed(file):
            continue
        found.append(file)
        tree = ast.parse(file.read_bytes())
        for level, name in _list_imports(tree):
            folders = [file.parents[level - 1]] if level else [file.parent, start.parent]
            pending += _find_module(name, [] if level else sys.modules, folders)
    return found


def _is_installed(file: Path) -> bool:
    """Return whether a file is one of Python, of an installed package or of Echelon."""
    folders = (Path(sysconfig.get_path("stdlib")), Path(__file__).parents[1])
    is_package = not {"site-packages", "dist-packages"}.isdisjoint(file.parts)
    is_ours = any(file.is_relative_to(folder) for folder in folders)
    return is_package or is_ours or file.suffix != ".py"


def _list_imports(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield each module that is imported, with the number of dots before its name."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((0, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.level, node.module or ""
            for alias in node.names:  # a name of the module, or a module of the package
                yield node.level, f"{node.module}.{alias.name}" if node.module else alias.name


def _find_module(name: str, loaded: Any, folders: list[Path]) -> list[Path]:
    """Return the file of a module: where it was loaded from, or in one of the folders."""
    file = getattr(loaded[name], "__file__", None) if name in loaded else None
    if file is not None:
        return [Path(file).resolve()]
    places = [folder.joinpath(*name.split(".")) for folder in folders if name]
    files = [path for place in places for path in (Path(f"{place}.py"), place / "__init__.py")]
    return [path.resolve() for path in files if path.is_file()]


def _list_words(file: Path) -> Iterator[str]:
    """Yield the attributes, parameters, fields and texts of a file."""
    for node in ast.walk(ast.parse(file.read_bytes())):
        if isinstance(node, ast.Attribute):
            yield node.attr
        elif isinstance(node, ast.arg):
            yield node.arg
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            yield node.target.id
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value
