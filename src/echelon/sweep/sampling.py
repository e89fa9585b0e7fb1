"""Sampling by Optuna: which values the parameters of a trial get."""

from __future__ import annotations

import itertools
import json
import math
import statistics
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from echelon.sweep.search_space import SearchParameter, compute_multiple

if TYPE_CHECKING:
    import optuna

_MAX_QUANTILE = 1 - 1e-9
"""Nearer to 1, the inverse of a normal distribution is not finite."""


def create_sampler(
    method: str, seed: int, number: int, previous: optuna.samplers.BaseSampler
) -> optuna.samplers.BaseSampler:
    """Return the sampler of one trial, seeded by the number of the trial.

    So two workers never draw the same values, and a random search draws the same trials however
    many workers share it. `previous` is the sampler of an earlier trial.
    """
    import optuna

    trial_seed = (seed * 1_000_003 + number) % 2**32
    if method != "bayes":
        return optuna.samplers.RandomSampler(seed=trial_seed)
    sampler = optuna.samplers.TPESampler(seed=trial_seed, constant_liar=True)
    if isinstance(previous, optuna.samplers.TPESampler):
        # The search space, which Optuna finds by reading all trials. After a thousand trials that
        # is most of the time of a suggestion, so it is handed on.
        sampler._search_space = previous._search_space
    return sampler


def pick_combination(parameters: Sequence[SearchParameter], number: int) -> dict[str, Any]:
    """Return the combination of a grid with this number; the last parameter varies fastest."""
    values: dict[str, Any] = {}
    for parameter in reversed(parameters):
        choices = parameter.list_grid_values() or [None]
        number, index = divmod(number, len(choices))
        values[parameter.name] = encode_choice(choices[index])
    return values


def count_combinations(parameters: Sequence[SearchParameter]) -> int:
    """Return the size of a grid."""
    return math.prod(parameter.value_count or 1 for parameter in parameters)


def suggest_value(trial: optuna.Trial, parameter: SearchParameter, is_grid: bool = False) -> Any:
    """Return the value of a parameter for a trial; asked again, the trial gives the same one."""
    choices = parameter.list_grid_values() if is_grid else None
    if choices is None and parameter.distribution == "categorical":
        choices = list(parameter.values)
    if choices is not None:
        encoded = [encode_choice(value) for value in choices]
        return choices[encoded.index(trial.suggest_categorical(parameter.name, encoded))]
    if parameter.distribution == "int_uniform":
        return trial.suggest_int(parameter.name, int(parameter.min), int(parameter.max))
    value = _suggest_number(trial, parameter)
    if parameter.values:
        return parameter.values[_pick_index_by_probability(parameter.probabilities, value)]
    return compute_multiple(round(value / parameter.q), parameter.q) if parameter.q else value


def encode_choice(value: Any) -> Any:
    """Return a list as text, as Optuna has no choices that are lists."""
    return json.dumps(value) if isinstance(value, list) else value


def _suggest_number(trial: optuna.Trial, p: SearchParameter) -> float:
    """Return a number of any distribution.

    Optuna knows uniform and logarithmic ranges. For others it is asked for a quantile, which the
    inverse of the distribution turns into a value: drawn at random they are distributed exactly as
    asked for.
    """
    kind = p.distribution.removeprefix("q_")
    if kind == "uniform":
        return float(trial.suggest_float(p.name, p.min, p.max))
    if kind.endswith("log_uniform_values"):
        return float(trial.suggest_float(p.name, p.min, p.max, log=True))
    if kind == "log_uniform":
        return float(trial.suggest_float(p.name, math.exp(p.min), math.exp(p.max), log=True))
    if kind == "inv_log_uniform":
        return float(trial.suggest_float(p.name, math.exp(-p.max), math.exp(-p.min), log=True))
    quantile = float(trial.suggest_float(p.name, 0.0, 1.0))
    if kind == "categorical_w_probabilities":
        return quantile
    quantile = min(max(quantile, 1 - _MAX_QUANTILE), _MAX_QUANTILE)
    value = statistics.NormalDist(p.mu, p.sigma).inv_cdf(quantile)
    return math.exp(value) if kind == "log_normal" else value


def _pick_index_by_probability(probabilities: Sequence[float], quantile: float) -> int:
    """Return the index of the choice at a quantile. Sums a little below 1 pick the last choice."""
    for index, cumulative in enumerate(itertools.accumulate(probabilities)):
        if quantile < cumulative:
            return index
    return max(index for index, probability in enumerate(probabilities) if probability > 0)
