"""Several runs from one command: `lr=0.1,0.2 seed=range(0,5)` is ten."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException

from echelon.config.plain_words import quote_plain_word
from echelon.errors import EchelonError, Fault


def expand_multirun(overrides: Sequence[str]) -> list[list[str]]:
    """Return the overrides of every combination, the last override varying fastest.

    An override that cannot be parsed is passed on unchanged: `compose` reports it, together with
    all other faults.
    """
    choices = [_expand_override(word) for word in overrides]
    empty = [word for word, values in zip(overrides, choices, strict=True) if not values]
    if empty:
        raise EchelonError(
            *(
                Fault(f"{word} lists no value, so there is no run", "list at least one")
                for word in empty
            )
        )
    return [list(words) for words in itertools.product(*choices)]


def _expand_override(word: str) -> list[str]:
    """Return one override for each value that a sweep such as `lr=0.1,0.2` lists."""
    try:
        override = OverridesParser.create().parse_override(quote_plain_word(word))
    except HydraException:
        return [word]
    if not override.is_sweep_override():
        return [word]
    return [f"{override.get_key_element()}={value}" for value in override.sweep_string_iterator()]
