"""One layer's routed experts: packs them, and computes their forward and backward."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ktft.held import HeldExperts
from ktft.lora import ExpertLora
from ktft.native.encodings import source_arguments
from ktft.native.extension import DTYPES, NATIVE_PROJECTIONS, core
from ktft.native.machine import Runtime
from ktft.native.packed import PackedSlice
from ktft.native.tensors import INTEGERS, address, check_like, check_memory, described, native_lora
from ktft.swiglu import SILU, Swiglu


@dataclass(frozen=True)
class KeptLora:
    """One adapter's LoRA on a layer's experts, packed for that layer by `ExpertLayer.keep_lora`."""

    handle: Any


@dataclass
class Gradients:
    """The gradients that one backward returns.

    Attributes:
        hidden_states: `[T, H]` in the input's dtype.
        top_k_weights: `[T, k]` fp32.
        lora: a and b of each adapted projection in the order of `PROJECTIONS`, in their parameters' dtypes.
    """

    hidden_states: Tensor
    top_k_weights: Tensor
    lora: list[Tensor]


class ExpertLayer:
    """One layer's routed experts, or this process's part of them, packed in CPU memory.

    Args:
        runtime: the threads and NUMA nodes to use.
        num_experts, hidden_size, intermediate_size: the sizes of the model's layer; the last two are multiples of 32.
        swiglu: the activation, which says whether experts have a gate projection.
        format: one of `FORMATS`.
        name: the layer's name in error messages.
        biases: whether the projections have biases, which `load_bias` then fills.
        held: the experts that this process holds; by default all.

    Attributes:
        num_experts: the number of experts that are held. All methods number experts from the first of these.

    Raises:
        ValueError: the kernels cannot take the dimensions, the format is unknown, or alpha or limit is not positive.
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
        self.handle = core.MoeLayer(  # the core's own object
            runtime.handle,
            num_experts,
            hidden_size,
            intermediate_size,
            format,
            swiglu.alpha,
            swiglu.limit,
            swiglu.shift,
            swiglu.cubic,
            swiglu.gate_most,
            swiglu.gated,
            biases,
            name,
        )

    @property
    def projections(self) -> tuple[str, ...]:
        """The projections that each expert has, in the order of `PROJECTIONS`."""
        return self.swiglu.projections

    @property
    def packed_bytes(self) -> int:
        """Bytes of packed weights, scales and biases."""
        return int(self.handle.bytes)

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
        """Pack one `[out_features, in_features]` weight, which is given as floats or as codes with scales, on the CPU.

        Codes are kept with their scales if this layer's format has the same blocks. Otherwise their values are encoded.

        Args:
            weight: fp32, bf16 or fp16 values; or float8_e4m3fn codes; or uint8 `[out_features, in_features / 2]` with
                two 4-bit codes in a byte, the even column in the low half.
            scales: the scales of codes, one per block: `[ceil(out / block[0]), ceil(in / block[1])]`. They are fp32 for
                fp8 and for int4, whose codes are q + 8. If they are uint8, they are E8M0 exponents and 4-bit codes are
                mxfp4 (OCP MX v1.0).
            block: the rows and columns that share a scale; by default (128, 128) for fp8 and (1, 32) for 4 bits.
            zeros: for int4 only, uint8 in the shape of `scales`: the code that means zero; by default 8 everywhere.

        Returns:
            Whether codes and scales were kept, so that `dequantize` gives exactly the values that they stand for.

        Raises:
            ValueError: the shape or dtype is wrong, there is NaN or Inf or a negative fp8 scale, there is no such
                expert, or the weight was loaded before.
        """
        source, _held = source_arguments(weight, scales, block, zeros, f"{self.name}: ")
        self._refuse_second(expert, projection)
        return bool(self.handle.load(expert, NATIVE_PROJECTIONS[projection], *source))

    def canonical_bytes(self, projection: str) -> int:
        """The size of what `export_packed` returns. It depends only on format and shape."""
        return int(self.handle.canonical_bytes(NATIVE_PROJECTIONS[projection]))

    def export_packed(self, expert: int, projection: str) -> Tensor:
        """One packed weight in the canonical layout of docs/reference/convert.md, uint8 `[canonical_bytes]`.

        The bytes do not depend on NUMA nodes, threads or ISA.

        Raises:
            ValueError: there is no such expert, or its weight was not loaded.
        """
        out = torch.empty(self.canonical_bytes(projection), dtype=torch.uint8, device="cpu")
        self.handle.export_canonical(expert, NATIVE_PROJECTIONS[projection], out.data_ptr())
        return out

    def import_packed(self, expert: int, projection: str, packed: Tensor) -> None:
        """Load one weight that `export_packed` of a layer with the same format and shape returned.

        Raises:
            ValueError: it is not a uint8 tensor of `canonical_bytes`, no packing gives its scales, there is no such
                expert, or the weight was loaded before.
        """
        size = self.canonical_bytes(projection)
        if packed.dtype != torch.uint8 or packed.shape != (size,) or packed.device.type != "cpu":
            raise ValueError(f"expected {size} bytes of {self.format}, got {list(packed.shape)} {packed.dtype}")
        self._refuse_second(expert, projection)
        self.handle.import_canonical(
            expert, NATIVE_PROJECTIONS[projection], self._address(packed.contiguous(), "packed")
        )

    def _refuse_second(self, expert: int, projection: str) -> None:
        if 0 <= expert < self.num_experts and self.handle.loaded(expert, NATIVE_PROJECTIONS[projection]):
            raise ValueError(f"{self.name}.{expert}.{projection} was loaded already: the checkpoint holds it twice")

    def load_bias(self, expert: int, projection: str, bias: Tensor) -> None:
        """Load one `[out_features]` bias, given as fp32, bf16 or fp16 on the CPU and kept in fp32. Biases stay frozen.

        Raises:
            ValueError: the layer has no biases, the shape or dtype is wrong, there is NaN or Inf, there is no such
                expert, or the bias was loaded before.
        """
        if bias.dtype not in DTYPES or bias.dim() != 1 or bias.device.type != "cpu":
            raise ValueError(
                f"expected a 1-D fp32, bf16 or fp16 CPU tensor, got {bias.dtype} {list(bias.shape)} on {bias.device}"
            )
        if 0 <= expert < self.num_experts and self.handle.loaded_bias(expert, NATIVE_PROJECTIONS[projection]):
            raise ValueError(
                f"the bias of {self.name}.{expert}.{projection} was loaded already: the checkpoint holds it twice"
            )
        bias = bias.float().contiguous()
        self.handle.load_bias(expert, NATIVE_PROJECTIONS[projection], self._address(bias, "a bias"), len(bias))

    def missing(self) -> list[tuple[int, str]]:
        """(expert, projection) pairs whose weight or, in a layer with biases, bias was never loaded."""
        filled = (self.handle.loaded, self.handle.loaded_bias) if self.biases else (self.handle.loaded,)
        return [
            (expert, name)
            for expert in range(self.num_experts)
            for name in self.projections
            if not all(is_loaded(expert, NATIVE_PROJECTIONS[name]) for is_loaded in filled)
        ]

    def dequantize(self, expert: int, projection: str) -> Tensor:
        """The packed weight as fp32 `[out_features, in_features]`."""
        shape = (self.hidden_size, self.intermediate_size)
        out = torch.empty(shape if projection == "down_proj" else shape[::-1], dtype=torch.float32, device="cpu")
        self.handle.dequantize(expert, NATIVE_PROJECTIONS[projection], out.data_ptr())
        return out

    def bias(self, expert: int, projection: str) -> Tensor:
        """The bias as fp32 `[out_features]`.

        Raises:
            ValueError: the layer has no biases, or no such expert.
        """
        if not self.biases:
            raise ValueError(f"{self.name} has no biases")
        if not 0 <= expert < self.num_experts:
            raise ValueError(f"{self.name}: expert {expert} does not exist, there are {self.num_experts}")
        size = self.hidden_size if projection == "down_proj" else self.intermediate_size
        out = torch.empty(size, dtype=torch.float32, device="cpu")
        self.handle.bias(expert, NATIVE_PROJECTIONS[projection], out.data_ptr())
        return out

    def slices(self) -> list[PackedSlice]:
        """The places of the packed experts in memory. Each NUMA node has a slice of the intermediate dimension."""
        return [PackedSlice.of(*slice) for slice in self.handle.slices()]

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
        """The weighted sum over the chosen experts; see `ktft.reference.moe` for the formula.

        Args:
            hidden_states: `[T, H]` fp32, bf16 or fp16; the kernels multiply bf16 and accumulate fp32.
            top_k_index: `[T, k]` integer; `ELSEWHERE` marks experts that are computed elsewhere and add nothing here.
            top_k_weights: `[T, k]` float.
            activation: `retain`, `recompute`, or `none` when no backward follows.
            activation_bits: 16; or 8, which is faster and less exact, and needs activation `none`. With format `int8`
                AMX-INT8 quantizes hidden states and SiLU's output to int8 token by token (about 2% more error). With a
                4-bit format they are rounded by groups of 32 columns (0.5% more error); AVX-512 without BF16 does so in
                products of up to 12 rows alone, AMX where experts have up to 8. So they are with `int8` on AVX-512 BF16
                without tiles, in products of more than 12 rows. Other ISAs refuse 8 for `int8`.
            out: a contiguous tensor like `hidden_states` for the sum; by default a new one.

        Returns:
            `[T, H]` in the input's dtype, and the handle that `backward` takes (None with `none`).

        Raises:
            ValueError: a shape or dtype is wrong, a tensor is not in CPU memory, an expert number is out of range,
                hidden states have NaN or Inf, or `activation_bits` cannot be 8 here.
        """
        x, index, weights = self._inputs(hidden_states, top_k_index, top_k_weights)
        adapters, _keep_alive = self.native_lora(lora)
        out = torch.empty_like(x) if out is None else check_like(out, x.shape, x.dtype, "out")
        saved = self.handle.forward(
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

    def keep_lora(self, lora: ExpertLora) -> KeptLora:
        """Pack adapters once for many calls of `forward_adapters`. `lora` is not needed after that.

        The packed tensors take 4 bytes for each value, of ranks rounded up to a multiple of 16.

        Raises:
            ValueError: the adapters have dropout, do not fit this layer, or the core cannot take a shape or dtype.
        """
        if lora.dropout:
            raise ValueError(f"{self.name}: the adapters have dropout {lora.dropout}, which is for training")
        adapters, _keep_alive = self.native_lora(lora)
        if adapters is None:
            raise ValueError(f"{self.name}: there are no adapters to keep: no projection has one")
        return KeptLora(self.handle.keep(adapters))

    def forward_adapters(
        self,
        hidden_states: Tensor,
        top_k_index: Tensor,
        top_k_weights: Tensor,
        loras: Sequence[KeptLora],
        adapter_of_token: Tensor,
        activation_bits: int = 16,
    ) -> Tensor:
        """`forward` without a backward, with an adapter for each token. Base weights are read once for all adapters.

        Args:
            hidden_states, top_k_index, top_k_weights, activation_bits: as in `forward`.
            loras: what `keep_lora` of this layer returned. Their ranks and projections may differ.
            adapter_of_token: `[T]` integer, a number within `loras`; -1 marks tokens without an adapter.

        Returns:
            `[T, H]` in the input's dtype.

        Raises:
            ValueError: as in `forward`; or an adapter's number is out of range, or was kept by another layer.
        """
        x, index, weights = self._inputs(hidden_states, top_k_index, top_k_weights)
        if adapter_of_token.shape != (len(x),) or adapter_of_token.dtype not in INTEGERS:
            raise ValueError(
                f"{self.name}: adapter_of_token must be integers [{len(x)}], got {described(adapter_of_token)}"
            )
        of_token, out = adapter_of_token.to(torch.int32).contiguous(), torch.empty_like(x)
        self.handle.forward_adapters(
            self._address(x, "hidden_states"),
            DTYPES[x.dtype],
            self._address(index, "top_k_index"),
            self._address(weights, "top_k_weights"),
            *index.shape,
            [lora.handle for lora in loras],
            self._address(of_token, "adapter_of_token"),
            activation_bits,
            self._address(out, "out"),
        )
        return out

    def prepare(self, top_k_index: Tensor) -> Any:
        """The handle that `forward` returns with `recompute`. This does not compute the experts.

        Raises:
            ValueError: the tensor is not integers `[T, k]` in CPU memory, or an expert number is out of range.
        """
        index = self._numbers(top_k_index)
        return self.handle.prepare(self._address(index, "top_k_index"), *index.shape)

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
        """The gradients of everything that `forward` took, given its handle and the same inputs.

        Args:
            grad_output: `[T, H]`.
            elsewhere: `[num_experts]` bool; the LoRA gradients of these experts are left as they are in `lora_grads`.
                Other experts without tokens get zeros.
            lora_grads: fp32 tensors for the LoRA gradients, in the order and shapes of `Gradients.lora`; by default new
                ones.
            grad_hidden: a contiguous tensor like `hidden_states` for its gradient; by default a new one.

        Raises:
            ValueError: as in `forward`; or `saved` is None, or comes from another layer, another batch size or adapters
                of another rank.
        """
        if saved is None:
            raise ValueError(f"{self.name}: forward kept nothing for backward: its activation was none")
        x, index, weights = self._inputs(hidden_states, top_k_index, top_k_weights)
        if grad_output.shape != x.shape or not grad_output.is_floating_point():
            raise ValueError(f"{self.name}: grad_output must be {list(x.shape)}, got {described(grad_output)}")
        grad_output = grad_output.to(x.dtype).contiguous()
        parameters = lora.parameters() if lora is not None else []
        # torch.zeros would wake torch's threads, which then spin
        grads = lora_grads or [torch.empty(tensor.shape, dtype=torch.float32, device="cpu") for tensor in parameters]
        adapters, keep_alive = self.native_lora(lora, grads, elsewhere)
        grad_hidden = (
            torch.empty_like(x) if grad_hidden is None else check_like(grad_hidden, x.shape, x.dtype, "grad_hidden")
        )
        grad_weights = torch.empty(index.shape, dtype=torch.float32, device="cpu")
        self.handle.backward(
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
        """The core's view of this layer's adapters, and the tensors it points into; see `ktft.native.tensors`."""
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
