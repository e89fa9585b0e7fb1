"""The bundled experiments as their files have them, without Hydra."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import Any

from echelon.config.schema import flatten

_FILES = Path(__file__).parents[1] / "conf" / "experiment"
_ENTRY = re.compile(r"^\s*entry:\s*(\S+)", re.MULTILINE)


@cache
def names() -> dict[str, str]:
    """What each is called, by its entry; from the text, as a list of runs must not wait for a
    reader of YAML."""
    files = {
        file.stem: _ENTRY.search(file.read_text(encoding="utf-8")) for file in _FILES.glob("*.yaml")
    }
    return {found[1]: name for name, found in files.items() if found}


def defaults(entry: str) -> dict[str, Any]:
    """Flat, the experiment's own by bare names; nothing for an experiment that is not ours, whose
    code would have to be run to know."""
    if entry not in names():
        return {}
    from omegaconf import OmegaConf

    tree = OmegaConf.to_container(OmegaConf.load(_FILES / f"{names()[entry]}.yaml"), resolve=False)
    assert isinstance(tree, dict)
    told = {str(k): v for k, v in tree.items()}
    own = told.pop("experiment") if "experiment" in told else told
    others = flatten(told) if own is not told else {}
    return others | {k: v for k, v in flatten(own).items() if k != "entry"}
