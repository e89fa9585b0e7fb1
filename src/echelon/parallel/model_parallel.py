"""One replica on several devices: its layers are split into stages, one after the other.

The experiment places the layers itself, or they are split into stages whose memory is as even as
whole layers allow. Nothing is wrapped: a layer moves to its device and a hook fetches its inputs.
Names, and with them snapshots, are therefore the same on any number of devices. On a CPU the stages
exist by name only, and everything else is as it is on GPUs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from echelon.errors import EchelonError, Fault
from echelon.experiment.definition import Experiment, default_predict
from echelon.experiment.module_modes import use_eval_mode
from echelon.utils.text import format_bytes, join_names
from echelon.world import World

_PLACE_BY_HAND = "place the layers yourself: def experiment(cfg, devices): …"


def get_process_devices(world: World) -> tuple[torch.device, ...]:
    """Return the devices of this process as torch knows them, in order.

    torch has one CPU only: "cpu:0" and "cpu:1" are both "cpu", or torch would copy tensors between
    them.
    """
    names = ("cpu" if name.startswith("cpu") else name for name in world.devices)
    return tuple(map(torch.device, names))


class StageDescription(NamedTuple):
    """What lies on one device, for the opening line of a run."""

    device: str
    layers: str
    size_bytes: int
    """The size of its parameters and buffers."""


class SampleBatch(NamedTuple):
    """A few samples, to see the sizes of the layers' outputs."""

    data: Any
    scale: float
    """How many times as many samples a forward pass of the training has."""


def split_model(
    experiment: Experiment,
    names: Sequence[str],
    devices: Sequence[torch.device],
    sample: SampleBatch,
) -> list[StageDescription]:
    """Splits the model into one stage per device, moves the layers, and describes the stages."""
    stages = _plan_stages(experiment, devices, sample)
    for stage, device in zip(stages, devices, strict=True):
        for piece in stage:
            _place_layer_group(piece, device)
    _wrap_predict_and_loss(experiment, devices[0], devices[-1])
    _require_separable(experiment, devices, sample)
    return [_describe_stage(name, stage) for name, stage in zip(names, stages, strict=True)]


def format_stages(stages: Sequence[StageDescription]) -> str:
    """Describes the stages in one line."""
    return "; ".join(f"{s.device}: {s.layers}, {format_bytes(s.size_bytes)}" for s in stages)


def _wrap_predict_and_loss(experiment: Experiment, first: torch.device, last: torch.device) -> None:
    """Wraps `predict` and `loss`: outputs and targets meet on the last device, losses go to the
    first.

    The loss is weighted and kept on the first device, like on a replica with one device.
    """
    predict, loss = experiment.predict or default_predict, experiment.loss
    experiment.predict = lambda model, batch: _move_tensors(predict(model, batch), last)
    experiment.loss = lambda output, target: loss(output, target).to(first)


def _move_tensors(tree: Any, device: torch.device) -> Any:
    """Moves all tensors of a nested structure to a device."""
    is_async = device.type == "cuda"  # a CPU would read data that has not arrived
    return tree_map_only(Tensor, lambda t: t.to(device, non_blocking=is_async), tree)


# --- placed by hand ---


def describe_manual_placement(
    experiment: Experiment, names: Sequence[str], devices: Sequence[torch.device]
) -> list[StageDescription]:
    """Checks and describes the placement that the experiment itself has chosen."""
    tensors = dict(_iter_parameters_and_buffers(experiment.model))
    misplaced = [name for name, tensor in tensors.items() if tensor.device not in devices]
    if misplaced:
        where = tensors[misplaced[0]].device
        raise EchelonError(
            Fault(
                f"the experiment takes devices ({join_names(names)}), but left {misplaced[0]} "
                f"on {where}"
                + (f", and {len(misplaced) - 1} more like it" if len(misplaced) > 1 else ""),
                "move every layer to one of them: layer.to(devices[0])",
            )
        )
    _wrap_predict_and_loss(experiment, devices[0], devices[-1])
    if devices[0].type == "cpu":
        return [
            StageDescription(
                join_names(names), "placed by the experiment", _sum_bytes(tensors.values())
            )
        ]
    on = {d: [t for t in tensors.values() if t.device == d] for d in devices}
    counted = ((name, on[d]) for name, d in zip(names, devices, strict=True))
    return [
        StageDescription(name, f"{len(tensors_there)} tensors", _sum_bytes(tensors_there))
        for name, tensors_there in counted
    ]


# --- cut by us ---


class LayerGroup(NamedTuple):
    """Layers that stay together: a layer with parameters, and its neighbours without."""

    first: str
    last: str
    layers: list[nn.Module]
    enclosing: list[nn.Module]
    """Modules around the layers that have tensors of their own."""


def _plan_stages(
    experiment: Experiment, devices: Sequence[torch.device], sample: SampleBatch
) -> list[list[LayerGroup]]:
    """Return the layer groups of each stage; raise where the model cannot be split."""
    model, count = experiment.model, len(devices)
    layer_groups = list_layer_groups(model)
    kind = type(model).__name__
    if not layer_groups:
        raise EchelonError(
            Fault(
                f"replica.devices={count}, but {kind} cannot be split: there is no Sequential and "
                "no ModuleList in it that would say in which order its layers come",
                f"put its layers into one, or {_PLACE_BY_HAND}",
            )
        )
    if len(layer_groups) < count:
        raise EchelonError(
            Fault(
                f"replica.devices={count}, but {kind} has only {len(layer_groups)} layers to "
                "split between",
                f"set replica.devices={len(layer_groups)} or fewer, or {_PLACE_BY_HAND}",
            )
        )
    output_sizes = _measure_output_bytes(experiment, layer_groups, sample)
    copy_count = _count_state_copies(experiment.optimizer)
    costs = [
        _estimate_bytes(piece, copy_count) + int(output * sample.scale)
        for piece, output in zip(layer_groups, output_sizes, strict=True)
    ]
    ends = [0, *accumulate(split_costs_evenly(costs, count))]
    stages = [layer_groups[a:b] for a, b in pairwise(ends)]
    _require_unshared_parameters(model, stages)
    return stages


def list_layer_groups(model: nn.Module) -> list[LayerGroup]:
    """Return the layers in order, where the model shows in which order they run.

    The order is that of a Sequential or ModuleList, the largest in the model. All that comes before
    it in the model is one group, and so is all that comes after: only the model's forward knows
    their order.
    """
    path = _find_largest_chain(model)
    if path is None:
        return []
    before: dict[str, nn.Module] = {}
    after: dict[str, nn.Module] = {}
    around, module = [], model
    for depth, name in enumerate(path):
        around.append(module)
        prefix = "".join(f"{above}." for above in path[:depth])
        children = [(f"{prefix}{child}", layer) for child, layer in module.named_children()]
        at = [child for child, _ in children].index(prefix + name)
        before |= dict(children[:at])
        after = dict(children[at + 1 :]) | after
        module = children[at][1]
    found = [_make_layer_group(before, around)] if around else []
    found += [
        LayerGroup(name, name, [layer], [])
        for name, layer in _flatten_chain(module, ".".join(path))
    ]
    found += [_make_layer_group(after, [])] if after else []
    return _merge_parameterless_layers(found)


def _make_layer_group(layers: dict[str, nn.Module], enclosing: list[nn.Module]) -> LayerGroup:
    """Makes one group of the layers on one side of the chain, with the modules that enclose it."""
    own = [name for module in enclosing for name, _ in module.named_parameters(recurse=False)]
    names = [*own, *layers] or [""]
    return LayerGroup(names[0], names[-1], list(layers.values()), enclosing)


def _find_largest_chain(model: nn.Module) -> tuple[str, ...] | None:
    """Return the path to the chain with the largest parameters; () for the model itself, None for
    none."""
    if _is_chain(model):
        return ()
    chains = {
        n: m for n, m in model.named_modules() if _is_chain(m) and len(list(m.children())) > 1
    }
    if not chains:
        return None
    largest = max(chains, key=lambda name: _sum_bytes(chains[name].parameters()))
    return tuple(largest.split("."))


def _is_chain(module: nn.Module) -> bool:
    """Return whether the children of a module run in order.

    A Sequential with a forward of its own may do anything, so it is not a chain.
    """
    plain = isinstance(module, nn.Sequential) and type(module).forward is nn.Sequential.forward
    return plain or isinstance(module, nn.ModuleList)


def _flatten_chain(chain: nn.Module, prefix: str) -> Iterator[tuple[str, nn.Module]]:
    """Yields the layers of a chain with their names; chains within it are opened as well."""
    for name, layer in chain.named_children():
        full = f"{prefix}.{name}" if prefix else name
        if isinstance(layer, nn.Sequential) and _is_chain(layer):
            yield from _flatten_chain(layer, full)
        else:
            yield full, layer


def _merge_parameterless_layers(groups: list[LayerGroup]) -> list[LayerGroup]:
    """Joins a layer without parameters with the one before it: it would not be a stage on its
    own."""
    found: list[LayerGroup] = []
    for piece in groups:
        if found and not (
            _sum_bytes(_list_group_tensors(piece)) and _sum_bytes(_list_group_tensors(found[-1]))
        ):
            other = found.pop()
            layers, around = other.layers + piece.layers, other.enclosing + piece.enclosing
            piece = LayerGroup(other.first or piece.first, piece.last, layers, around)
        found.append(piece)
    return found


def split_costs_evenly(costs: Sequence[int], parts: int) -> list[int]:
    """Return how many of the costs each part takes, in order.

    The largest part is as small as possible, and among such splits the parts are as even as
    possible. Dynamic programming over the end of each part.
    """
    upto = [0, *accumulate(costs)]
    # best[j]: the best split of the first j costs into the parts so far, as
    # (largest part, sum of squares, sizes of the parts).
    best: list[tuple[int, int, list[int]] | None] = [(0, 0, []), *[None] * len(costs)]
    for part in range(1, parts + 1):
        new: list[tuple[int, int, list[int]] | None] = [None] * (len(costs) + 1)
        for j in range(part, len(costs) - (parts - part) + 1):
            options = (
                (max(most, upto[j] - upto[i]), squares + (upto[j] - upto[i]) ** 2, [*cut, j - i])
                for i in range(part - 1, j)
                if (known := best[i]) is not None
                for most, squares, cut in [known]
            )
            new[j] = min(options)
        best = new
    found = best[len(costs)]
    assert found is not None
    return found[2]


def _require_unshared_parameters(model: nn.Module, stages: Sequence[Sequence[LayerGroup]]) -> None:
    """Raises where two stages need the same parameter."""
    stage_of: dict[int, int] = {}
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    for number, stage in enumerate(stages):
        for tensor in (t for piece in stage for t in _list_group_tensors(piece)):
            first = stage_of.setdefault(id(tensor), number)
            if first != number and id(tensor) in names:
                raise EchelonError(
                    Fault(
                        f"replica.devices={len(stages)}, but {' and '.join(names[id(tensor)])} are "
                        f"one parameter, which stages {first} and {number} both need",
                        f"give each its own, or {_PLACE_BY_HAND}",
                    )
                )


def _place_layer_group(group: LayerGroup, device: torch.device) -> None:
    """Moves a group to its device, and lets its layers fetch their inputs."""
    for module in group.enclosing:
        module._apply(lambda t: t.to(device), recurse=False)  # type: ignore[no-untyped-call]
    for layer in group.layers:
        layer.to(device)
        if _sum_bytes(t for _, t in _iter_parameters_and_buffers(layer)):
            layer.register_forward_pre_hook(_InputMover(device), with_kwargs=True)


class _InputMover:
    """A forward hook that moves a layer's inputs to its device.

    That includes masks and the like, which the model's forward passes to every layer.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def __call__(self, layer: nn.Module, args: Any, kwargs: Any) -> Any:
        if all(t.device == self.device for t in tree_leaves((args, kwargs)) if _is_tensor(t)):
            return None
        return _move_tensors((args, kwargs), self.device)


def _is_tensor(leaf: Any) -> bool:
    return isinstance(leaf, Tensor)


def _describe_stage(device: str, stage: Sequence[LayerGroup]) -> StageDescription:
    """Describes a stage by its first and last layer."""
    first, last = stage[0].first, stage[-1].last
    size = sum(_sum_bytes(_list_group_tensors(piece)) for piece in stage)
    return StageDescription(device, first if first == last else f"{first} … {last}", size)


# --- memory ---


def _iter_parameters_and_buffers(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yields parameters and buffers with their names."""
    yield from module.named_parameters()
    yield from module.named_buffers()


def _list_group_tensors(group: LayerGroup) -> list[Tensor]:
    """Return all tensors of a layer group."""
    own = [t for m in group.enclosing for t in (*m.parameters(False), *m.buffers(False))]
    return own + [t for layer in group.layers for _, t in _iter_parameters_and_buffers(layer)]


def _sum_bytes(tensors: Any) -> int:
    """Return the size of these tensors in bytes; a tensor that occurs twice counts once."""
    return sum(t.nbytes for t in {id(t): t for t in tensors}.values())


def _count_state_copies(optimizer: torch.optim.Optimizer) -> int:
    """Return how many times a parameter's memory training takes: itself, its gradient, the
    optimizer's state."""
    state_count = (
        2 if "betas" in optimizer.defaults else int(bool(optimizer.defaults.get("momentum")))
    )
    return 2 + state_count


def _estimate_bytes(group: LayerGroup, copies: int) -> int:
    """Return the memory of a group's parameters, gradients and optimizer state."""
    tensors = _list_group_tensors(group)
    trained = [t for t in tensors if t.requires_grad]
    return _sum_bytes(tensors) + (copies - 1) * _sum_bytes(trained)


def _measure_output_bytes(
    experiment: Experiment, groups: Sequence[LayerGroup], sample: SampleBatch
) -> list[int]:
    """Return the sizes of the layers' outputs, which the backward pass will need, for each group.

    All zeros where the model cannot be run on fake tensors.
    """
    counted = [0] * len(groups)

    def counter(number: int) -> Any:
        def count(module: nn.Module, args: Any, output: Any) -> None:
            counted[number] += sum(t.nbytes for t in tree_leaves(output) if _is_tensor(t))

        return count

    handles = [
        module.register_forward_hook(counter(number))
        for number, piece in enumerate(groups)
        for layer in piece.layers
        for module in layer.modules()
        if not list(module.children())
    ]
    try:
        where = next(experiment.model.parameters()).device
        _run_fake_forward(experiment, sample, where)
    except Exception:  # the model reads values, or does something that fake tensors cannot
        return [0] * len(groups)
    finally:
        for handle in handles:
            handle.remove()
    return counted


def _run_fake_forward(experiment: Experiment, sample: SampleBatch, device: torch.device) -> None:
    """Runs a forward pass on fake tensors: shapes and devices, without numbers or memory."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    model = experiment.model
    pretending = FakeTensorMode(allow_non_fake_inputs=True)
    # In eval mode, as some layers count batches in training mode even with fake tensors.
    with use_eval_mode(model), torch.no_grad(), pretending as mode:
        batch = tree_map_only(Tensor, lambda t: mode.from_tensor(t.to(device)), sample.data)
        (experiment.predict or default_predict)(model, batch)


def _require_separable(
    experiment: Experiment, devices: Sequence[torch.device], sample: SampleBatch
) -> None:
    """Raises where the model's forward mixes tensors of two stages, before the first step would
    fail."""
    if len(set(devices)) == 1:
        return
    try:
        _run_fake_forward(experiment, sample, devices[0])
    except RuntimeError as error:
        cause = error.__cause__ or error
        if "devices" not in str(cause):
            return  # a model that fails on fake tensors may still work
        raise EchelonError(
            Fault(
                f"the forward of {type(experiment.model).__name__} uses tensors of two stages at "
                f"once: {str(cause).splitlines()[0]}",
                f"use what a layer returns in the next layer only, or {_PLACE_BY_HAND}",
            )
        ) from None
    except Exception:
        return
