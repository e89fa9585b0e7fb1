"""The settings of the bundled experiments as their files have them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from echelon.config.schema import flatten


def experiment_defaults(entry: str) -> dict[str, Any]:
    """Flat, by bare names; nothing for an experiment that is not ours, whose code would have to
    be run to know."""
    from omegaconf import DictConfig, OmegaConf

    for file in (Path(__file__).parents[1] / "conf/experiment").glob("*.yaml"):
        loaded = OmegaConf.load(file)
        if isinstance(loaded, DictConfig) and loaded.get("entry") == entry:
            values = OmegaConf.to_container(loaded, resolve=False)
            assert isinstance(values, dict)
            return flatten({str(k): v for k, v in values.items() if k != "entry"})
    return {}
