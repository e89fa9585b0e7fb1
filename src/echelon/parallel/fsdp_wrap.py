"""Shards a model in place with torch's FSDP2, and makes its optimizer train the shards."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate
from torch.nn.modules.batchnorm import _NormBase
from torch.optim import Optimizer

from echelon.config.schema import TrainerConfig
from echelon.errors import EchelonError, Fault
from echelon.experiment.definition import Experiment
from echelon.experiment.precision import HALF_DTYPES
from echelon.parallel.layer_blocks import SHARDING


def make_mesh(subgroups: Sequence[dist.ProcessGroup], shards: int, device_type: str) -> DeviceMesh:
    """Return the mesh of all ranks: of one dimension where they all hold one replica together,
    otherwise replicas × shards, with the two `subgroups` of this rank
    (`RankGroup.init_process_group`)."""
    if not subgroups:
        return DeviceMesh.from_group(dist.distributed_c10d._get_default_group(), device_type)
    ranks = torch.arange(dist.get_world_size()).view(-1, shards)
    names = ("replicate", "shard")
    return DeviceMesh.from_group(list(subgroups), device_type, ranks, mesh_dim_names=names)


def shard_model(
    experiment: Experiment,
    blocks: list[nn.Module],
    device: torch.device,
    trainer: TrainerConfig,
    mesh: DeviceMesh,
) -> None:
    """Shards the model in place over the last dimension of the mesh, and lets the optimizer train
    the shards.

    The weights are rank 0's, as with DDP.
    """
    model = experiment.model
    _broadcast_weights(model)
    swapper = _OptimizerSharder(experiment.optimizer, mesh)
    # Weights are gathered in the precision they are used in; autocast does the rest, as with DDP.
    # The model's own inputs are not cast either: it may still have to subtract a mean from them.
    half_dtype = HALF_DTYPES.get(trainer.precision)
    model_policy, norm_policy = (
        MixedPrecisionPolicy(weights, reduce_dtype=torch.float32, cast_forward_inputs=False)
        for weights in (half_dtype, None)
    )
    block_policy = MixedPrecisionPolicy(half_dtype, reduce_dtype=torch.float32)
    norms = _find_float32_norms(model, device) if half_dtype else []
    for module in (*_order_innermost_first(model, [*blocks, *norms]), model):
        before = dict(module.named_parameters())
        policy = (
            model_policy if module is model else norm_policy if module in norms else block_policy
        )
        fully_shard(module, mesh=mesh, mp_policy=policy)
        for name, p in module.named_parameters():
            if p is not before[name]:
                swapper.replace_by_shard(before[name], p)
    for fsdp_module in _iter_sharded_modules(model):
        # The mean as a sum that is divided afterwards: gloo's own mean is wrong in some versions of
        # torch (pytorch issue 162338).
        fsdp_module.set_force_sum_reduction_for_comms(True)
        fsdp_module.set_gradient_divide_factor(float(mesh.size()))
        if trainer.unused_parameters:
            reduce_unused_parameters(fsdp_module)


def _find_float32_norms(model: nn.Module, device: torch.device) -> list[nn.Module]:
    """Return the norms whose weights must stay float32 in half precision.

    torch accepts no half-precision weights beside running averages, which are float32, and on a CPU
    none beside float32 inputs.
    """
    norms = (m for m in model.modules() if isinstance(m, _NormBase) and m.affine)
    if device.type != "cpu":
        return [norm for norm in norms if norm.track_running_stats]
    others = (m for m in model.modules() if isinstance(m, nn.LayerNorm | nn.GroupNorm))
    return [*norms, *(norm for norm in others if norm.weight is not None)]


def _order_innermost_first(model: nn.Module, blocks: list[nn.Module]) -> list[nn.Module]:
    """Return the blocks in the order in which they must be sharded, without those that share
    weights.

    The innermost come first, because an outer block takes all parameters that are left. A block
    that shares weights with layers outside of it is left out: torch would separate the shared
    weights, so they stay with the module around them.
    """
    users: dict[int, set[int]] = {}
    for module in model.modules():
        for p in module.parameters(recurse=False):
            users.setdefault(id(p), set()).add(id(module))
    wanted = {id(block) for block in blocks} - {id(model)}

    def has_own_weights(block: nn.Module) -> bool:
        inside = {id(module) for module in block.modules()}
        return all(users[id(p)] <= inside for p in block.parameters())

    return [m for m in reversed(list(model.modules())) if id(m) in wanted and has_own_weights(m)]


def _broadcast_weights(model: nn.Module) -> None:
    """Overwrites all parameters and buffers with rank 0's."""
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            whole = tensor.detach().contiguous()
            dist.broadcast(whole, src=0)
            if whole.data_ptr() != tensor.data_ptr():
                tensor.copy_(whole)


def _iter_sharded_modules(model: nn.Module) -> Iterator[FSDPModule]:
    """Return the modules that hold shards."""
    return (module for module in model.modules() if isinstance(module, FSDPModule))


def reduce_unused_parameters(module: FSDPModule) -> None:
    """Gives parameters that take no part on some ranks a gradient of zeros there."""
    if not hasattr(module, "set_reduce_scatter_unused_params"):
        raise EchelonError(
            Fault(
                "trainer.unused_parameters=true needs torch 2.13 with a sharded model, and this "
                f"is torch {torch.__version__}",
                "leave it out if all processes leave out the same parameters, or leave "
                f"{SHARDING} out",
            )
        )
    module.set_reduce_scatter_unused_params(True)


class _OptimizerSharder:
    """Replaces an optimizer's parameters by their shards.

    Parameter groups keep their settings. Of a parameter's state, the rows of this rank's shard are
    kept.
    """

    def __init__(self, optimizer: Optimizer, mesh: DeviceMesh) -> None:
        self._optimizer = optimizer
        self._mesh = mesh
        self._positions = {
            id(p): (group, i)
            for group in optimizer.param_groups
            for i, p in enumerate(group["params"])
        }

    def replace_by_shard(self, whole: nn.Parameter, shard: nn.Parameter) -> None:
        """Replaces a whole parameter by its shard and frees the whole one."""
        if id(whole) in self._positions:
            group, i = self._positions[id(whole)]
            group["params"][i] = shard
            on_device = bool(group.get("fused") or group.get("capturable"))
            state = self._optimizer.state.pop(whole, None)
            if state is not None:
                self._optimizer.state[shard] = {
                    key: self._shard_state(value, shard, on_device) for key, value in state.items()
                }
        # Emptied in place, as others may still refer to it: the whole weights must not stay in
        # memory beside the shards.
        whole.data = whole.data.new_empty(0)

    def _shard_state(self, value: Any, p: nn.Parameter, on_device: bool) -> Any:
        """Return this rank's part of one entry of a parameter's state."""
        assert isinstance(p, DTensor)
        if not isinstance(value, Tensor):
            return value
        if value.dim() == 0:  # a count of steps
            return value.to(p.device) if on_device else value
        if value.shape != p.shape:
            whole = value.to(p.device)
            placements = [Replicate()] * self._mesh.ndim
            return DTensor.from_local(whole, self._mesh, placements, run_check=False)
        # torch shards rows as torch.chunk does: chunks of equal length, of which the last ranks may
        # get a shorter one or none.
        shards = self._mesh.ndim - 1
        chunks = value.chunk(self._mesh.size(shards))
        rank = self._mesh.get_local_rank(shards)
        rows = chunks[rank] if rank < len(chunks) else value[:0]
        local = rows.to(p.device, copy=True)
        return DTensor.from_local(
            local, self._mesh, p.placements, run_check=False, shape=p.shape, stride=p.stride()
        )
