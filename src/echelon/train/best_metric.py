"""Which evaluated number decides the best snapshot, and whether more or less of it is better."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from echelon.config.schema import Config
from echelon.errors import EchelonError, Fault, suggest_nearest
from echelon.runs.metric_direction import guess_best_is


def resolve_best_metric(config: Config, metrics: Mapping[str, Any] | None) -> Config:
    """Return the configuration with `min` or `max` in the place of `trainer.best_is=auto`.

    `metrics` are those of the evaluation by name, or None where nothing is evaluated. Raises a
    fault where `trainer.best` names a number that no evaluation gives, and where nobody knows
    whether more or less of it is better.
    """
    name, best_is = config.trainer.best, config.trainer.best_is
    found = find_direction(name, metrics, "trainer.best") if best_is == "auto" else best_is
    if best_is != "auto" and name != "loss":
        _require_owner(name, metrics, "trainer.best")
    return replace(config, trainer=replace(config.trainer, best_is=found))


def find_direction(name: str, metrics: Mapping[str, Any] | None, setting: str) -> str:
    """Return whether the best value of an evaluated number is its `min` or its `max`.

    `setting` is the one that names the number. Raises a fault where no evaluation gives it, and
    where nobody knows what is better.
    """
    if name == "loss":
        return "min"
    owner = _require_owner(name, metrics, setting)
    assert metrics is not None
    return _find_best_is(name, owner, metrics[owner], setting)


def make_unknown_best_error(
    name: str, known: Iterable[str], setting: str = "trainer.best"
) -> EchelonError:
    """Return the error for a setting that names a number which is not evaluated."""
    what = f"{setting}={name}, but no such number is evaluated"
    return EchelonError(Fault(what, suggest_nearest(name, known)))


def _require_owner(name: str, metrics: Mapping[str, Any] | None, setting: str) -> str:
    """Return the name of the metric that gives this number: a metric with several results, such as
    one per class, gives `NAME_0`, `NAME_1`, …"""
    if metrics is None:
        raise EchelonError(
            Fault(
                f"{setting}={name}, but the experiment has no eval_data, so nothing is evaluated",
                f"give it eval_data, or leave {setting} out",
            )
        )
    owners = [known for known in metrics if name == known or name.startswith(f"{known}_")]
    if not owners:
        raise make_unknown_best_error(name, ["loss", *metrics], setting)
    return max(owners, key=len)


def _find_best_is(name: str, owner: str, metric: Any, setting: str) -> str:
    """Return what torchmetrics knows of the metric, otherwise what the name says."""
    result = name.removeprefix(owner)  # of a metric with several results, each has its own name
    higher = getattr(metric, "higher_is_better", None)
    by_metric = {True: "max", False: "min"}.get(higher) if isinstance(higher, bool) else None
    found = guess_best_is(result) or by_metric or guess_best_is(name)
    if found is None:
        is_best = setting == "trainer.best"
        raise EchelonError(
            Fault(
                f"{setting}={name}, but neither {type(metric).__name__} nor the name says "
                "whether more or less of it is better",
                "say it: trainer.best_is=max, or trainer.best_is=min"
                if is_best
                else f"set trainer.best={name} and trainer.best_is, and leave {setting} out",
            )
        )
    return found
