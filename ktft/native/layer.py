"""One layer's routed experts: packed, computed forward and backward."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ktft.config import PROJECTIONS
from ktft.held import HeldExperts
from ktft.lora import ExpertLora
from ktft.native.adapters import native_lora
from ktft.native.codes import check_codes
from ktft.native.extension import DTYPES, ENCODINGS, NATIVE_PROJECTIONS, core
from ktft.native.machine import Runtime
from ktft.native.packed import PackedSlice
from ktft.native.tensors import INTEGERS, address, check_like, check_memory, described
from ktft.swiglu import SILU, Swiglu


@dataclass
class Gradients:
    """What one backward returns: `[T, H]` in the input's dtype, `[T, k]` fp32, and a, b of each adapted projection in
    the order of `PROJECTIONS`, in their parameters' dtypes.
    """

    hidden_states: Tensor
    top_k_weights: Tensor
    lora: list[Tensor]


class ExpertLayer:
    """One layer's routed experts, or this process's part of them, packed in CPU memory.

    Args:
        runtime: threads and NUMA nodes.
        num_experts, hidden_size, intermediate_size: of the model's layer; the last two are multiples of 32.
        format: one of `FORMATS`.
        name: the layer's name in error messages.
        swiglu: the activation.
        biases: whether the projections have biases, which `load_bias` then fills.
        held: the experts that this process holds; by default all.

    Attributes:
        num_experts: that are held. Every number of an expert here counts from the first of these.

    Raises:
        ValueError: dimensions that the kernels cannot take, an unknown format, an alpha or limit that is not positive.
    """

    def __init__(
        self,
        runtime: Runtime,
        *,
        num_experts: int,
        hidden_size: int,
        intermediate_size: int,
        format: str,
        name: str = "experts",
        swiglu: Swiglu = SILU,
        biases: bool = False,
        held: HeldExperts | None = None,
    ) -> None:
        self.held = held or HeldExperts.of(num_experts)
        num_experts = self.held.count
        self.runtime, self.format, self.name = runtime, format, name
        self.swiglu, self.biases = swiglu, biases
        self.num_experts, self.hidden_size, self.intermediate_size = num_experts, hidden_size, intermediate_size
        self._layer = core.MoeLayer(
            runtime.handle,
            num_experts,
            hidden_size,
            intermediate_size,
            format,
            swiglu.alpha,
            swiglu.limit,
            swiglu.shift,
            biases,
            name,
        )

    @property
    def handle(self) -> Any:
        """As the core takes it."""
        return self._layer

    @property
    def packed_bytes(self) -> int:
        """Bytes of packed weights, scales and biases."""
        return int(self._layer.bytes)

    def load(
        self,
        expert: int,
        projection: str,
        weight: Tensor,
        scales: Tensor | None = None,
        *,
        block: tuple[int, int] | None = None,
        zeros: Tensor | None = None,
    ) -> bool:
        """Pack one `[out_features, in_features]` weight, given plain or as codes with scales, on the CPU.

        Codes whose blocks this layer's format has are kept with their scales; all else is encoded from the values.

        Args:
            expert, projection: where it goes.
            weight: fp32, bf16 or fp16; or codes: float8_e4m3fn, or uint8 `[out_features, in_features / 2]` of two 4-bit
                codes, the even column in the low half.
            scales: of codes, one a block: `[ceil(out / block[0]), ceil(in / block[1])]`, fp32 (fp8, and int4, whose
                codes are q + 8), or uint8: E8M0 exponents, which make 4-bit codes mxfp4 (OCP MX v1.0).
            block: rows and columns that share a scale; by default (128, 128) of fp8 and (1, 32) of 4 bits.
            zeros: int4 only, uint8 like `scales`: the code that means zero; by default 8 everywhere.

        Returns:
            Whether codes and scales were kept, so that `dequantize` gives the values they stand for.

        Raises:
            ValueError: wrong shape or dtype, NaN or Inf, a negative fp8 scale, no such expert, or loaded before.
        """
        if weight.dim() != 2 or weight.device.type != "cpu" or (weight.dtype not in ENCODINGS and scales is None):
            raise ValueError(
                "expected a 2-D fp32, bf16 or fp16 CPU tensor, or codes and scales, "
                f"got {weight.dtype} {list(weight.shape)} on {weight.device}"
            )
        self._refuse_second(expert, projection)
        weight = weight.contiguous()
        rows, cols = weight.shape
        encoding, block = ENCODINGS.get(weight.dtype), block or (0, 0)
        if scales is not None:
            encoding, cols, block = check_codes(weight, scales, block, zeros)
            scales, zeros = scales.contiguous(), None if zeros is None else zeros.contiguous()
        given = (("its scales", scales), ("its zero points", zeros))
        addresses = [0 if tensor is None else self._address(tensor, name) for name, tensor in given]
        return bool(
            self._layer.load(
                expert,
                NATIVE_PROJECTIONS[projection],
                self._address(weight, "a weight"),
                encoding,
                rows,
                cols,
                addresses[0],
                *block,
                addresses[1],
            )
        )

    def canonical_bytes(self, projection: str) -> int:
        """Size of what `export_packed` returns, a function of format and shape alone."""
        return int(self._layer.canonical_bytes(NATIVE_PROJECTIONS[projection]))

    def export_packed(self, expert: int, projection: str) -> Tensor:
        """One packed weight in the canonical layout, uint8 `[canonical_bytes]`: docs/reference/convert.md describes it.

        The bytes do not depend on NUMA nodes, threads or ISA.

        Raises:
            ValueError: no such expert, or nothing was loaded.
        """
        out = torch.empty(self.canonical_bytes(projection), dtype=torch.uint8, device="cpu")
        self._layer.export_canonical(expert, NATIVE_PROJECTIONS[projection], out.data_ptr())
        return out

    def import_packed(self, expert: int, projection: str, packed: Tensor) -> None:
        """Take over one weight that `export_packed` of the same format and shape gave.

        Raises:
            ValueError: not a uint8 tensor of `canonical_bytes`, scales that no packing gives, no such expert, or loaded
                before.
        """
        size = self.canonical_bytes(projection)
        if packed.dtype != torch.uint8 or packed.shape != (size,) or packed.device.type != "cpu":
            raise ValueError(f"expected {size} bytes of {self.format}, got {list(packed.shape)} {packed.dtype}")
        self._refuse_second(expert, projection)
        self._layer.import_canonical(
            expert, NATIVE_PROJECTIONS[projection], self._address(packed.contiguous(), "packed")
        )

    def _refuse_second(self, expert: int, projection: str) -> None:
        if 0 <= expert < self.num_experts and self._layer.loaded(expert, NATIVE_PROJECTIONS[projection]):
            raise ValueError(f"{self.name}.{expert}.{projection} was loaded already: the checkpoint holds it twice")

    def load_bias(self, expert: int, projection: str, bias: Tensor) -> None:
        """Keep one `[out_features]` bias, in fp32: fp32, bf16 or fp16, on the CPU. Biases stay frozen.

        Raises:
            ValueError: the layer has no biases; wrong shape or dtype, NaN or Inf, no such expert, or loaded before.
        """
        if bias.dtype not in DTYPES or bias.dim() != 1 or bias.device.type != "cpu":
            raise ValueError(
                f"expected a 1-D fp32, bf16 or fp16 CPU tensor, got {bias.dtype} {list(bias.shape)} on {bias.device}"
            )
        if 0 <= expert < self.num_experts and self._layer.loaded_bias(expert, NATIVE_PROJECTIONS[projection]):
            raise ValueError(
                f"the bias of {self.name}.{expert}.{projection} was loaded already: the checkpoint holds it twice"
            )
        bias = bias.float().contiguous()
        self._layer.load_bias(expert, NATIVE_PROJECTIONS[projection], self._address(bias, "a bias"), len(bias))

    def missing(self) -> list[tuple[int, str]]:
        """(expert, projection) pairs whose weight or, in a layer with biases, bias was never loaded."""
        filled = (self._layer.loaded, self._layer.loaded_bias) if self.biases else (self._layer.loaded,)
        return [
            (expert, name)
            for expert in range(self.num_experts)
            for name in PROJECTIONS
            if not all(is_loaded(expert, NATIVE_PROJECTIONS[name]) for is_loaded in filled)
        ]

    def dequantize(self, expert: int, projection: str) -> Tensor:
        """The packed weight as fp32 `[out_features, in_features]`."""
        shape = (self.hidden_size, self.intermediate_size)
        out = torch.empty(shape if projection == "down_proj" else shape[::-1], dtype=torch.float32, device="cpu")
        self._layer.dequantize(expert, NATIVE_PROJECTIONS[projection], out.data_ptr())
        return out

    def bias(self, expert: int, projection: str) -> Tensor:
        """The bias as fp32 `[out_features]`, of a layer that has biases.

        Raises:
            ValueError: this one has none, or no such expert.
        """
        if not self.biases:
            raise ValueError(f"{self.name} has no biases")
        if not 0 <= expert < self.num_experts:
            raise ValueError(f"{self.name}: expert {expert} does not exist, there are {self.num_experts}")
        size = self.hidden_size if projection == "down_proj" else self.intermediate_size
        out = torch.empty(size, dtype=torch.float32, device="cpu")
        self._layer.bias(expert, NATIVE_PROJECTIONS[projection], out.data_ptr())
        return out

    def slices(self) -> list[PackedSlice]:
        """Where the packed experts lie in memory, a slice of the intermediate dimension on each NUMA node."""
        return [PackedSlice.of(*slice) for slice in self._layer.slices()]

    def forward(
        self,
        hidden_states: Tensor,
        top_k_index: Tensor,
        top_k_weights: Tensor,
        lora: ExpertLora | None,
        activation: str,
        activation_bits: int = 16,
        *,
        out: Tensor | None = None,
    ) -> tuple[Tensor, Any]:
        """Weighted sum over the chosen experts; see `ktft.reference.moe` for the formula.

        Args:
            hidden_states: `[T, H]` fp32, bf16 or fp16; the kernels multiply bf16 and accumulate fp32.
            top_k_index: `[T, k]` integer, or `ELSEWHERE` for what is computed elsewhere and adds nothing here;
                top_k_weights: `[T, k]` float.
            lora: adapters.
            activation: `retain`, `recompute`, or `none` when no backward follows.
            activation_bits: 16, or 8 to quantize hidden states and SiLU's output to int8 token by token: faster where
                AMX-INT8 is, less exact (about 1% more error). Needs format `int8`, tiles and activation `none`.
            out: like `hidden_states`, contiguous: where to write the sum; by default a new tensor.

        Returns:
            `[T, H]` in the input's dtype, and the handle `backward` takes (None with `none`).

        Raises:
            ValueError: wrong shapes or dtypes, tensors that are not in CPU memory, an expert number out of range, NaN
                or Inf in hidden states, or `activation_bits` 8 where it cannot be.
        """
        x, index, weights = self._inputs(hidden_states, top_k_index, top_k_weights)
        adapters, _keep_alive = self.native_lora(lora)
        out = torch.empty_like(x) if out is None else check_like(out, x.shape, x.dtype, "out")
        saved = self._layer.forward(
            self._address(x, "hidden_states"),
            DTYPES[x.dtype],
            self._address(index, "top_k_index"),
            self._address(weights, "top_k_weights"),
            *index.shape,
            adapters,
            getattr(core.Keep, activation),
            activation_bits,
            self._address(out, "out"),
        )
        return out, saved

    def prepare(self, top_k_index: Tensor) -> Any:
        """The handle that `forward` returns with `recompute`, without computing anything.

        Raises:
            ValueError: no integers `[T, k]` in CPU memory, or an expert number out of range.
        """
        index = self._numbers(top_k_index)
        return self._layer.prepare(self._address(index, "top_k_index"), *index.shape)

    def backward(
        self,
        saved: Any,
        grad_output: Tensor,
        hidden_states: Tensor,
        top_k_index: Tensor,
        top_k_weights: Tensor,
        lora: ExpertLora | None,
        *,
        elsewhere: Tensor | None = None,
        lora_grads: list[Tensor] | None = None,
        grad_hidden: Tensor | None = None,
    ) -> Gradients:
        """Gradients of everything `forward` took, given its handle and the same inputs.

        Args:
            saved, hidden_states, top_k_index, top_k_weights, lora: as `forward` gave and took them.
            grad_output: `[T, H]`.
            elsewhere: `[num_experts]` bool, experts whose LoRA gradients are left as they are in `lora_grads`; other
                experts without tokens get zeros.
            lora_grads: fp32, where to write them, in the order and shapes of `Gradients.lora`; by default new tensors.
            grad_hidden: like `hidden_states`, contiguous: where to write its gradient; by default a new tensor.

        Raises:
            ValueError: as `forward`; or `saved` is None, another layer's, of another batch size, or kept what
                adapters of another rank gave.
        """
        if saved is None:
            raise ValueError(f"{self.name}: forward kept nothing for backward: its activation was none")
        x, index, weights = self._inputs(hidden_states, top_k_index, top_k_weights)
        if grad_output.shape != x.shape or not grad_output.is_floating_point():
            raise ValueError(f"{self.name}: grad_output must be {list(x.shape)}, got {described(grad_output)}")
        grad_output = grad_output.to(x.dtype).contiguous()
        parameters = lora.parameters() if lora is not None else []
        # torch.zeros would wake threads that then spin
        grads = lora_grads or [torch.empty(tensor.shape, dtype=torch.float32, device="cpu") for tensor in parameters]
        adapters, keep_alive = self.native_lora(lora, grads, elsewhere)
        grad_hidden = (
            torch.empty_like(x) if grad_hidden is None else check_like(grad_hidden, x.shape, x.dtype, "grad_hidden")
        )
        grad_weights = torch.empty(index.shape, dtype=torch.float32, device="cpu")
        self._layer.backward(
            saved,
            self._address(x, "hidden_states"),
            self._address(grad_output, "grad_output"),
            DTYPES[x.dtype],
            self._address(weights, "top_k_weights"),
            *index.shape,
            adapters,
            self._address(grad_hidden, "grad_hidden"),
            self._address(grad_weights, "grad_weights"),
        )
        return Gradients(grad_hidden, grad_weights, [g.to(p.dtype) for g, p in zip(grads, keep_alive, strict=True)])

    def native_lora(
        self, lora: ExpertLora | None, grads: list[Tensor] | None = None, elsewhere: Tensor | None = None
    ) -> tuple[Any, list[Tensor]]:
        """The core's view of adapters of this layer, and the tensors it points into; see `ktft.native.adapters`."""
        return native_lora(self.name, self.num_experts, lora, grads, elsewhere)

    def _inputs(self, x: Tensor, index: Tensor, weights: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        if x.dim() != 2 or x.shape[1] != self.hidden_size or x.dtype not in DTYPES:
            raise ValueError(
                f"{self.name}: hidden states must be [tokens, {self.hidden_size}] in fp32, bf16 or fp16, got "
                f"{list(x.shape)} {x.dtype}"
            )
        if index.dim() != 2 or index.shape != weights.shape or index.shape[0] != x.shape[0]:
            raise ValueError(
                f"{self.name}: top_k_index {list(index.shape)} and top_k_weights {list(weights.shape)} must both be "
                f"[{x.shape[0]}, top_k]"
            )
        if not weights.is_floating_point():
            raise ValueError(f"{self.name}: top_k_weights must be floating point, got {weights.dtype}")
        return x.contiguous(), self._numbers(index), weights.to(torch.float32).contiguous()

    def _numbers(self, index: Tensor) -> Tensor:
        if index.dim() != 2 or index.dtype not in INTEGERS:
            raise ValueError(f"{self.name}: top_k_index must be integers [tokens, top_k], got {described(index)}")
        check_memory(index, f"{self.name}: top_k_index")
        return index.to(torch.int64).contiguous()

    def _address(self, tensor: Tensor, name: str) -> int:
        return address(tensor, f"{self.name}: {name}")
