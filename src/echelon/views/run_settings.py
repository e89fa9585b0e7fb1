"""Settings in few words: those in which runs differ, and those that are not the defaults."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Container, Sequence
from functools import cache
from typing import Any

from echelon.config.schema import Config, flatten
from echelon.runs.record import RunRecord

_IRRELEVANT_PREFIXES = ("run.", "launch.", "track.", "rank", "world_size", "master", "program")
"""Settings of where a run is and how it is followed. Two runs that differ only in these are the
same training."""
_MAX_FULL_KEYS = 3
_INTERVAL_KEYS = (
    *("trainer.resume", "trainer.save.", "trainer.keep_last", "trainer.mirror"),
    "trainer.log_steps",
)


def flatten_settings(record: RunRecord) -> dict[str, Any]:
    """Return the settings flat, the experiment's own by their bare names, as they are typed,
    unless a setting of ours has the same name."""
    flat = flatten({k: v for k, v in record.config.items() if k != "program"})
    return {_get_command_line_key(k, flat): v for k, v in flat.items() if k != "experiment.entry"}


def flatten_changed_settings(record: RunRecord) -> dict[str, Any]:
    """Return those of flatten_settings() that are not the defaults of the schema. Sections that are
    as they are by default are not looked into, since a list may have thousands of runs."""
    sections, defaults = _get_default_sections(), get_default_settings()
    changed = {
        key: value
        for key, value in record.config.items()
        if key != "program" and (key not in sections or sections[key] != value)
    }
    flat = flatten(changed)
    known = flat.keys() | defaults.keys()
    return {
        _get_command_line_key(key, known): value
        for key, value in flat.items()
        if key != "experiment.entry" and (key not in defaults or defaults[key] != value)
    }


@cache
def get_default_settings() -> dict[str, Any]:
    """Return the settings of the schema with their defaults, flat."""
    return flatten(_get_default_sections())


@cache
def _get_default_sections() -> dict[str, Any]:
    return Config().to_dict()


def _get_command_line_key(key: str, known: Container[str]) -> str:
    bare = key.removeprefix("experiment.")
    return key if bare in known else bare


def find_setting_differences(records: Sequence[RunRecord]) -> list[dict[str, str]]:
    """Return for each run the settings in which runs of its experiment differ, values as text.

    Runs are compared only with those of the same experiment: next to another experiment's
    everything would differ.
    """
    by_experiment: dict[str, list[RunRecord]] = {}
    for record in records:
        by_experiment.setdefault(record.experiment, []).append(record)
    found = {}
    for group in by_experiment.values():
        for record, words in zip(group, _find_differences_in_group(group), strict=True):
            found[record.run.folder] = words
    return [found[record.run.folder] for record in records]


def omit_majority_values(
    differences: Sequence[dict[str, str]],
) -> tuple[list[dict[str, str]], dict[str, str]]:
    """Return the differences without the values that most runs have, and those values. Does
    nothing where few settings differ."""
    keys = dict.fromkeys(key for words in differences for key in words if key)
    if len(keys) <= _MAX_FULL_KEYS:
        return list(differences), {}
    counts = {key: Counter(words[key] for words in differences if key in words) for key in keys}
    common = {key: count.most_common(1)[0] for key, count in counts.items()}
    common_values = {
        key: value for key, (value, n) in common.items() if 2 * n > counts[key].total()
    }
    return [
        {k: v for k, v in words.items() if common_values.get(k) != v} for words in differences
    ], common_values


def format_settings(settings: dict[str, str]) -> str:
    """Return settings as they are typed: ``lr=0.1 epochs=3``."""
    shown = {key: value for key, value in settings.items() if value != "null"}
    return " ".join(f"{key}={value}" if key else value for key, value in shown.items())


def find_non_defaults(record: RunRecord) -> dict[str, str]:
    """Return the settings of a run that differ from the defaults, values as text."""
    from echelon.config.bundled_experiments import read_defaults

    usual = flatten(Config().to_dict()) | read_defaults(record.entry_point)
    irrelevant = ("run.", "rank", "world_size", "master")
    mine = flatten_settings(record)
    return {
        k: format_setting_value(v)
        for k, v in mine.items()
        if not k.startswith(irrelevant) and _is_non_default(k, v, usual)
    }


def _is_non_default(key: str, value: Any, usual: dict[str, Any]) -> bool:
    return key not in usual or usual[key] != value


def format_setting_value(value: Any) -> str:
    """Return a value as it would be typed."""
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, str):
        return value
    return json.dumps(value, separators=(",", ":"))


def _find_differences_in_group(group: Sequence[RunRecord]) -> list[dict[str, str]]:
    texts = [
        {
            key: format_setting_value(value)
            for key, value in flatten_settings(record).items()
            if is_relevant_setting(key)
        }
        for record in group
    ]
    sound = [mine for r, mine in zip(group, texts, strict=True) if not r.problem]
    keys = dict.fromkeys(key for mine in sound for key in mine)
    shown = _shorten_keys([key for key in keys if len({mine.get(key) for mine in sound}) > 1])
    common = set.intersection(*(set(r.program_argv) for r in group))
    found = []
    for record, mine in zip(group, texts, strict=True):
        words = {short: mine[key] for key, short in shown.items() if key in mine}
        program = " ".join(word for word in record.program_argv if word not in common)
        found.append(words | ({"": program} if program else {}))
    return found


def is_relevant_setting(key: str) -> bool:
    """Return whether a setting says something about the training, not about where it ran."""
    return not key.startswith(_IRRELEVANT_PREFIXES + _INTERVAL_KEYS)


def _shorten_keys(keys: Sequence[str]) -> dict[str, str]:
    """Without `trainer.`, unless the experiment has a setting of the same name."""
    return {
        key: key if (bare := key.removeprefix("trainer.")) in keys and bare != key else bare
        for key in keys
    }
