"""What is in the files wandb writes for `wandb sync`."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from echelon.tracking.wandb_file import read_records


@dataclass(frozen=True)
class Offline:
    """All that the files of one run folder hold."""

    ids: set[str]
    rows: list[dict[str, Any]]
    configs: list[dict[str, Any]]
    exits: list[int]
    preempting: int


def read(folder: Path) -> Offline:
    offline = Offline(set(), [], [], [], 0)
    preempting = 0
    for path in sorted(folder.glob("wandb/*run-*/*.wandb")):
        for record in read_records(path):
            kind = record.WhichOneof("record_type")
            if kind == "run":
                offline.ids.add(record.run.run_id)
                offline.configs.append(_items(record.run.config.update))
            elif kind == "history":
                offline.rows.append(_items(record.history.item))
            elif kind == "exit":
                offline.exits.append(record.exit.exit_code)
            preempting += kind == "preempting"
    return Offline(offline.ids, offline.rows, offline.configs, offline.exits, preempting)


def _items(items: Any) -> dict[str, Any]:
    return {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in items}
