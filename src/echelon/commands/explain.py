"""`echelon explain`: what was decided about this process, from what, and what was ignored."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from echelon.commands.arguments import make_parser
from echelon.errors import EchelonError, ExitCode, Fault

if TYPE_CHECKING:
    from echelon.world.types import DetectionReason

_KNOWN_KEYS = ("rank", "world_size", "master", "replica.devices")


def explain(words: list[str]) -> int:
    """`echelon explain`: print the world of this process and why."""
    parser = make_parser(
        "explain", "Show which world this process would be part of, and which variables decided it."
    )
    parser.add_argument("overrides", nargs="*", metavar="rank=R world_size=N master=HOST:PORT")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_intermixed_args(words)
    return _explain_world(given.overrides, given.json, os.environ)


def _explain_world(overrides: Sequence[str], json_wanted: bool, env: Mapping[str, str]) -> int:
    """Detect the world from these variables and print it; returns the exit code."""
    from echelon.gpus import count_visible_gpus
    from echelon.world import detect
    from echelon.world.render import detection_to_dict, render_detection

    given = _parse_overrides(overrides)
    devices_per_replica = _parse_int(given, "replica.devices")
    detection = detect(
        env,
        rank=_parse_int(given, "rank"),
        world_size=_parse_int(given, "world_size"),
        master=given.get("master"),
        visible_devices=count_visible_gpus(env),
        devices_per_replica=1 if devices_per_replica is None else devices_per_replica,
    )
    if detection.world.size > 1:
        detection = replace(detection, reasons=(*detection.reasons, _explain_network(env)))
    if json_wanted:
        print(json.dumps(detection_to_dict(detection), indent=2))
    else:
        from rich.console import Console

        Console().print(render_detection(detection))
    return ExitCode.OK


def _explain_network(env: Mapping[str, str]) -> DetectionReason:
    """Return whether the processes know each other by a key."""
    from echelon.world.network_key import KEY_VARIABLE, read_key
    from echelon.world.types import DetectionReason

    if read_key(env):
        return DetectionReason("network", "with a key", f"{KEY_VARIABLE} is set")
    why = f"{KEY_VARIABLE} is not set: whoever reaches the master can take part"
    return DetectionReason("network", "open", why)


def _parse_overrides(overrides: Sequence[str]) -> dict[str, str]:
    """Return the values of the few keys that matter here.

    They are parsed without Hydra, because its import would take most of the time of the command.
    """
    given = dict(word.partition("=")[::2] for word in overrides)
    unknown = [k for k in given if k not in _KNOWN_KEYS]
    if unknown:
        raise EchelonError(
            *(
                Fault(
                    f"{k}={given[k]} is not about the world",
                    "give rank=, world_size=, master= or replica.devices=",
                )
                for k in unknown
            )
        )
    return given


def _parse_int(given: Mapping[str, str], key: str) -> int | None:
    """Return the whole number of a key; None if it was not given."""
    text = given.get(key)
    if text is None:
        return None
    try:
        return int(text)
    except ValueError:
        raise EchelonError(Fault(f"{key}={text} is not a whole number", f"write {key}=3")) from None
