"""Which linear layers of a model are packed, and where their bytes go."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ktft.checkpoint.encoded import Encoded
from ktft.dense.formats import PLAIN, head_format, may_pack, stays
from ktft.dense.linear import PackedLinear
from ktft.dense.stream import DenseStream
from ktft.native.dense import pack_dense
from ktft.native.machine import Runtime


class DenseWeights:
    """The linear layers of a model that are frozen and packed.

    They are replaced on the meta device, get their weights one by one, and then, if they lie in host memory, a stream
    that brings them to the GPU.

    Args:
        model: on the meta device.
        layers: for each decoder layer the names of its linear layers that may be packed.
        others: names of output layers; these weights are always on the device of the products.
        format: one of `DENSE_FORMATS`.
        on_host: whether the weights of decoder layers stay in host memory.
        runtime: packs them.

    Attributes:
        modules: by name.
    """

    def __init__(
        self,
        model: nn.Module,
        layers: Sequence[Sequence[str]],
        others: Sequence[str],
        format: str,
        on_host: bool,
        runtime: Runtime,
    ) -> None:
        self._runtime = runtime
        self.modules: dict[str, PackedLinear] = {}
        self._layers: list[list[PackedLinear]] = []
        for names in layers:
            found = [self._replace(model, name, format) for name in names if on_host or _changes(model, name, format)]
            if found and on_host:
                self._layers.append(found)
        for name in others:
            if _changes(model, name, head_format(format)):
                self._replace(model, name, format)
        self._hosted = {id(module) for layer in self._layers for module in layer}

    def _replace(self, model: nn.Module, name: str, format: str) -> PackedLinear:
        like = model.get_submodule(name)
        assert isinstance(like, nn.Linear)
        module = PackedLinear(like, format)
        model.set_submodule(name, module)
        self.modules[name] = module
        return module

    def pack(self, name: str, weight: Encoded, device: torch.device) -> Tensor:
        """Pack the weight of a module, given as the checkpoint encodes it. Returns what its `weight` becomes.

        Raises:
            ValueError: the weight holds NaN or Inf, or its scales are wrong.
        """
        module = self.modules[name]
        if module.format == PLAIN:
            packed = weight.dequantize().to(module.dtype).cpu().contiguous().view(torch.uint8).flatten()
        else:
            packed = pack_dense(self._runtime, module.format, **_arguments(weight))
        if id(module) in self._hosted:
            module.host = packed
            return packed.new_empty(0, device=device)
        return packed.to(device)

    def device_bytes(self, name: str) -> int:
        """Bytes that a module's weight takes on the device of the products."""
        module = self.modules[name]
        return 0 if id(module) in self._hosted else module.nbytes

    def finish(self) -> None:
        """Give the weights in host memory to a stream, once all have been packed."""
        if not self._layers:
            return
        stream, place = DenseStream([[module.take_host() for module in layer] for layer in self._layers]), 0
        for layer in self._layers:
            for module in layer:
                module.read_from(stream, place)
                place += 1

    @property
    def saved_bytes(self) -> int:
        """Bytes that weights, while they are on the meta device, seem to need more on the device of the products."""
        whole = sum(module.weight.nbytes - module.nbytes for module in self.modules.values())
        return whole + self.host_bytes

    @property
    def host_bytes(self) -> int:
        """Bytes that weights take in host memory because they are placed there."""
        return sum(module.nbytes for layer in self._layers for module in layer)


def _arguments(weight: Encoded) -> dict[str, Any]:
    """What `pack_dense` takes. transformers hands over E4M3 codes widened to a floating-point type."""
    given = weight.load_arguments()
    if weight.scales is not None and weight.values.dtype.is_floating_point:
        given["weight"] = weight.values.to(torch.float8_e4m3fn)
    return {name: each.cpu() if isinstance(each, Tensor) else each for name, each in given.items()}


def _changes(model: nn.Module, name: str, format: str) -> bool:
    like = model.get_submodule(name)
    assert isinstance(like, nn.Linear)
    return format != PLAIN and may_pack(like.out_features, like.in_features)


def coming_bytes(model: nn.Module) -> int:
    """Bytes of GPU memory that the first products with packed weights will take for good."""
    modules = (module.stream for module in model.modules() if isinstance(module, PackedLinear))
    return sum(stream.coming_bytes for stream in {each for each in modules if each is not None})


def linears(block: nn.Module, prefix: str, routed: dict[str, int]) -> Iterator[str]:
    """The names of a decoder layer's linear layers that may be packed.

    Args:
        routed: name of an MoE block -> the outputs of its router.
    """
    for name, module in block.named_modules(prefix=prefix):
        if type(module) is not nn.Linear:
            continue
        blocks = [experts for at, experts in routed.items() if name.startswith(f"{at}.")]
        if not any(stays(module.out_features, experts) for experts in blocks):
            yield name
