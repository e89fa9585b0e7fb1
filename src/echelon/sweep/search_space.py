"""The search space: the parameters of a sweep and their distributions, in wandb's format."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from echelon.config.untrusted import PLAIN_VALUES_HINT, describe_unsafe_value
from echelon.errors import Fault, suggest_nearest
from echelon.sweep.located_yaml import KeyPath, LocatedYaml

_RANGE_KEYS, _NORMAL_KEYS = ("min", "max"), ("mu", "sigma")
DISTRIBUTIONS: Mapping[str, tuple[str, ...]] = {
    "constant": ("value",),
    "categorical": ("values",),
    "categorical_w_probabilities": ("values", "probabilities"),
    "int_uniform": _RANGE_KEYS,
    "uniform": _RANGE_KEYS,
    "q_uniform": (*_RANGE_KEYS, "q"),
    "log_uniform": _RANGE_KEYS,
    "log_uniform_values": _RANGE_KEYS,
    "q_log_uniform": (*_RANGE_KEYS, "q"),
    "q_log_uniform_values": (*_RANGE_KEYS, "q"),
    "inv_log_uniform": _RANGE_KEYS,
    "inv_log_uniform_values": _RANGE_KEYS,
    "normal": _NORMAL_KEYS,
    "q_normal": (*_NORMAL_KEYS, "q"),
    "log_normal": _NORMAL_KEYS,
    "q_log_normal": (*_NORMAL_KEYS, "q"),
}
"""The distributions, and the keys that each of them has."""
INTEGER_HINT = "give a whole number from 1 on"
_DEFAULTS = {"mu": 0.0, "sigma": 1.0, "q": 1.0}
_LIST_KEYS = ("value", "values", "probabilities")
_PARAMETER_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]*")
_KNOWN_KEYS = {key for keys in DISTRIBUTIONS.values() for key in keys} | {
    "distribution",
    "parameters",
}


@dataclass(frozen=True)
class SearchParameter:
    """One parameter, searched or constant. What does not belong to its distribution is unused."""

    name: str
    """With dots where it was nested."""
    distribution: str
    location: str = ""
    """FILE:LINE, for faults."""
    values: tuple[Any, ...] = ()
    """A constant has one."""
    probabilities: tuple[float, ...] = ()
    min: float = 0.0
    max: float = 0.0
    mu: float = 0.0
    sigma: float = 1.0
    q: float | None = None
    """Values are rounded to multiples of it."""

    @property
    def is_searched(self) -> bool:
        """Whether trials differ in it."""
        return self.distribution != "constant"

    @property
    def step_range(self) -> range | None:
        """The values as multiples of q, or of 1 for an integer; None if it is continuous."""
        if self.distribution == "int_uniform":
            return range(int(self.min), int(self.max) + 1)
        if self.distribution != "q_uniform" or self.q is None:
            return None
        return range(round(self.min / self.q), round(self.max / self.q) + 1)

    @property
    def value_count(self) -> int | None:
        """The number of values; None if continuous, or with probabilities, which a grid ignores."""
        if self.values:
            return None if self.probabilities else len(self.values)
        steps = self.step_range
        return None if steps is None else steps.stop - steps.start

    def list_grid_values(self) -> list[Any] | None:
        """Return all values, or None where value_count is."""
        if self.value_count is None:
            return None
        return list(self.values) or [self.get_value_at_step(step) for step in self.step_range or ()]

    def get_value_at_step(self, step: int) -> float:
        """Return the value for one of `steps`."""
        return compute_multiple(step, 1 if self.q is None else self.q)


def compute_multiple(number: int, q: float) -> float:
    """Return number·q: an integer if q is one, as wandb does, and 0.3 instead of 3·0.1."""
    if float(q).is_integer():
        return number * int(q)
    digits = max(0, 12 - math.floor(math.log10(abs(q))))
    return round(number * q, min(digits, 300))


def parse_parameters(
    file: LocatedYaml, tree: Any, faults: list[Fault]
) -> dict[str, SearchParameter]:
    """Return the parameters by their names, nested ones with dots; faults are added to `faults`."""
    parameters: dict[str, SearchParameter] = {}
    for parameter in _walk_parameters(file, tree, ("parameters",), "", faults):
        if parameter.name in parameters:
            faults.append(
                Fault(
                    f"{parameter.location}: {parameter.name} is there twice, nested and dotted",
                    "keep one of them",
                )
            )
        parameters[parameter.name] = parameter
    return parameters


def _walk_parameters(
    file: LocatedYaml, tree: Any, keys: KeyPath, prefix: str, faults: list[Fault]
) -> Iterator[SearchParameter]:
    if not isinstance(tree, dict) or not tree:
        faults.append(
            Fault(
                f"{file.locate(*keys)}: parameters are a mapping of names, not {_shorten(tree)}",
                "write for example  lr: {min: 0.001, max: 0.1}",
            )
        )
        return
    for name, spec in tree.items():
        here, dotted = (*keys, name), f"{prefix}{name}"
        if not _PARAMETER_NAME.fullmatch(name):
            faults.append(
                Fault(
                    f"{file.locate(*here)}: {name!r} is not a name of a parameter",
                    "use letters, digits, '_', '.' and '-'",
                )
            )
        elif isinstance(spec, dict) and "parameters" in spec:
            yield from _walk_parameters(
                file, spec["parameters"], (*here, "parameters"), f"{dotted}.", faults
            )
        elif parameter := _parse_parameter(file, dotted, spec, here, faults):
            yield parameter


def _parse_parameter(
    file: LocatedYaml, name: str, spec: Any, keys: KeyPath, faults: list[Fault]
) -> SearchParameter | None:
    """Return a parameter, or None after its faults were added to `faults`."""
    location = file.locate(*keys)
    if not isinstance(spec, dict):
        faults.append(
            Fault(
                f"{location}: {name} is {_shorten(spec)}, not a mapping",
                f"write {name}: {{value: …}}",
            )
        )
        return None
    before = len(faults)
    for key in spec.keys() - _KNOWN_KEYS:
        faults.append(
            Fault(
                f"{file.locate(*keys, key)}: {name} has no {key!r}",
                suggest_nearest(key, _KNOWN_KEYS),
            )
        )
    distribution = spec.get("distribution") or _infer_distribution(spec)
    if distribution in DISTRIBUTIONS:
        faults.extend(_check_parameter(file, name, str(distribution), spec, keys))
    else:
        faults.append(_make_distribution_fault(file, name, spec, keys))
    if len(faults) > before:
        return None
    return _build_parameter(name, str(distribution), location, spec)


def _infer_distribution(spec: Mapping[str, Any]) -> str | None:
    """Infer it as wandb does: two integers are a range of integers, others of real numbers."""
    if "value" in spec:
        return "constant"
    if "values" in spec:
        return "categorical_w_probabilities" if "probabilities" in spec else "categorical"
    if "min" in spec and "max" in spec:
        are_integers = all(type(spec[key]) is int for key in _RANGE_KEYS)
        return "int_uniform" if are_integers else "uniform"
    return None


def _make_distribution_fault(
    file: LocatedYaml, name: str, spec: Mapping[str, Any], keys: KeyPath
) -> Fault:
    distribution = spec.get("distribution")
    if distribution is None:
        return Fault(
            f"{file.locate(*keys)}: {name} has neither value, values, min and max, nor a "
            "distribution",
            f"write for example  {name}: {{min: 0.001, max: 0.1}}",
        )
    return Fault(
        f"{file.locate(*keys, 'distribution')}: {name} has the unknown distribution "
        f"{distribution!r}",
        suggest_nearest(str(distribution), DISTRIBUTIONS),
    )


def _check_parameter(
    file: LocatedYaml, name: str, distribution: str, spec: Mapping[str, Any], keys: KeyPath
) -> Iterator[Fault]:
    """Yield what is wrong with the keys and values that belong to a distribution."""
    wanted = DISTRIBUTIONS[distribution]
    for key in sorted((spec.keys() & _KNOWN_KEYS) - {"distribution", *wanted}):
        yield Fault(
            f"{file.locate(*keys, key)}: {name} is {distribution}, which has no {key!r}",
            f"it has {', '.join(wanted)}",
        )
    has_only_numbers = True
    for key in wanted:
        if key not in spec and key not in _DEFAULTS:
            yield Fault(
                f"{file.locate(*keys)}: {name} is {distribution} and lacks {key!r}", f"give {key}"
            )
        elif key in spec and key not in _LIST_KEYS and not is_finite_number(spec[key]):
            yield Fault(
                f"{file.locate(*keys, key)}: {name}.{key} is {_shorten(spec[key])}, not a number",
                "write a finite number",
            )
            has_only_numbers = False
    if "values" in wanted or "value" in wanted:
        yield from _check_values(file, name, spec, keys)
    elif has_only_numbers:
        yield from _check_numbers(file, name, distribution, spec, keys)


def _check_values(
    file: LocatedYaml, name: str, spec: Mapping[str, Any], keys: KeyPath
) -> Iterator[Fault]:
    values = spec.get("values", [spec["value"]] if "value" in spec else None)
    if not isinstance(values, list) or not values:
        yield Fault(
            f"{file.locate(*keys, 'values')}: {name}.values is {_shorten(values)}",
            "list some values",
        )
        return
    for index, value in enumerate(values):
        if problem := describe_unsafe_value(value):
            yield Fault(
                f"{file.locate(*keys, 'values', index)}: {name}: {problem}", PLAIN_VALUES_HINT
            )
    weights = spec.get("probabilities")
    if weights is None:
        return
    at = file.locate(*keys, "probabilities")
    if not isinstance(weights, list) or len(weights) != len(values):
        yield Fault(f"{at}: {name} has {len(values)} values", "give each of them a probability")
    elif not all(is_finite_number(w) and w >= 0 for w in weights) or not math.isclose(
        sum(weights), 1.0, abs_tol=1e-3
    ):
        yield Fault(
            f"{at}: the probabilities of {name} do not add up to 1", "change them so that they do"
        )


def _check_numbers(
    file: LocatedYaml, name: str, distribution: str, spec: Mapping[str, Any], keys: KeyPath
) -> Iterator[Fault]:
    at = file.locate(*keys, "min")
    if "min" in spec and "max" in spec:
        low, high = spec["min"], spec["max"]
        if low > high:
            yield Fault(f"{at}: {name} has min={low:g} > max={high:g}", "exchange them")
        if distribution.endswith("_values") and low <= 0:
            yield Fault(
                f"{at}: {name} is {distribution} with min={low:g}", "a logarithm wants min > 0"
            )
        exponents = "log_uniform" in distribution and not distribution.endswith("_values")
        if exponents and max(abs(low), abs(high)) > 300:
            yield Fault(
                f"{at}: {name} is {distribution}, whose min and max are exponents of e: "
                f"exp({high:g}) is not a number",
                f"give the values themselves with distribution: {distribution}_values",
            )
        if distribution == "int_uniform" and not all(type(spec[k]) is int for k in _RANGE_KEYS):
            yield Fault(f"{at}: {name} is int_uniform between {low:g} and {high:g}", "use integers")
    for key in ("sigma", "q"):
        if key in spec and not spec[key] > 0:
            yield Fault(
                f"{file.locate(*keys, key)}: {name}.{key}={spec[key]:g}", "it must be above 0"
            )


def _build_parameter(
    name: str, distribution: str, location: str, spec: Mapping[str, Any]
) -> SearchParameter:
    numbers = {
        key: spec.get(key, _DEFAULTS.get(key))
        for key in DISTRIBUTIONS[distribution]
        if key not in _LIST_KEYS
    }
    values = [spec["value"]] if distribution == "constant" else spec.get("values", [])
    weights = spec.get("probabilities", [])
    return SearchParameter(name, distribution, location, tuple(values), tuple(weights), **numbers)


def is_finite_number(value: Any) -> bool:
    """Return whether it is an int or a float, and neither a bool, nor nan, nor infinite."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _shorten(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "…"
