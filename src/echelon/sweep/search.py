"""The search, done by Optuna: which values a trial gets."""

from __future__ import annotations

import itertools
import json
import math
import statistics
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from echelon.sweep.space import Parameter, multiple

if TYPE_CHECKING:
    import optuna

_BELOW_1 = 1 - 1e-9


def sampler(
    method: str, seed: int, number: int, before: optuna.samplers.BaseSampler
) -> optuna.samplers.BaseSampler:
    """Of one trial. It is made anew for each from its number, so that two workers never draw the
    same, and a random search is the same one however many workers share it."""
    import optuna

    of_trial = (seed * 1_000_003 + number) % 2**32
    if method != "bayes":
        return optuna.samplers.RandomSampler(seed=of_trial)
    made = optuna.samplers.TPESampler(seed=of_trial, constant_liar=True)
    if isinstance(before, optuna.samplers.TPESampler):
        # Which parameters there are, as found in all trials so far: at a thousand of them most of
        # what an answer costs.
        made._search_space = before._search_space
    return made


def combination(parameters: Sequence[Parameter], number: int) -> dict[str, Any]:
    """Of a grid; the last parameter varies fastest."""
    values: dict[str, Any] = {}
    for parameter in reversed(parameters):
        choices = parameter.grid() or [None]
        number, place = divmod(number, len(choices))
        values[parameter.name] = choice(choices[place])
    return values


def combinations(parameters: Sequence[Parameter]) -> int:
    return math.prod(parameter.size or 1 for parameter in parameters)


def suggest(trial: optuna.Trial, parameter: Parameter, grid: bool = False) -> Any:
    """Ask again, and the answer is the same: a trial keeps what it was given."""
    choices = parameter.grid() if grid else None
    if choices is None and parameter.distribution == "categorical":
        choices = list(parameter.values)
    if choices is not None:
        written = [choice(value) for value in choices]
        return choices[written.index(trial.suggest_categorical(parameter.name, written))]
    if parameter.distribution == "int_uniform":
        return trial.suggest_int(parameter.name, int(parameter.min), int(parameter.max))
    value = _number(trial, parameter)
    if parameter.values:
        return parameter.values[_place(parameter.probabilities, value)]
    return multiple(round(value / parameter.q), parameter.q) if parameter.q else value


def choice(value: Any) -> Any:
    """Optuna has no choices that are lists."""
    return json.dumps(value) if isinstance(value, list) else value


def _number(trial: optuna.Trial, p: Parameter) -> float:
    """Optuna knows uniform and logarithmic ranges. Others are asked for as a part of 1 that their
    distribution turns into a value: drawn at random they are exactly what was wished."""
    kind = p.distribution.removeprefix("q_")
    if kind == "uniform":
        return float(trial.suggest_float(p.name, p.min, p.max))
    if kind.endswith("log_uniform_values"):
        return float(trial.suggest_float(p.name, p.min, p.max, log=True))
    if kind == "log_uniform":
        return float(trial.suggest_float(p.name, math.exp(p.min), math.exp(p.max), log=True))
    if kind == "inv_log_uniform":
        return float(trial.suggest_float(p.name, math.exp(-p.max), math.exp(-p.min), log=True))
    part = float(trial.suggest_float(p.name, 0.0, 1.0))
    if kind == "categorical_w_probabilities":
        return part
    part = min(max(part, 1 - _BELOW_1), _BELOW_1)
    if kind == "beta":
        return beta_at(part, p.a, p.b)
    bell = statistics.NormalDist(p.mu, p.sigma).inv_cdf(part)
    return math.exp(bell) if kind == "log_normal" else bell


def _place(probabilities: Sequence[float], part: float) -> int:
    for place, reached in enumerate(itertools.accumulate(probabilities)):
        if part < reached:
            return place
    return max(place for place, weight in enumerate(probabilities) if weight > 0)


# --- the beta distribution, which the standard library does not have ---


def beta_at(part: float, a: float, b: float) -> float:
    """The value below which this part of the distribution lies, by halving."""
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if _beta_below(middle, a, b) < part else (low, middle)
    return (low + high) / 2


def _beta_below(x: float, a: float, b: float) -> float:
    if x > (a + 1) / (a + b + 2):  # where the fraction converges slowly, from the other end
        return 1 - _beta_below(1 - x, b, a)
    logs = math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b)
    front = math.exp(logs + a * math.log(x) + b * math.log1p(-x)) / a if x > 0 else 0.0
    return front / _fraction(x, a, b)


def _fraction(x: float, a: float, b: float) -> float:
    """The continued fraction of the incomplete beta function, from its far end."""
    value = 1.0
    for m in range(200, 0, -1):
        even = m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m))
        odd = -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1))
        value = 1 + even / (1 + odd / value)
    return 1 - (a + b) * x / (a + 1) / value
