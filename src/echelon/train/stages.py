"""One replica on several devices: its layers as stages, one after the other.

The experiment places the layers itself, or they are cut into stages whose memory is as even as
whole layers allow. Nothing is wrapped: a layer moves to its device and fetches its inputs, so that
names, and with them snapshots, are the same on any number of devices. On a CPU they are stages by
name only, and all else is as it is on GPUs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from echelon.errors import EchelonError, Fault
from echelon.train.experiment import Experiment, predict_default
from echelon.train.modes import evaluating
from echelon.utils.text import format_bytes, join_names
from echelon.world import World

_TAKE_THEM = "place the layers yourself: def experiment(cfg, devices): …"


def devices_of(world: World) -> tuple[torch.device, ...]:
    """In order. torch has one CPU only, and would copy what is said to go to another."""
    names = ("cpu" if name.startswith("cpu") else name for name in world.devices)
    return tuple(map(torch.device, names))


class Stage(NamedTuple):
    """What lies on one device."""

    device: str
    layers: str
    nbytes: int
    """Of its parameters and buffers."""


class Sample(NamedTuple):
    """A few samples, to see what layers make of them."""

    data: Any
    times: float
    """So many of these are in a forward pass of the training."""


def place(
    experiment: Experiment, names: Sequence[str], devices: Sequence[torch.device], sample: Sample
) -> list[Stage]:
    """Cut the model, one stage to each of the devices."""
    stages = _cut(experiment, devices, sample)
    for stage, device in zip(stages, devices, strict=True):
        for piece in stage:
            _bring(piece, device)
    _lead(experiment, devices[0], devices[-1])
    _require_apart(experiment, devices, sample)
    return [_named(name, stage) for name, stage in zip(names, stages, strict=True)]


def described(stages: Sequence[Stage]) -> str:
    return "; ".join(f"{s.device}: {s.layers}, {format_bytes(s.nbytes)}" for s in stages)


def _lead(experiment: Experiment, first: torch.device, last: torch.device) -> None:
    """Outputs meet their targets on the last device; losses go to the first, to be kept there."""
    predict, loss = experiment.predict or predict_default, experiment.loss
    experiment.predict = lambda model, batch: _brought(predict(model, batch), last)
    experiment.loss = lambda output, target: loss(output, target).to(first)


def _brought(tree: Any, device: torch.device) -> Any:
    ahead = device.type == "cuda"  # a CPU would read what has not arrived
    return tree_map_only(Tensor, lambda t: t.to(device, non_blocking=ahead), tree)


# --- placed by hand ---


def accept(
    experiment: Experiment, names: Sequence[str], devices: Sequence[torch.device]
) -> list[Stage]:
    """The model as the experiment has placed it."""
    tensors = dict(_tensors(experiment.model))
    lost = [name for name, tensor in tensors.items() if tensor.device not in devices]
    if lost:
        where = tensors[lost[0]].device
        raise EchelonError(
            Fault(
                f"the experiment takes devices ({join_names(names)}), but left {lost[0]} on {where}"
                + (f", and {len(lost) - 1} more like it" if len(lost) > 1 else ""),
                "bring every layer to one of them: layer.to(devices[0])",
            )
        )
    _lead(experiment, devices[0], devices[-1])
    if devices[0].type == "cpu":
        return [Stage(join_names(names), "placed by the experiment", _bytes(tensors.values()))]
    on = {d: [t for t in tensors.values() if t.device == d] for d in devices}
    counted = ((name, on[d]) for name, d in zip(names, devices, strict=True))
    return [Stage(name, f"{len(there)} tensors", _bytes(there)) for name, there in counted]


# --- cut by us ---


class Piece(NamedTuple):
    """What stays together: a layer with parameters, and its neighbours without."""

    first: str
    last: str
    layers: list[nn.Module]
    around: list[nn.Module]
    """Modules that hold the layers, with tensors of their own."""


def _cut(
    experiment: Experiment, devices: Sequence[torch.device], sample: Sample
) -> list[list[Piece]]:
    model, count = experiment.model, len(devices)
    pieces = pieces_of(model)
    kind = type(model).__name__
    if not pieces:
        raise EchelonError(
            Fault(
                f"replica.devices={count}, but {kind} cannot be cut: there is no Sequential and no "
                "ModuleList in it that would say in which order its layers come",
                f"put its layers into one, or {_TAKE_THEM}",
            )
        )
    if len(pieces) < count:
        raise EchelonError(
            Fault(
                f"replica.devices={count}, but {kind} has only {len(pieces)} layers to cut between",
                f"set replica.devices={len(pieces)} or fewer, or {_TAKE_THEM}",
            )
        )
    outputs = _output_bytes(experiment, pieces, sample)
    copies = _copies(experiment.optimizer)
    costs = [
        _cost(piece, copies) + int(output * sample.times)
        for piece, output in zip(pieces, outputs, strict=True)
    ]
    ends = [0, *accumulate(even_cut(costs, count))]
    stages = [pieces[a:b] for a, b in pairwise(ends)]
    _require_whole(model, stages)
    return stages


def pieces_of(model: nn.Module) -> list[Piece]:
    """The layers in order, where the model says in which order they come.

    That is a Sequential or ModuleList, the largest in the model. What comes before it in the model
    is one piece, and so is what comes after: their order is the business of the model's forward.
    """
    path = _longest_chain(model)
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
    found = [_lump(before, around)] if around else []
    found += [Piece(name, name, [layer], []) for name, layer in _flat(module, ".".join(path))]
    found += [_lump(after, [])] if after else []
    return _with_parameters(found)


def _lump(layers: dict[str, nn.Module], around: list[nn.Module]) -> Piece:
    own = [name for module in around for name, _ in module.named_parameters(recurse=False)]
    names = [*own, *layers] or [""]
    return Piece(names[0], names[-1], list(layers.values()), around)


def _longest_chain(model: nn.Module) -> tuple[str, ...] | None:
    if _is_chain(model):
        return ()
    chains = {
        n: m for n, m in model.named_modules() if _is_chain(m) and len(list(m.children())) > 1
    }
    if not chains:
        return None
    largest = max(chains, key=lambda name: _bytes(chains[name].parameters()))
    return tuple(largest.split("."))


def _is_chain(module: nn.Module) -> bool:
    """A Sequential with a forward of its own may do anything."""
    plain = isinstance(module, nn.Sequential) and type(module).forward is nn.Sequential.forward
    return plain or isinstance(module, nn.ModuleList)


def _flat(chain: nn.Module, prefix: str) -> Iterator[tuple[str, nn.Module]]:
    for name, layer in chain.named_children():
        full = f"{prefix}.{name}" if prefix else name
        if isinstance(layer, nn.Sequential) and _is_chain(layer):
            yield from _flat(layer, full)
        else:
            yield full, layer


def _with_parameters(pieces: list[Piece]) -> list[Piece]:
    """A layer without parameters goes with the one before: alone it would be no stage."""
    found: list[Piece] = []
    for piece in pieces:
        if found and not (_bytes(_of_piece(piece)) and _bytes(_of_piece(found[-1]))):
            other = found.pop()
            layers, around = other.layers + piece.layers, other.around + piece.around
            piece = Piece(other.first or piece.first, piece.last, layers, around)
        found.append(piece)
    return found


def even_cut(costs: Sequence[int], parts: int) -> list[int]:
    """How many of them each part takes, in order: the largest part is as small as can be, and
    among such cuts the parts are as even."""
    upto = [0, *accumulate(costs)]
    # best[j]: of the first j costs, cut into so many parts.
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


def _require_whole(model: nn.Module, stages: Sequence[Sequence[Piece]]) -> None:
    stage_of: dict[int, int] = {}
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    for number, stage in enumerate(stages):
        for tensor in (t for piece in stage for t in _of_piece(piece)):
            first = stage_of.setdefault(id(tensor), number)
            if first != number and id(tensor) in names:
                raise EchelonError(
                    Fault(
                        f"replica.devices={len(stages)}, but {' and '.join(names[id(tensor)])} are "
                        f"one parameter, which stages {first} and {number} both need",
                        f"give each its own, or {_TAKE_THEM}",
                    )
                )


def _bring(piece: Piece, device: torch.device) -> None:
    for module in piece.around:
        module._apply(lambda t: t.to(device), recurse=False)  # type: ignore[no-untyped-call]
    for layer in piece.layers:
        layer.to(device)
        if _bytes(t for _, t in _tensors(layer)):
            layer.register_forward_pre_hook(_Fetch(device), with_kwargs=True)


class _Fetch:
    """Brings a layer's inputs to its device; also masks and the like, which the model's forward
    gives to every layer."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def __call__(self, layer: nn.Module, args: Any, kwargs: Any) -> Any:
        if all(t.device == self.device for t in tree_leaves((args, kwargs)) if _is_tensor(t)):
            return None
        return _brought((args, kwargs), self.device)


def _is_tensor(leaf: Any) -> bool:
    return isinstance(leaf, Tensor)


def _named(device: str, stage: Sequence[Piece]) -> Stage:
    first, last = stage[0].first, stage[-1].last
    size = sum(_bytes(_of_piece(piece)) for piece in stage)
    return Stage(device, first if first == last else f"{first} … {last}", size)


# --- memory ---


def _tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from module.named_parameters()
    yield from module.named_buffers()


def _of_piece(piece: Piece) -> list[Tensor]:
    own = [t for m in piece.around for t in (*m.parameters(False), *m.buffers(False))]
    return own + [t for layer in piece.layers for _, t in _tensors(layer)]


def _bytes(tensors: Any) -> int:
    return sum(t.nbytes for t in {id(t): t for t in tensors}.values())


def _copies(optimizer: torch.optim.Optimizer) -> int:
    """A parameter, its gradient, and what the optimizer keeps for it."""
    kept = 2 if "betas" in optimizer.defaults else int(bool(optimizer.defaults.get("momentum")))
    return 2 + kept


def _cost(piece: Piece, copies: int) -> int:
    tensors = _of_piece(piece)
    trained = [t for t in tensors if t.requires_grad]
    return _bytes(tensors) + (copies - 1) * _bytes(trained)


def _output_bytes(experiment: Experiment, pieces: Sequence[Piece], sample: Sample) -> list[int]:
    """What the layers of each piece give for one sample, which the backward pass will need; noughts
    where it cannot be known without computing."""
    counted = [0] * len(pieces)

    def counter(number: int) -> Any:
        def count(module: nn.Module, args: Any, output: Any) -> None:
            counted[number] += sum(t.nbytes for t in tree_leaves(output) if _is_tensor(t))

        return count

    handles = [
        module.register_forward_hook(counter(number))
        for number, piece in enumerate(pieces)
        for layer in piece.layers
        for module in layer.modules()
        if not list(module.children())
    ]
    try:
        where = next(experiment.model.parameters()).device
        _pretend(experiment, sample, where)
    except Exception:  # the model reads numbers, or is of a kind that torch cannot imitate
        return [0] * len(pieces)
    finally:
        for handle in handles:
            handle.remove()
    return counted


def _pretend(experiment: Experiment, sample: Sample, device: torch.device) -> None:
    """A forward pass of shapes and devices, without numbers or memory."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    model = experiment.model
    pretending = FakeTensorMode(allow_non_fake_inputs=True)
    # In training, layers count their batches even so.
    with evaluating(model), torch.no_grad(), pretending as mode:
        batch = tree_map_only(Tensor, lambda t: mode.from_tensor(t.to(device)), sample.data)
        (experiment.predict or predict_default)(model, batch)


def _require_apart(experiment: Experiment, devices: Sequence[torch.device], sample: Sample) -> None:
    """A forward that mixes tensors of two stages would fail in its first step; say so before."""
    if len(set(devices)) == 1:
        return
    try:
        _pretend(experiment, sample, devices[0])
    except RuntimeError as error:
        cause = error.__cause__ or error
        if "devices" not in str(cause):
            return  # what cannot be imitated may well work
        raise EchelonError(
            Fault(
                f"the forward of {type(experiment.model).__name__} uses tensors of two stages at "
                f"once: {str(cause).splitlines()[0]}",
                f"use what a layer returns in the next layer only, or {_TAKE_THEM}",
            )
        ) from None
    except Exception:
        return
