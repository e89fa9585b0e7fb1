"""The whole state of a training at a step boundary: collected for a snapshot, restored from one.

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

from echelon.errors import EchelonError, Fault, suggest_nearest
from echelon.experiment.definition import Experiment
from echelon.experiment.optimizer_flags import OptimizerFlags
from echelon.parallel.model_parallel import get_process_devices
from echelon.parallel.process_group import RankGroup

# --- random numbers of one rank, as one row of bytes of fixed length ---


def pack_rng_state(*devices: torch.device) -> Tensor:
    """Return the random states of torch, Python, NumPy and these GPUs as bytes of a fixed
    length."""
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


def restore_rng_state(row: Tensor, *devices: torch.device) -> None:
    """Set the random states from pack_rng_state(). GPUs that the state does not know keep their
    own."""
    raw = row.numpy().tobytes()
    size = torch.get_rng_state().numel()
    python, numpy_ = struct.Struct("<625I?d"), struct.Struct("<624Iq?d")
    torch.set_rng_state(_to_byte_tensor(raw[:size]))
    *words, has, gauss = python.unpack_from(raw, size)
    random.setstate((3, tuple(words), gauss if has else None))
    *keys, position, has, cached = numpy_.unpack_from(raw, size + python.size)
    np.random.set_state(("MT19937", np.array(keys, np.uint32), position, int(has), cached))
    rest = raw[size + python.size + numpy_.size :]
    gpus = [device for device in devices if device.type == "cuda"]
    size = torch.cuda.get_rng_state(gpus[0]).numel() if gpus else 0
    for at, gpu in zip(range(0, len(rest), size or 1), gpus, strict=False):
        torch.cuda.set_rng_state(_to_byte_tensor(rest[at : at + size]), gpu)


def seed_all(seed: int) -> None:
    """Seed torch, Python and NumPy."""
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)


def _to_byte_tensor(raw: bytes) -> Tensor:
    return torch.frombuffer(bytearray(raw), dtype=torch.uint8)


# --- the parts of a snapshot ---


def collect_state(
    experiment: Experiment, optimizer_flags: OptimizerFlags, group: RankGroup
) -> dict[str, Any]:
    """Return the parts of a snapshot on rank 0 and an empty dict on other ranks. A collective,
    for the random states."""
    rng_rows = group.gather(pack_rng_state(*get_process_devices(group.world)))
    if group.world.rank != 0:
        return {}
    return {**collect_parts(experiment, optimizer_flags), "rng": {"ranks": torch.stack(rng_rows)}}


def collect_parts(experiment: Experiment, optimizer_flags: OptimizerFlags) -> dict[str, Any]:
    """Return the parts without random states: what is the same on every rank, or sharded over
    all."""
    optimizer: dict[str, Any] = {
        "optimizer": optimizer_flags.make_portable_state(experiment.optimizer.state_dict()),
        "settings": optimizer_flags.settings,
    }
    if experiment.schedule is not None:
        optimizer["schedule"] = experiment.schedule.state_dict()
    if experiment.scaler is not None:
        optimizer["scaler"] = experiment.scaler.state_dict()
    return {"model": experiment.model.state_dict(), "optimizer": optimizer}


def restore_state(
    experiment: Experiment,
    optimizer_flags: OptimizerFlags,
    parts: Mapping[str, Any],
    group: RankGroup,
    is_explicit: bool,
) -> None:
    """Load what rank 0 read into every rank. A collective.

    ``is_explicit`` is set for a snapshot that a person gave by its path: then settings that the
    experiment has changed since win over those in the snapshot.
    """
    optimizer = _broadcast_tree(parts.get("optimizer"), group)
    state, saved_settings = (
        optimizer["optimizer"],
        optimizer.get("settings", optimizer_flags.settings),
    )
    if is_explicit:
        state = optimizer_flags.merge_new_settings(state, saved_settings)
    else:
        optimizer_flags.settings = saved_settings  # which go on to hold
    rates = [group["lr"] for group in experiment.optimizer.param_groups]
    experiment.optimizer.load_state_dict(state)
    if experiment.schedule is not None and "schedule" in optimizer:
        experiment.schedule.load_state_dict(optimizer["schedule"])
    elif is_explicit:  # a schedule that is new begins with the experiment's rates
        for settings, rate in zip(experiment.optimizer.param_groups, rates, strict=True):
            settings["lr"] = rate
    if experiment.scaler is not None and "scaler" in optimizer:
        experiment.scaler.load_state_dict(optimizer["scaler"])
    rng = _broadcast_tree(parts.get("rng"), group)["ranks"]
    if len(rng) == group.world.size:  # another number of ranks draws anew
        restore_rng_state(rng[group.world.rank], *get_process_devices(group.world))


def load_model(experiment: Experiment, weights: Mapping[str, Tensor]) -> None:
    """Load weights into the experiment's model. Raises EchelonError with every key and shape
    that does not fit."""
    own_state = experiment.model.state_dict()
    faults = [
        Fault(f"the snapshot has {key!r}, the model does not", suggest_nearest(key, own_state))
        for key in weights.keys() - own_state.keys()
    ]
    faults += [
        Fault(f"the model has {key!r}, the snapshot does not", suggest_nearest(key, weights))
        for key in own_state.keys() - weights.keys()
    ]
    faults += [
        Fault(
            f"{key!r} is {tuple(weights[key].shape)} in the snapshot and "
            f"{tuple(own_state[key].shape)} in the model",
            "build the model as it was, or start a run of another name",
        )
        for key in own_state.keys() & weights.keys()
        if own_state[key].shape != weights[key].shape
    ]
    if faults:
        raise EchelonError(*sorted(faults, key=lambda f: f.what))
    experiment.model.load_state_dict(weights)


# --- a tree of plain data and tensors from rank 0 to all ---


def _broadcast_tree(tree: Any, group: RankGroup) -> Any:
    """Return rank 0's tree of plain data and tensors on every rank."""
    if group.world.size == 1:
        return tree
    tensors: list[Tensor] = []
    skeleton = group.broadcast_json(
        _build_skeleton(tree, tensors) if group.world.rank == 0 else None
    )
    return _rebuild_tree(skeleton, iter(tensors), group)


def _build_skeleton(tree: Any, tensors: list[Tensor]) -> Any:
    """Return JSON for the tree, with shape and dtype in the place of each tensor, so that a
    receiver can allocate it; tensors are appended to ``tensors``."""
    if isinstance(tree, Tensor):
        tensors.append(tree)
        return {"tensor": [list(tree.shape), str(tree.dtype).removeprefix("torch.")]}
    if isinstance(tree, Mapping):
        return {
            "map": [
                [_build_skeleton(k, tensors), _build_skeleton(v, tensors)] for k, v in tree.items()
            ]
        }
    if isinstance(tree, list | tuple):
        kind = "list" if isinstance(tree, list) else "tuple"
        return {kind: [_build_skeleton(v, tensors) for v in tree]}
    return tree


def _rebuild_tree(node: Any, tensors: Any, group: RankGroup) -> Any:
    """Return the tree of a skeleton, receiving its tensors one by one."""
    if not isinstance(node, dict):
        return node
    [(kind, value)] = node.items()
    if kind == "tensor":
        shape, dtype = value
        own_tensor = next(tensors, None)
        empty = (
            torch.empty(shape, dtype=getattr(torch, dtype)) if own_tensor is None else own_tensor
        )
        return group.broadcast(empty.contiguous())
    if kind == "map":
        return {
            _rebuild_tree(k, tensors, group): _rebuild_tree(v, tensors, group) for k, v in value
        }
    items = [_rebuild_tree(v, tensors, group) for v in value]
    return items if kind == "list" else tuple(items)
