"""Which options of torch's DataLoader an experiment may set, and what belongs to Echelon."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from typing import Any

from echelon.errors import EchelonError, Fault

LOADER_OPTIONS = (
    "multiprocessing_context",
    "persistent_workers",
    "pin_memory",
    "prefetch_factor",
    "timeout",
    "worker_init_fn",
)
_USE_ORDER_FIELDS = "give sampler=… or batch_sampler=… beside it"
_SET_INSTEAD = {
    "dataset": "give it as train_data or eval_data",
    "batch_size": "set trainer.batch_size, the samples of a step over all processes",
    "shuffle": f"leave it out: every epoch is shuffled; for another order {_USE_ORDER_FIELDS}",
    "sampler": _USE_ORDER_FIELDS,
    "batch_sampler": _USE_ORDER_FIELDS,
    "num_workers": "set trainer.loader_workers, the processes per rank",
    "collate_fn": "give collate_fn=… beside it",
    "drop_last": "leave it out: the last batch of an epoch counts by its samples",
    "generator": "leave it out: random numbers are seeded by the setting seed",
    "in_order": "leave it out: batches come in the same order in every run",
}


def find_loader_faults(options: Any) -> Iterator[Fault]:
    """Yields what is wrong with the experiment's `loader`."""
    if not isinstance(options, Mapping):
        yield Fault(
            f"the loader is of type {type(options).__name__}",
            "give a dict of DataLoader's options, such as {'prefetch_factor': 4}",
        )
        return
    for name in options:
        if name in _SET_INSTEAD:
            yield Fault(f"the loader sets {name}, which Echelon decides", _SET_INSTEAD[name])
        elif name not in LOADER_OPTIONS:
            near = get_close_matches(name, [*LOADER_OPTIONS, *_SET_INSTEAD], 1)
            yield Fault(
                f"the loader has no option {name!r}",
                f"did you mean {near[0]!r}?"
                if near
                else f"give some of {', '.join(LOADER_OPTIONS)}",
            )


def make_loader_error(options: Mapping[str, Any], error: Exception) -> EchelonError:
    """Return the error for options with which torch makes no DataLoader."""
    return EchelonError(
        Fault(
            f"the loader is {dict(options)}, which DataLoader refuses: {error}",
            "change or leave out that option",
        )
    )


def describe_loader(loader: Any, data_name: str) -> str:
    """Return how the parts of a DataLoader are given to an experiment, as the end of a sentence.

    What torch chose by itself is not named, except an order that is not shuffled.
    """
    from torch.utils.data._utils.collate import default_collate, default_convert

    fields = []
    if loader.collate_fn not in (default_collate, default_convert):
        fields.append("collate_fn=loader.collate_fn")
    if data_name != "eval_data" and (order := _name_order_field(loader)):
        fields.append(f"{order}=loader.{order}")
    options = {
        "prefetch_factor": loader.prefetch_factor not in (None, 2),
        "timeout": bool(loader.timeout),
        "worker_init_fn": loader.worker_init_fn is not None,
        "multiprocessing_context": loader.multiprocessing_context is not None,
    }
    chosen = [f"{name!r}: loader.{name}" for name, is_set in options.items() if is_set]
    if chosen:
        fields.append(f"loader={{{', '.join(chosen)}}}")
    given = f" with {', '.join(fields)}," if fields else ""
    settings = [f"trainer.loader_workers={loader.num_workers}"]
    if loader.batch_size is not None:
        which = "eval_batch_size" if data_name == "eval_data" else "batch_size"
        settings.insert(0, f"trainer.{which}={loader.batch_size}")
    return f"give its dataset, loader.dataset,{given} and set {' and '.join(settings)}"


def _name_order_field(loader: Any) -> str | None:
    """Return the field that keeps a DataLoader's order; None where it only shuffles."""
    from torch.utils.data import RandomSampler

    if loader.batch_sampler is not None and loader.batch_size is None:  # not of torch's making
        return "batch_sampler"
    sampler = loader.sampler
    shuffles = type(sampler) is RandomSampler and not sampler.replacement
    return None if shuffles and len(sampler) == len(loader.dataset) else "sampler"
