"""Checks that all ranks hold the same data, as every rank takes its share out of its own copy.

Data that is drawn when a file is imported differs between ranks that torchrun or Slurm started:
some samples would be trained on twice and some never, and nobody would notice.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any

import torch
from torch import Tensor

from echelon.data.batches import get_columns
from echelon.data.data_layout import DataLayout, find_layout_change
from echelon.data.epoch_plan import EpochPlan
from echelon.data.sampler_plan import SamplerPlan
from echelon.data.sharded_stream import find_stream
from echelon.errors import EchelonError, ExitCode, Fault
from echelon.parallel.process_group import RankGroup

COMPARE_TIMEOUT_S = 600.0
_REMEDY = (
    "read it from a file, or draw it with a seed; a function that Echelon calls has the same seed "
    "on every process"
)
_ORDER = "the order of the sampler"
_OF_STREAM = "stream"
_LAYOUT = "the layout of the data"
_REMEDIES = {
    _ORDER: "let it give the order of all samples, from the epoch alone; every rank cuts out its "
    "own share",
    _LAYOUT: "give all ranks the same files in the same order",
}


def require_same_data(group: RankGroup, plan: EpochPlan | None, **data: Any) -> None:
    """Raises where data of the ranks differs in its length, or in the first or last row of its
    tensors; or where a sampler gives another order. Each name of data is checked once."""
    if group.store is None:
        return
    own = {name: _summarize_data(rows) for name, rows in data.items()}
    if plan is not None:
        own[_LAYOUT] = list(plan.layout)
    if isinstance(plan, SamplerPlan):
        own[_ORDER] = [plan.epoch_samples, plan.compute_digest()]
    names = " and ".join(data)
    rank0 = json.loads(group.share_from_rank0(names, json.dumps(own)))
    faults = [
        Fault(
            f"{name} is not the same on all ranks: "
            f"{_describe_difference(name, of_rank, rank0.get(name, [0, '']))}",
            _REMEDIES.get(name, _REMEDY),
        )
        for name, of_rank in own.items()
        if of_rank != rank0.get(name)
    ]
    if faults:
        raise EchelonError(*faults, exit=ExitCode.USAGE)


def _summarize_data(data: Any) -> list[Any]:
    """Return the number of samples, and for tensors a hash of the first and the last row."""
    if data is None:
        return [0, ""]
    if (stream := find_stream(data)) is not None:  # whose samples cannot be read before their time
        return [stream.shards, _OF_STREAM]
    tensors = get_columns(data)
    if tensors is None:
        return [len(data), ""]
    ends = hashlib.blake2b(digest_size=8)
    for t in tensors:
        for end in (t[:1], t[-1:]):
            ends.update(f"{end.dtype} {tuple(end.shape)}".encode())
            ends.update(_read_bytes(end))
    return [len(tensors[0]), ends.hexdigest()]


def _read_bytes(rows: Any) -> bytes:
    """Return the bytes of a tensor, also of a dtype that numpy does not know, or of an array."""
    if isinstance(rows, Tensor):
        rows = rows.detach().cpu().reshape(-1).view(torch.uint8).numpy()
    raw: bytes = rows.tobytes()
    return raw


def _describe_difference(name: str, own: list[Any], rank0: list[Any]) -> str:
    """Says how this rank's data, or the order of it, differs from rank 0's."""
    if own[0] != rank0[0]:
        unit = "shards of a stream" if _OF_STREAM in (own[1], rank0[1]) else "samples"
        return f"{own[0]:,} {unit} here, {rank0[0]:,} on rank 0"
    if name == _LAYOUT:
        return f"{find_layout_change(DataLayout(*rank0), DataLayout(*own))}, as on rank 0"
    if name == _ORDER:
        return "the first epoch has another one than on rank 0"
    return "its first or last sample is another one than on rank 0"
