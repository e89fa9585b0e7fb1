"""What types cannot say: ranges, choices, settings that contradict each other. All at once."""

from __future__ import annotations

import string
from collections.abc import Iterator

from echelon.config.schema import LAUNCHERS, PROGRESS, SCHEDULES, Config, Every
from echelon.errors import Fault, nearest

NAME_CHARACTERS = frozenset(string.ascii_letters + string.digits + "._-")


def faults_of(config: Config) -> list[Fault]:
    return [*_numbers(config), *_choices(config), *_launch(config), *_ranks(config)]


def batch_fault(batch_size: int, world_size: int) -> Fault | None:
    if batch_size >= world_size:
        return None
    return Fault(
        f"trainer.batch_size={batch_size} is smaller than the world of {world_size} processes, "
        "so some would have nothing to do",
        f"set trainer.batch_size to {world_size} or more (it is the global batch), "
        f"or start at most {batch_size} processes",
    )


def _numbers(config: Config) -> Iterator[Fault]:
    t, launch = config.trainer, config.launch
    at_least = {
        "trainer.batch_size": (t.batch_size, 1),
        "trainer.accumulate": (t.accumulate, 1),
        "trainer.eval_batch_size": (t.eval_batch_size, 1),
        "trainer.log_steps": (t.log_steps, 1),
        "trainer.keep_last": (t.keep_last, 1),
        "trainer.warmup_steps": (t.warmup_steps, 0),
        "trainer.loader_workers": (t.loader_workers, 0),
        "trainer.epochs": (t.epochs, 0),
        "trainer.steps": (t.steps, 0),
        "launch.procs": (launch.procs, 1),
        "launch.threads": (launch.threads, 1),
        "launch.max_restarts": (launch.max_restarts, 0),
        "launch.hang_s": (launch.hang_s, 0),
        "seed": (config.seed, 0),
    }
    for key, (value, least) in at_least.items():
        if value is not None and value < least:
            yield Fault(f"{key}={value} is below {least}", f"set {key} to {least} or more")
    for key, positive in {
        "trainer.clip": t.clip,
        "launch.join_timeout_s": launch.join_timeout_s,
    }.items():
        if positive is not None and not positive > 0:
            yield Fault(f"{key}={positive} is not above 0", f"set {key} to a positive number")
    for name, every in {"evaluate": t.evaluate, "save": t.save}.items():
        yield from _cadence(f"trainer.{name}", every)
    if t.epochs is None and t.steps is None:
        yield Fault("trainer.epochs and trainer.steps are both null", "set one of them")


def _cadence(key: str, every: Every) -> Iterator[Fault]:
    for unit in ("steps", "epochs", "minutes"):
        value = getattr(every, unit)
        if value is not None and not value > 0:
            yield Fault(f"{key}.{unit}={value} is not above 0", f"set {key}.{unit}=null for never")


def _choices(config: Config) -> Iterator[Fault]:
    choices = {
        "launch.kind": (config.launch.kind, LAUNCHERS),
        "trainer.schedule": (config.trainer.schedule, SCHEDULES),
        "trainer.best_is": (config.trainer.best_is, ("min", "max")),
        "track.progress": (config.track.progress, PROGRESS),
    }
    for key, (value, known) in choices.items():
        if value not in known:
            yield Fault(f"{key}={value}: there is no such choice", nearest(value, known))
    if config.run.name is not None and (fault := name_fault(config.run.name)):
        yield fault


def name_fault(name: str) -> Fault | None:
    """Names become folders, job names and log prefixes, so they are held to a plain pattern."""
    if name == "latest":  # the link to the newest run
        return Fault("run.name='latest' always means the newest run", "choose another name")
    if name and set(name) <= NAME_CHARACTERS and name[0] not in ".-" and len(name) <= 100:
        return None
    return Fault(
        f"run.name={name!r} is no name for a run",
        "use 1 to 100 letters, digits, '.', '_' and '-', not starting with '.' or '-'",
    )


def _launch(config: Config) -> Iterator[Fault]:
    launch = config.launch
    if launch.kind == "inline":
        for key, value in {"procs": launch.procs, "max_restarts": launch.max_restarts}.items():
            if value not in (None, 0):
                yield Fault(
                    f"launch.{key}={value} is set, but launch=inline is this one process",
                    f"add launch=local: launch=local launch.{key}={value}",
                )
    elif config.rank is not None:
        yield Fault(
            f"rank={config.rank} starts one process by hand, and launch={launch.kind} starts "
            "its own",
            "leave one of the two out",
        )
    if launch.procs and (fault := batch_fault(config.trainer.batch_size, launch.procs)):
        yield fault


def _ranks(config: Config) -> Iterator[Fault]:
    if (config.rank is None) != (config.world_size is None):
        given, missing = (
            ("rank", "world_size") if config.rank is not None else ("world_size", "rank")
        )
        yield Fault(
            f"{given}={getattr(config, given)} is set without {missing}",
            "give both, for example rank=0 world_size=4",
        )
    elif config.rank is not None and config.world_size is not None:
        if not 0 <= config.rank < config.world_size:
            yield Fault(
                f"rank={config.rank} is outside a world of {config.world_size} processes",
                f"ranks go from 0 to {config.world_size - 1}",
            )
        elif fault := batch_fault(config.trainer.batch_size, config.world_size):
            yield fault
    elif config.master is not None:
        yield Fault(
            f"master={config.master} is set without rank and world_size",
            "give all three, for example rank=0 world_size=4 master=HOST:PORT",
        )
