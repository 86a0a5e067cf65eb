"""A frozen linear layer whose weight is packed, on the GPU or in host memory.

Each product decodes the weight to the dtype of the model and forgets it. So the layer computes what `nn.Linear` would
with the weight rounded once to the format and once to that dtype.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from ktft.dense.formats import PLAIN, dense_bytes, layout
from ktft.dense.stream import DenseStream
from ktft.lanes.ops.interface import operations
from ktft.native.packed import PackedMatrix


class DenseWeight:
    """A packed weight that can be decoded now and again, until the next step of training.

    Args:
        memory: gives its bytes on the device of the products.
        dtype: that of the model.
    """

    __slots__ = ("_dtype", "_format", "_matrix", "_memory", "_shape")

    def __init__(
        self,
        format: str,
        matrix: PackedMatrix | None,
        shape: tuple[int, int],
        dtype: torch.dtype,
        memory: Callable[[], Tensor],
    ) -> None:
        self._format, self._matrix, self._shape, self._dtype, self._memory = format, matrix, shape, dtype, memory

    def decode(self, dtype: torch.dtype) -> Tensor:
        """The weight `[out_features, in_features]`, rounded to the model's dtype."""
        packed = self._memory()
        if self._matrix is None:
            return packed.view(self._dtype).view(self._shape).to(dtype)
        out = torch.empty(self._shape, dtype=self._dtype, device=packed.device)
        operations(packed.device).decode_matrix(self._format, packed, self._matrix, out)
        return out.to(dtype)


class PackedLinear(nn.Linear):
    """`nn.Linear` with a packed weight. It is frozen, and its own `weight` is the bytes, uint8 `[bytes]`.

    A weight in host memory is not a parameter, since whatever moves a model to a GPU would move it too: `weight` is
    then uint8 `[0]`, on the device of the products. Until the weight is read, `weight` is that of `like`, by whose
    dtype and shape transformers reads it.

    Args:
        like: the layer that it replaces, on the meta device; its bias is taken over.
        format: one of `DENSE_FORMATS`. A weight that cannot be packed keeps its dtype, as with `bf16`.

    Attributes:
        dtype: of the weight once it is decoded.
        host: the bytes in host memory, until a `DenseStream` has taken them; None otherwise.
    """

    def __init__(self, like: nn.Linear, format: str) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features, self.dtype = like.in_features, like.out_features, like.weight.dtype
        shape = self.out_features, self.in_features
        self.nbytes = dense_bytes(format, *shape, self.dtype.itemsize)
        packs = format != PLAIN and self.nbytes != dense_bytes(PLAIN, *shape, self.dtype.itemsize)
        self.format = format if packs else PLAIN
        self.matrix = layout(format, *shape)[0] if packs else None
        self.weight = nn.Parameter(like.weight, requires_grad=False)
        self.register_parameter("bias", like.bias)
        self.host: Tensor | None = None
        self._stream: DenseStream | None = None
        self._place = 0

    @property
    def packed(self) -> DenseWeight:
        """The weight as the products take it. Within a recording it is the recording's own."""
        shape, memory = (self.out_features, self.in_features), self.weight.data
        if self.is_streamed and not memory.numel():
            return DenseWeight(self.format, self.matrix, shape, self.dtype, self.streamed)
        host = memory if self.host is None else self.host
        return DenseWeight(self.format, self.matrix, shape, self.dtype, lambda: host)

    @property
    def is_streamed(self) -> bool:
        """Whether the weight is copied from host memory each time that training comes to it."""
        return self._stream is not None

    @property
    def stream(self) -> DenseStream | None:
        """What copies the weight then."""
        return self._stream

    def take_host(self) -> Tensor:
        """The bytes in host memory, which the layer has no longer."""
        assert self.host is not None
        host, self.host = self.host, None
        return host

    def read_from(self, stream: DenseStream, place: int) -> None:
        """Let a stream bring the bytes, as its weight number `place`."""
        self._stream, self._place = stream, place

    def streamed(self) -> Tensor:
        """The bytes of a weight in host memory, on the device of the products until another layer needs the place."""
        assert self._stream is not None
        return self._stream.bytes_of(self._place, self.weight.device)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> PackedLinear:
        """What `to`, `half` and the like call. Another dtype of the model is another dtype to decode to."""
        dtype = fn(torch.empty(0, dtype=self.dtype, device=self.weight.device)).dtype
        if dtype != self.dtype and self.format == PLAIN and self.weight.dtype == torch.uint8:
            if self.is_streamed or self.host is not None:
                raise RuntimeError(f"a weight in host memory stays {self.dtype}; load the model with dtype={dtype}")
            self.weight.data = self.decoded().to(dtype).view(torch.uint8).flatten()
        self.dtype = dtype
        super()._apply(fn, recurse)
        return self

    def decoded(self) -> Tensor:
        """The weight `[out_features, in_features]` in the model's dtype."""
        return self.packed.decode(self.dtype)

    def forward(self, input: Tensor) -> Tensor:
        """The product `[..., in_features]` -> `[..., out_features]`, in autocast's dtype if that is on."""
        kind, dtype = input.device.type, self.dtype
        if torch.is_autocast_enabled(kind) and input.is_floating_point():
            dtype = torch.get_autocast_dtype(kind)
            input = input.to(dtype)
        if input.dtype != dtype:
            raise RuntimeError(f"a linear layer's input is {input.dtype}, its weight decodes to {dtype}")
        bias = None if self.bias is None else self.bias.to(dtype)
        out = _Product.apply(input, self.packed, bias)
        assert isinstance(out, Tensor)
        return out

    def to_linear(self) -> nn.Linear:
        """An ordinary layer with the decoded weight, which can be trained."""
        weight = self.decoded().clone()
        layer = nn.Linear(self.in_features, self.out_features, self.bias is not None, device="meta")
        layer.weight = nn.Parameter(weight, requires_grad=False)
        layer.bias = self.bias if self.bias is None else nn.Parameter(self.bias.detach().clone(), requires_grad=False)
        return layer

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Linear:
        """PEFT copies a module in order to train it, which needs a weight with gradients."""
        if self.weight.is_meta:
            return PackedLinear(nn.Linear(self.in_features, self.out_features, self.bias is not None, device="meta",
                                          dtype=self.dtype), self.format)  # fmt: skip
        return self.to_linear()

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, format={self.format}"


class _Product(torch.autograd.Function):
    """x · Wᵀ + bias, for a weight that is decoded again in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: DenseWeight, bias: Tensor | None) -> Tensor:
        ctx.weight = weight
        return nn.functional.linear(x, weight.decode(x.dtype), bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        of_x, _, of_bias = ctx.needs_input_grad
        grad_x = grad @ ctx.weight.decode(grad.dtype) if of_x else None
        return grad_x, None, grad.flatten(0, -2).sum(0) if of_bias else None
