"""Parameters of which every rank holds a part: FSDP2's, sharded by rows.

Only this file and `group` name torch.distributed. A sharded parameter tells the shape of the whole; its `local` tensor
has this rank's rows. Rows are divided as `torch.chunk` does, so that the last ranks may have fewer, or none.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

from torch import Tensor, nn
from torch.distributed import fsdp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from ktft.ranks.group import Ranks

_MESH = ("fsdp",)
"""The name of the dimension over which rows are shared: tensor parallelism has DTensors too, over others."""


def is_sharded(tensor: Any) -> bool:
    """Whether ranks share the rows of a tensor."""
    return isinstance(tensor, DTensor) and tensor.device_mesh.mesh_dim_names == _MESH


def is_divided(model: nn.Module) -> bool:
    """Whether ranks share the rows of a model's parameters."""
    return any(map(is_sharded, model.parameters()))


def local(tensor: Tensor) -> Tensor:
    """This rank's rows of a sharded tensor, by reference and outside of autograd; another tensor itself."""
    return tensor._local_tensor if isinstance(tensor, DTensor) and is_sharded(tensor) else tensor


def whole(tensor: Tensor, together: Ranks) -> Tensor:
    """All rows of a sharded tensor, on its device. All ranks must call it."""
    if not is_sharded(tensor):
        return tensor
    own = local(tensor).detach()
    return together.gather_rows(own, [stop - start for start, stop in _rows(len(tensor), together.size)])


def shard_like(tensor: Tensor, model: Tensor, together: Ranks) -> Tensor:
    """A whole tensor, sharded as `model` of the same shape is. Each rank must have it; nothing is sent."""
    assert isinstance(model, DTensor)
    start, stop = _rows(len(tensor), together.size)[together.rank]
    own = tensor[start:stop].to(local(model).device).contiguous()
    shape, stride = tensor.shape, tensor.contiguous().stride()
    return DTensor.from_local(own, model.device_mesh, model.placements, run_check=False, shape=shape, stride=stride)


def take_rows(parameter: Tensor, tensor: Tensor, together: Ranks) -> None:
    """Give a sharded parameter this rank's rows of a whole tensor."""
    start, stop = _rows(len(tensor), together.size)[together.rank]
    local(parameter).copy_(tensor[start:stop])


def _rows(count: int, ranks: int) -> list[tuple[int, int]]:
    """The first row of each rank, and the one after its last."""
    size = -(-count // ranks)
    return [(min(rank * size, count), min((rank + 1) * size, count)) for rank in range(ranks)]


def shard(
    model: nn.Module,
    units: Iterable[nn.Module],
    ignored: Collection[Tensor],
    device: str,
    together: Ranks,
    *,
    reshard: bool,
    offload: Any,
) -> None:
    """Divide a model's parameters among the ranks, in place. All ranks must call it.

    Parameters keep their dtypes: a module computes in those that it was given, and gradients are averaged in fp32 if
    their parameters are fp32.

    Args:
        units: the modules whose parameters are made whole together, for as long as their forward or backward runs;
            inner ones first. What is in none is made whole for the model's.
        ignored: parameters that stay as they are.
        device: the type of the device to which all other parameters go, `cpu` for instance.
        reshard: whether parameters are divided again between forward and backward.
        offload: FSDP2's policy for keeping the parts in CPU memory.
    """
    options: dict[str, Any] = {
        "mesh": init_device_mesh(device, (together.size,), mesh_dim_names=_MESH),
        "ignored_params": set(ignored),
        "reshard_after_forward": reshard,
    }
    if device != "cpu":  # CPU memory is where the parts are anyway
        options["offload_policy"] = offload
    for module in (*units, model):
        if not isinstance(module, fsdp.FSDPModule):
            fsdp.fully_shard(module, **options)
            if device == "cpu":  # gloo has no mean
                module.set_force_sum_reduction_for_comms(True)  # type: ignore[operator]
    if hasattr(model, "generate"):
        fsdp.register_fsdp_forward_method(model, "generate")


def divide_again(model: nn.Module) -> None:
    """Divide what an evaluation or an interrupted step left whole. Nothing happens to parameters at rest."""
    for module in model.modules():
        if isinstance(module, fsdp.FSDPModule):
            module.reshard()
