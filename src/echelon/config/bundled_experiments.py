"""The bundled experiments, read from their YAML files without Hydra, which takes long to import."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import Any

from echelon.config.schema import flatten

_FOLDER = Path(__file__).parents[1] / "conf" / "experiment"
"""Where the YAML files of the bundled experiments are."""
_ENTRY_LINE = re.compile(r"^\s*entry:\s*(\S+)", re.MULTILINE)


@cache
def read_names_by_entry() -> dict[str, str]:
    """Return the name of each bundled experiment by its entry.

    The entry is found in the text with a regular expression, because a list of runs must not wait
    for the import of a YAML parser.
    """
    files = {
        file.stem: _ENTRY_LINE.search(file.read_text(encoding="utf-8"))
        for file in _FOLDER.glob("*.yaml")
    }
    return {found[1]: name for name, found in files.items() if found}


def read_defaults(entry: str) -> dict[str, Any]:
    """Return the settings that a bundled experiment changes, as flat keys; its own settings have
    bare names.

    Returns nothing for a user's experiment: its code would have to run to know its settings.
    """
    if entry not in read_names_by_entry():
        return {}
    from omegaconf import OmegaConf

    tree = OmegaConf.to_container(
        OmegaConf.load(_FOLDER / f"{read_names_by_entry()[entry]}.yaml"), resolve=False
    )
    assert isinstance(tree, dict)
    settings = {str(k): v for k, v in tree.items()}
    experiment = settings.pop("experiment") if "experiment" in settings else settings
    others = flatten(settings) if experiment is not settings else {}
    return others | {k: v for k, v in flatten(experiment).items() if k != "entry"}
