"""The bundled experiments as their files have them, without Hydra."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import Any

from echelon.config.schema import flatten

_FOLDER = Path(__file__).parents[1] / "conf" / "experiment"
_ENTRY_LINE = re.compile(r"^\s*entry:\s*(\S+)", re.MULTILINE)


@cache
def list_entries() -> dict[str, str]:
    """What each is called, by its entry; from the text, as a list of runs must not wait for a
    reader of YAML."""
    files = {
        file.stem: _ENTRY_LINE.search(file.read_text(encoding="utf-8"))
        for file in _FOLDER.glob("*.yaml")
    }
    return {found[1]: name for name, found in files.items() if found}


def read_defaults(entry: str) -> dict[str, Any]:
    """Flat, the experiment's own by bare names; nothing for an experiment that is not ours, whose
    code would have to be run to know."""
    if entry not in list_entries():
        return {}
    from omegaconf import OmegaConf

    tree = OmegaConf.to_container(
        OmegaConf.load(_FOLDER / f"{list_entries()[entry]}.yaml"), resolve=False
    )
    assert isinstance(tree, dict)
    settings = {str(k): v for k, v in tree.items()}
    experiment = settings.pop("experiment") if "experiment" in settings else settings
    others = flatten(settings) if experiment is not settings else {}
    return others | {k: v for k, v in flatten(experiment).items() if k != "entry"}
