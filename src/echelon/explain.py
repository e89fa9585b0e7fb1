"""`echelon explain`: what was decided about this process, from what, and what was ignored."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from echelon.errors import EchelonError, Exit, Fault
from echelon.gpus import visible_count
from echelon.world import as_json, detect, render


def explain(overrides: Sequence[str], json_wanted: bool, env: Mapping[str, str]) -> int:
    given = _given(overrides)
    each = _number(given, "replica.devices")
    detection = detect(
        env,
        rank=_number(given, "rank"),
        world_size=_number(given, "world_size"),
        master=given.get("master"),
        visible=visible_count(env),
        devices_per_replica=1 if each is None else each,
    )
    if json_wanted:
        print(json.dumps(as_json(detection), indent=2))
    else:
        from rich.console import Console

        Console().print(render(detection))
    return Exit.OK


_KEYS = ("rank", "world_size", "master", "replica.devices")


def _given(overrides: Sequence[str]) -> dict[str, str]:
    """A few keys, read without Hydra, which would take longer than the answer."""
    given = dict(word.partition("=")[::2] for word in overrides)
    unknown = [k for k in given if k not in _KEYS]
    if unknown:
        raise EchelonError(
            *(
                Fault(
                    f"{k}={given[k]} says nothing about the world",
                    "give rank=, world_size=, master= or replica.devices=",
                )
                for k in unknown
            )
        )
    return given


def _number(given: Mapping[str, str], key: str) -> int | None:
    text = given.get(key)
    if text is None:
        return None
    try:
        return int(text)
    except ValueError:
        raise EchelonError(Fault(f"{key}={text} is no whole number", f"write {key}=3")) from None
