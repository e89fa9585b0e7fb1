"""The files wandb writes for `wandb sync`, read back: records in the framing of LevelDB's log."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_HEADER = 7
_BLOCK = 32 * 1024
_FULL, _LAST = 1, 4


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
        for record in _records(path):
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


def _records(path: Path) -> Iterator[Any]:
    from wandb.proto import wandb_internal_pb2

    data, at, part = path.read_bytes(), _HEADER, b""
    while at + _HEADER <= len(data):
        left = _BLOCK - at % _BLOCK
        if left < _HEADER:  # too little for another piece
            at += left
            continue
        _, size, kind = struct.unpack("<IHB", data[at : at + _HEADER])
        part += data[at + _HEADER : at + _HEADER + size]
        at += _HEADER + size
        if at > len(data):
            return  # cut off by a kill
        if kind in (_FULL, _LAST):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(part)
            part = b""
            yield record
