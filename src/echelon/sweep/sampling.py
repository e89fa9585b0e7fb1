"""The search, done by Optuna: which values a trial gets."""

from __future__ import annotations

import itertools
import json
import math
import statistics
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from echelon.sweep.search_space import SearchParameter, round_to_multiple

if TYPE_CHECKING:
    import optuna

_MAX_PART = 1 - 1e-9


def create_sampler(
    method: str, seed: int, number: int, previous: optuna.samplers.BaseSampler
) -> optuna.samplers.BaseSampler:
    """Of one trial. It is made anew for each from its number, so that two workers never draw the
    same, and a random search is the same one however many workers share it."""
    import optuna

    trial_seed = (seed * 1_000_003 + number) % 2**32
    if method != "bayes":
        return optuna.samplers.RandomSampler(seed=trial_seed)
    created = optuna.samplers.TPESampler(seed=trial_seed, constant_liar=True)
    if isinstance(previous, optuna.samplers.TPESampler):
        # Which parameters there are, as found in all trials so far: at a thousand of them most of
        # what an answer costs.
        created._search_space = previous._search_space
    return created


def pick_combination(parameters: Sequence[SearchParameter], number: int) -> dict[str, Any]:
    """Of a grid; the last parameter varies fastest."""
    values: dict[str, Any] = {}
    for parameter in reversed(parameters):
        choices = parameter.list_grid_values() or [None]
        number, place = divmod(number, len(choices))
        values[parameter.name] = encode_choice(choices[place])
    return values


def count_combinations(parameters: Sequence[SearchParameter]) -> int:
    return math.prod(parameter.value_count or 1 for parameter in parameters)


def suggest_value(trial: optuna.Trial, parameter: SearchParameter, grid: bool = False) -> Any:
    """Ask again, and the answer is the same: a trial keeps what it was given."""
    choices = parameter.list_grid_values() if grid else None
    if choices is None and parameter.distribution == "categorical":
        choices = list(parameter.values)
    if choices is not None:
        written = [encode_choice(value) for value in choices]
        return choices[written.index(trial.suggest_categorical(parameter.name, written))]
    if parameter.distribution == "int_uniform":
        return trial.suggest_int(parameter.name, int(parameter.min), int(parameter.max))
    value = _suggest_number(trial, parameter)
    if parameter.values:
        return parameter.values[_pick_by_probability(parameter.probabilities, value)]
    return round_to_multiple(round(value / parameter.q), parameter.q) if parameter.q else value


def encode_choice(value: Any) -> Any:
    """Optuna has no choices that are lists."""
    return json.dumps(value) if isinstance(value, list) else value


def _suggest_number(trial: optuna.Trial, p: SearchParameter) -> float:
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
    part = min(max(part, 1 - _MAX_PART), _MAX_PART)
    bell = statistics.NormalDist(p.mu, p.sigma).inv_cdf(part)
    return math.exp(bell) if kind == "log_normal" else bell


def _pick_by_probability(probabilities: Sequence[float], part: float) -> int:
    for place, reached in enumerate(itertools.accumulate(probabilities)):
        if part < reached:
            return place
    return max(place for place, weight in enumerate(probabilities) if weight > 0)
