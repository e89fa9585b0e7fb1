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
import xxhash
from torch import Tensor, nn

from echelon.errors import EchelonError, ExitCode, Fault, suggest_nearest
from echelon.experiment.definition import Experiment, get_parts_by_name
from echelon.experiment.optimizer_flags import OptimizerFlags, match_state_layout
from echelon.experiment.schedule_length import load_schedule_state
from echelon.parallel.model_parallel import get_process_devices
from echelon.parallel.packed_tree import pack_tree
from echelon.parallel.process_group import RankGroup
from echelon.snapshot.layout import EMA_NAME, STATE_PART
from echelon.snapshot.staging_buffer import copy_from_file, find_unsavable_values, to_plain_tree

_EXTRA_STATE = "_extra_state"
"""How torch ends the key of what a module returns from `get_extra_state`."""

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
    require_equal_state(experiment.state, group)
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
    parts = {"model": experiment.model.state_dict(), "optimizer": optimizer}
    if experiment.state:
        parts[STATE_PART] = {name: part.state_dict() for name, part in experiment.state.items()}
    return parts


def require_equal_state(state: Mapping[str, Any] | None, group: RankGroup) -> None:
    """Raise EchelonError on all ranks where a part of an experiment's state differs between them:
    rank 0's would be restored on all. A collective."""
    if names := find_differing_state(state, group):
        raise EchelonError(
            *(
                Fault(
                    f"the experiment's state {name!r} differs between the ranks, but a snapshot "
                    "keeps rank 0's for all",
                    "let it depend on what is equal on all ranks, such as the weights, or gather "
                    "what each rank has",
                )
                for name in names
            ),
            exit=ExitCode.FAILED,
        )


def find_differing_state(state: Mapping[str, Any] | None, group: RankGroup) -> list[str]:
    """Return on all ranks the names of parts whose state differs between them. A collective."""
    if not state or group.world.size == 1:
        return []
    rows = {
        name: pack_tree(to_plain_tree(part.state_dict(), (STATE_PART, name)))
        for name, part in state.items()
        if name != EMA_NAME  # which is made of the weights, and equal as they are
    }
    digests = {name: xxhash.xxh3_128_hexdigest(row.numpy().data) for name, row in rows.items()}
    of_ranks = group.gather_json(digests)
    differing = [name for name in digests if len({found.get(name) for found in of_ranks}) > 1]
    names: list[str] = group.broadcast_json(differing)
    return names


def require_savable(experiment: Experiment) -> None:
    """Raise EchelonError with everything that a snapshot could not hold, or not bring back: what
    modules keep as extra state, the experiment's state, and that of a schedule of its own."""
    faults = find_extra_state_faults(experiment.model, "model")
    for name, part in (experiment.state or {}).items():
        faults += find_unsavable_values(part.state_dict(), (STATE_PART, name))
    for name, schedule in get_parts_by_name("schedule", experiment.schedule).items():
        faults += find_unsavable_values(schedule.state_dict(), (name,))
    if faults:
        raise EchelonError(*faults)


def find_extra_state_faults(model: nn.Module, part: str) -> list[Fault]:
    """Return what is wrong with the extra state of a part's modules."""
    faults = []
    for name, module in model.named_modules():
        kind = type(module)
        if kind.get_extra_state is nn.Module.get_extra_state:
            continue
        if kind.set_extra_state is nn.Module.set_extra_state:
            faults.append(
                Fault(
                    f"{kind.__name__} has get_extra_state but no set_extra_state, so a snapshot of "
                    "it could never be loaded",
                    "write both, or neither",
                )
            )
        where = (part, f"{name}.{_EXTRA_STATE}" if name else _EXTRA_STATE)
        faults += find_unsavable_values(module.get_extra_state(), where)
    return faults


def is_extra_state(key: str) -> bool:
    """Return whether a key of a model's state is that of what a module returned from
    `get_extra_state`."""
    return key == _EXTRA_STATE or key.endswith(f".{_EXTRA_STATE}")


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
    optimizer = broadcast_tree(parts.get("optimizer"), group)
    own_parts = broadcast_tree(parts.get(STATE_PART), group)
    load_state(experiment, optimizer_flags, optimizer, own_parts, is_explicit)
    rng = broadcast_tree(parts.get("rng"), group)["ranks"]
    if len(rng) == group.world.size:  # another number of ranks draws anew
        restore_rng_state(rng[group.world.rank], *get_process_devices(group.world))


def load_state(
    experiment: Experiment,
    optimizer_flags: OptimizerFlags,
    optimizer: Mapping[str, Any],
    own_parts: Mapping[str, Any] | None,
    is_explicit: bool = False,
) -> None:
    """Load everything but the model and the random states into the experiment of this rank."""
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
    match_state_layout(experiment.optimizer)
    if experiment.schedule is not None and "schedule" in optimizer:
        load_schedule_state(experiment.schedule, optimizer["schedule"])
    elif is_explicit:  # a schedule that is new begins with the experiment's rates
        for settings, rate in zip(experiment.optimizer.param_groups, rates, strict=True):
            settings["lr"] = rate
    if experiment.scaler is not None and "scaler" in optimizer:
        experiment.scaler.load_state_dict(optimizer["scaler"])
    _restore_own_parts(experiment, own_parts, is_explicit)


def _restore_own_parts(
    experiment: Experiment, saved: Mapping[str, Any] | None, is_explicit: bool
) -> None:
    """Load the parts of the experiment's state. With a snapshot that a person gave by its path,
    parts that it does not have begin as they were built."""
    own, saved = experiment.state or {}, saved or {}
    faults = []
    if not is_explicit:
        faults += [
            Fault(
                f"the snapshot has no state {name!r}, which the experiment has now",
                "leave it out, or start a run of another name",
            )
            for name in own.keys() - saved.keys()
        ]
        faults += [
            Fault(
                f"the snapshot has state {name!r}, which the experiment no longer has",
                suggest_nearest(name, own) if own else "give it back to the experiment",
            )
            for name in saved.keys() - own.keys()
        ]
    for name in own.keys() & saved.keys():
        try:
            own[name].load_state_dict(copy_from_file(saved[name]))
        except Exception as error:
            what = f"{type(error).__name__}: {error}"
            faults.append(
                Fault(
                    f"the experiment's state {name!r} cannot be loaded from the snapshot: {what}",
                    "build it as it was, or start a run of another name",
                )
            )
    if faults:
        raise EchelonError(*sorted(faults))


def share_extra_state(experiment: Experiment, weights: Mapping[str, Any], group: RankGroup) -> None:
    """Load the extra state of rank 0's weights on the other ranks. A collective.

    DDP and FSDP broadcast parameters and buffers, and nothing else.
    """
    found = broadcast_tree({k: v for k, v in weights.items() if is_extra_state(k)}, group)
    if found and group.world.rank != 0:
        experiment.model.load_state_dict(found, strict=False)


def load_model(experiment: Experiment, weights: Mapping[str, Any]) -> None:
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
        if not is_extra_state(key) and own_state[key].shape != weights[key].shape
    ]
    if faults:
        raise EchelonError(*sorted(faults, key=lambda f: f.what))
    kept = {k: copy_from_file(v) if is_extra_state(k) else v for k, v in weights.items()}
    experiment.model.load_state_dict(kept)


# --- a tree of plain data and tensors from rank 0 to all ---


def broadcast_tree(tree: Any, group: RankGroup, source: int = 0) -> Any:
    """Return the tree of rank `source`, of plain data and tensors, on every rank."""
    if group.world.size == 1:
        return tree
    tensors: list[Tensor] = []
    is_source = group.world.rank == source
    skeleton = group.broadcast_json(_build_skeleton(tree, tensors) if is_source else None, source)
    return _rebuild_tree(skeleton, iter(tensors), group, source)


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


def _rebuild_tree(node: Any, tensors: Any, group: RankGroup, source: int) -> Any:
    """Return the tree of a skeleton, receiving its tensors one by one."""
    if not isinstance(node, dict):
        return node
    [(kind, value)] = node.items()
    if kind == "tensor":
        shape, dtype = value
        own_tensor = next(tensors, None)
        tensor = (
            torch.empty(shape, dtype=getattr(torch, dtype))
            if own_tensor is None
            else own_tensor.contiguous()
        )
        if tensor.numel():  # as bytes, because gloo does not know every dtype
            group.broadcast(tensor.reshape(-1).view(torch.uint8), source)
        return tensor
    if kind == "map":
        pairs = [[_rebuild_tree(item, tensors, group, source) for item in pair] for pair in value]
        return dict(pairs)
    items = [_rebuild_tree(v, tensors, group, source) for v in value]
    return items if kind == "list" else tuple(items)
