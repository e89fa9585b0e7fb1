"""The whole state of a run at a step boundary: collected for a snapshot, restored from one.

Rank 0 reads; the others receive plain data and tensors, so no file system need be shared.
"""

from __future__ import annotations

import random
import struct
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from echelon.errors import EchelonError, Fault, nearest
from echelon.train.experiment import Experiment
from echelon.train.group import Group
from echelon.train.optimizers import Ways
from echelon.train.stages import devices_of

# --- random numbers of one rank, as one row of bytes of fixed length ---


def rng_row(*devices: torch.device) -> Tensor:
    _, words, gauss = random.getstate()
    _, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    parts = [
        torch.get_rng_state().numpy().tobytes(),
        struct.pack("<625I?d", *words, gauss is not None, gauss or 0.0),
        struct.pack("<624Iq?d", *keys, int(position), bool(has_gauss), float(cached)),
    ]
    gpus = [device for device in devices if device.type == "cuda"]
    parts += [torch.cuda.get_rng_state(gpu).numpy().tobytes() for gpu in gpus]
    return torch.frombuffer(bytearray(b"".join(parts)), dtype=torch.uint8)


def restore_rng(row: Tensor, *devices: torch.device) -> None:
    """A replica of more devices than it had draws anew on those that are new."""
    raw = row.numpy().tobytes()
    size = torch.get_rng_state().numel()
    python, numpy_ = struct.Struct("<625I?d"), struct.Struct("<624Iq?d")
    torch.set_rng_state(_bytes(raw[:size]))
    *words, has, gauss = python.unpack_from(raw, size)
    random.setstate((3, tuple(words), gauss if has else None))
    *keys, position, has, cached = numpy_.unpack_from(raw, size + python.size)
    np.random.set_state(("MT19937", np.array(keys, np.uint32), position, int(has), cached))
    rest = raw[size + python.size + numpy_.size :]
    gpus = [device for device in devices if device.type == "cuda"]
    size = torch.cuda.get_rng_state(gpus[0]).numel() if gpus else 0
    for at, gpu in zip(range(0, len(rest), size or 1), gpus, strict=False):
        torch.cuda.set_rng_state(_bytes(rest[at : at + size]), gpu)


def seed_all(seed: int) -> None:
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)


def _bytes(raw: bytes) -> Tensor:
    return torch.frombuffer(bytearray(raw), dtype=torch.uint8)


# --- the parts of a snapshot ---


def collect(experiment: Experiment, ways: Ways, group: Group) -> dict[str, Any]:
    """What a snapshot holds, on rank 0; every rank takes part, for its random numbers."""
    rows = group.gather(rng_row(*devices_of(group.world)))
    if group.world.rank != 0:
        return {}
    return {**parts_of(experiment, ways), "rng": {"ranks": torch.stack(rows)}}


def parts_of(experiment: Experiment, ways: Ways) -> dict[str, Any]:
    """What is the same on every rank, or held by all of them together."""
    optimizer: dict[str, Any] = {
        "optimizer": ways.plain(experiment.optimizer.state_dict()),
        "settings": ways.settings,
    }
    if experiment.schedule is not None:
        optimizer["schedule"] = experiment.schedule.state_dict()
    if experiment.scaler is not None:
        optimizer["scaler"] = experiment.scaler.state_dict()
    return {"model": experiment.model.state_dict(), "optimizer": optimizer}


def restore(
    experiment: Experiment, ways: Ways, parts: Mapping[str, Any], group: Group, given: bool
) -> None:
    """Load what rank 0 read into every rank. Of a snapshot that was `given` by its path, what the
    experiment has set otherwise since is not taken."""
    optimizer = _spread(parts.get("optimizer"), group)
    state, then = optimizer["optimizer"], optimizer.get("settings", ways.settings)
    if given:
        state = ways.changed(state, then)
    else:
        ways.settings = then  # which go on to hold
    rates = [group["lr"] for group in experiment.optimizer.param_groups]
    experiment.optimizer.load_state_dict(state)
    if experiment.schedule is not None and "schedule" in optimizer:
        experiment.schedule.load_state_dict(optimizer["schedule"])
    elif given:  # a schedule that is new begins with the experiment's rates
        for settings, rate in zip(experiment.optimizer.param_groups, rates, strict=True):
            settings["lr"] = rate
    if experiment.scaler is not None and "scaler" in optimizer:
        experiment.scaler.load_state_dict(optimizer["scaler"])
    rng = _spread(parts.get("rng"), group)["ranks"]
    if len(rng) == group.world.size:  # another number of ranks draws anew
        restore_rng(rng[group.world.rank], *devices_of(group.world))


def load_model(experiment: Experiment, weights: Mapping[str, Tensor]) -> None:
    mine = experiment.model.state_dict()
    faults = [
        Fault(f"the snapshot has {key!r}, the model does not", nearest(key, mine))
        for key in weights.keys() - mine.keys()
    ]
    faults += [
        Fault(f"the model has {key!r}, the snapshot does not", nearest(key, weights))
        for key in mine.keys() - weights.keys()
    ]
    faults += [
        Fault(
            f"{key!r} is {tuple(weights[key].shape)} in the snapshot and "
            f"{tuple(mine[key].shape)} in the model",
            "build the model as it was, or start a run of another name",
        )
        for key in mine.keys() & weights.keys()
        if mine[key].shape != weights[key].shape
    ]
    if faults:
        raise EchelonError(*sorted(faults, key=lambda f: f.what))
    experiment.model.load_state_dict(weights)


# --- a tree of plain data and tensors from rank 0 to all ---


def _spread(tree: Any, group: Group) -> Any:
    if group.world.size == 1:
        return tree
    tensors: list[Tensor] = []
    skeleton = group.broadcast_json(_skeleton(tree, tensors) if group.world.rank == 0 else None)
    return _rebuild(skeleton, iter(tensors), group)


def _skeleton(tree: Any, tensors: list[Tensor]) -> Any:
    """JSON for the tree, with what a receiver must allocate in the place of tensors."""
    if isinstance(tree, Tensor):
        tensors.append(tree)
        return {"tensor": [list(tree.shape), str(tree.dtype).removeprefix("torch.")]}
    if isinstance(tree, Mapping):
        return {"map": [[_skeleton(k, tensors), _skeleton(v, tensors)] for k, v in tree.items()]}
    if isinstance(tree, list | tuple):
        kind = "list" if isinstance(tree, list) else "tuple"
        return {kind: [_skeleton(v, tensors) for v in tree]}
    return tree


def _rebuild(node: Any, tensors: Any, group: Group) -> Any:
    if not isinstance(node, dict):
        return node
    [(kind, value)] = node.items()
    if kind == "tensor":
        shape, dtype = value
        mine = next(tensors, None)
        empty = torch.empty(shape, dtype=getattr(torch, dtype)) if mine is None else mine
        return group.broadcast(empty.contiguous())
    if kind == "map":
        return {_rebuild(k, tensors, group): _rebuild(v, tensors, group) for k, v in value}
    made = [_rebuild(v, tensors, group) for v in value]
    return made if kind == "list" else tuple(made)
