"""Settings in few words: those in which runs differ, and those that are not the defaults."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from typing import Any

from echelon.config.schema import Config, flatten
from echelon.view.record import Record

_NOT_THE_EXPERIMENT = ("run.", "launch.", "track.", "rank", "world_size", "master", "program")
"""Where a run is and who looks at it: two runs that differ in these alone are the same twice."""
_FEW = 3
_HOW_OFTEN = ("trainer.resume", "trainer.save.", "trainer.keep_last", "trainer.log_steps")


def settings(record: Record) -> dict[str, Any]:
    """Flat; the experiment's own by their bare names, as they are typed, unless one is ours too."""
    flat = flatten({k: v for k, v in record.config.items() if k != "program"})
    return {_typed(k, flat): v for k, v in flat.items() if k != "experiment.entry"}


def _typed(key: str, flat: dict[str, Any]) -> str:
    bare = key.removeprefix("experiment.")
    return key if bare in flat else bare


def differing(records: Sequence[Record]) -> list[dict[str, str]]:
    """For each run, the settings in which those of its experiment differ, values as text.

    Runs are compared with those of the same experiment alone: next to another experiment's
    everything would differ.
    """
    together: dict[str, list[Record]] = {}
    for record in records:
        together.setdefault(record.experiment, []).append(record)
    found = {}
    for group in together.values():
        for record, words in zip(group, _differing_in(group), strict=True):
            found[record.run.folder] = words
    return [found[record.run.folder] for record in records]


def compact(differ: Sequence[dict[str, str]]) -> tuple[list[dict[str, str]], dict[str, str]]:
    """Where many settings differ, each is told only of the runs that do not have what most have;
    and what most have."""
    keys = dict.fromkeys(key for words in differ for key in words if key)
    if len(keys) <= _FEW:
        return list(differ), {}
    counts = {key: Counter(words[key] for words in differ if key in words) for key in keys}
    common = {key: count.most_common(1)[0] for key, count in counts.items()}
    usual = {key: value for key, (value, n) in common.items() if 2 * n > counts[key].total()}
    return [{k: v for k, v in words.items() if usual.get(k) != v} for words in differ], usual


def spelled(words: dict[str, str]) -> str:
    said = {key: value for key, value in words.items() if value != "null"}
    return " ".join(f"{key}={value}" if key else value for key, value in said.items())


def changed(record: Record) -> dict[str, str]:
    """What is not as it is when nobody says anything."""
    from echelon.config.bundled import defaults

    usual = flatten(Config().to_dict()) | defaults(record.entry)
    apart = ("run.", "rank", "world_size", "master")
    mine = settings(record)
    return {k: text(v) for k, v in mine.items() if not k.startswith(apart) and _new(k, v, usual)}


def _new(key: str, value: Any, usual: dict[str, Any]) -> bool:
    return key not in usual or usual[key] != value


def text(value: Any) -> str:
    """As it would be typed."""
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, str):
        return value
    return json.dumps(value, separators=(",", ":"))


def _differing_in(group: Sequence[Record]) -> list[dict[str, str]]:
    texts = [{k: text(v) for k, v in settings(r).items() if _matters(k)} for r in group]
    sound = [mine for r, mine in zip(group, texts, strict=True) if not r.broken]
    keys = dict.fromkeys(key for mine in sound for key in mine)
    shown = _short([key for key in keys if len({mine.get(key) for mine in sound}) > 1])
    common = set.intersection(*(set(r.program) for r in group))
    found = []
    for record, mine in zip(group, texts, strict=True):
        words = {short: mine[key] for key, short in shown.items() if key in mine}
        program = " ".join(word for word in record.program if word not in common)
        found.append(words | ({"": program} if program else {}))
    return found


def _matters(key: str) -> bool:
    return not key.startswith(_NOT_THE_EXPERIMENT + _HOW_OFTEN)


def _short(keys: Sequence[str]) -> dict[str, str]:
    """Without `trainer.`, unless the experiment has a setting of the same name."""
    return {
        key: key if (bare := key.removeprefix("trainer.")) in keys and bare != key else bare
        for key in keys
    }
