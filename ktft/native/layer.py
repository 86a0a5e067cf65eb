"""One layer's routed experts: packed, computed forward and backward."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ktft.config import PROJECTIONS
from ktft.lora import ExpertLora
from ktft.native.codes import check_codes
from ktft.native.extension import DTYPES, ENCODINGS, NATIVE_PROJECTIONS, core
from ktft.native.machine import Runtime
from ktft.swiglu import SILU, Swiglu

<<<<<<< HEAD:ktft/native/layer.py
=======
try:
    import ktft._C as _C
except ImportError as error:
    raise ImportError(
        f"ktft's native core cannot be loaded ({error}). Install ktft for this Python from its folder: pip install ."
    ) from error

FORMATS: tuple[str, ...] = _C.FORMATS
_DTYPES = {torch.float32: _C.Dtype.f32, torch.bfloat16: _C.Dtype.bf16, torch.float16: _C.Dtype.f16}
_ENCODINGS = {torch.float32: _C.Encoding.f32, torch.bfloat16: _C.Encoding.bf16, torch.float16: _C.Encoding.f16}
_PROJECTIONS = {name: getattr(_C.Projection, name) for name in PROJECTIONS}


def cpu_features() -> dict[str, bool]:
    """CPU feature name -> whether this process can use it (AMX: granted by the operating system)."""
    return dict(_C.cpu_features())


def isas() -> list[str]:
    """ISAs this CPU runs, slowest first; `runtime` takes the last one unless KTFT_ISA names another."""
    return list(_C.isas())


def default_isa() -> str:
    """The ISA that `runtime` takes. Raises ValueError when KTFT_ISA is unknown or cannot run here."""
    return str(_C.default_isa())


def topology() -> dict[str, Any]:
    """CPUs and memory this process may use.

    Returns `nodes` (`id`, `cpus`, physical `cores`, `memory_bytes`, `free_bytes` each), `cgroup_cpus` (CPU quota or
    None), `cores` (physical cores within the quota) and `mbind` ("ok" or why memory cannot be placed on a node).
    """
    return dict(_C.topology())


def kernels() -> list[dict[str, Any]]:
    """The kernel table: `name`, `isa`, `format`, `backward` of each row."""
    return list(_C.kernels())


def packed_bytes(
    num_experts: int, hidden_size: int, intermediate_size: int, format: str, nodes: int, biases: bool = False
) -> list[int]:
    """Bytes that each NUMA node would hold of one layer's experts; fewer entries where the columns do not go round.

    Raises:
        ValueError: dims that the kernels cannot take, or an unknown format.
    """
    return list(_C.packed_bytes(num_experts, hidden_size, intermediate_size, format, biases, nodes))


@dataclass(frozen=True)
class Runtime:
    """Thread pools and workspace, shared by all layers of a process with the same settings."""

    handle: Any

    @property
    def isa(self) -> str:
        """Name of the ISA whose kernels run."""
        return str(self.handle.isa)

    @property
    def threads(self) -> int:
        """Threads that compute, the calling one included."""
        return int(self.handle.threads)

    @property
    def nodes(self) -> int:
        """NUMA nodes the experts are spread over."""
        return int(self.handle.nodes)

    @property
    def workspace_bytes(self) -> int:
        """Bytes of buffers that grew to the largest call so far."""
        return int(self.handle.workspace_bytes)

    def take_phases(self) -> dict[str, float]:
        """Seconds that layer calls spent in each phase since this was last called, in order of first appearance."""
        return dict(self.handle.take_phases())

    @property
    def warnings(self) -> tuple[str, ...]:
        """What makes this machine slower than it could be, for a person."""
        status = topology()["mbind"]
        if self.nodes > 1 and status != "ok":
            return (
                f"memory cannot be bound to NUMA nodes here ({status}): experts may lie far from their threads. In a "
                "container allow the mbind system call, for instance docker run --cap-add SYS_NICE",
            )
        return ()


@functools.cache
def runtime(threads: int | None = None, numa_nodes: int | None = None, isa: str | None = None) -> Runtime:
    """The process's runtime for these settings, made on first use.

    Args:
        threads: threads that compute; None for one per physical core that affinity and cgroup allow.
        numa_nodes: parts to split the experts into; None for the machine's nodes. More than it has emulates a split.
        isa: kernel ISA; None for `default_isa()`.
    """
    return Runtime(_C.Runtime(isa or default_isa(), threads or 0, numa_nodes or 0))


def compute_ceilings(runtime: Runtime, seconds: float = 0.01) -> tuple[float, float]:
    """FLOP/s of all the runtime's threads now: products of registers only (P), and the forward kernel's inner loop on
    operands in L1 and L2 with nothing decoded (H). Takes twice `seconds`.
    """
    measure, handle = _C.measure_flops, runtime.handle
    return float(measure(handle, _C.Ceiling.registers, seconds)), float(measure(handle, _C.Ceiling.hot, seconds))


class StreamedMemory:
    """Memory for the ceilings of operands that no cache holds. Take far more `bytes` than the caches hold."""

    def __init__(self, runtime: Runtime, bytes: int) -> None:
        self._native = _C.StreamedMemory(runtime.handle, bytes)

    def read(self) -> float:
        """Bytes per second of all threads together, reading everything once."""
        return float(self._native.read())

    def gemm(self, tokens: int, reduction: int) -> float:
        """FLOP/s of all threads' bf16 forward GEMM alone (S): everything once as weights of `reduction` columns (a
        multiple of 32), under the same 1 to 704 tokens, results not used.
        """
        return float(self._native.gemm(tokens, reduction))

>>>>>>> p:ktft/native.py

@dataclass
class Gradients:
    """What one backward returns: `[T, H]` in the input's dtype, `[T, k]` fp32, and a, b of each adapted projection in
    the order of `PROJECTIONS`, in their parameters' dtypes.
    """

    hidden_states: Tensor
    top_k_weights: Tensor
    lora: list[Tensor]


class ExpertLayer:
    """One layer's routed experts, packed in CPU memory.

    Args:
        runtime: threads and NUMA nodes.
        num_experts, hidden_size, intermediate_size: the last two multiples of 32.
        format: one of `FORMATS`.
        name: the layer's name in error messages.
        swiglu: the activation.
        biases: whether the projections have biases, which `load_bias` then fills.

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
    ) -> None:
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
        addresses = [0 if tensor is None else tensor.data_ptr() for tensor in (scales, zeros)]
        return bool(
            self._layer.load(
                expert,
                NATIVE_PROJECTIONS[projection],
                weight.data_ptr(),
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
        """One packed weight in the canonical layout, uint8 `[canonical_bytes]`: docs/convert.md describes it.

        The bytes do not depend on NUMA nodes, threads or ISA.

        Raises:
            ValueError: no such expert, or nothing was loaded.
        """
        out = torch.empty(self.canonical_bytes(projection), dtype=torch.uint8)
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
        self._layer.import_canonical(expert, NATIVE_PROJECTIONS[projection], packed.contiguous().data_ptr())

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
        self._layer.load_bias(expert, NATIVE_PROJECTIONS[projection], bias.data_ptr(), len(bias))

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
        out = torch.empty(shape if projection == "down_proj" else shape[::-1], dtype=torch.float32)
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
        out = torch.empty(self.hidden_size if projection == "down_proj" else self.intermediate_size)
        self._layer.bias(expert, NATIVE_PROJECTIONS[projection], out.data_ptr())
        return out

    def forward(
        self,
        hidden_states: Tensor,
        top_k_index: Tensor,
        top_k_weights: Tensor,
        lora: ExpertLora | None,
        activation: str,
        activation_bits: int = 16,
    ) -> tuple[Tensor, Any]:
        """Weighted sum over the chosen experts; see `ktft.reference.moe` for the formula.

        Args:
            hidden_states: `[T, H]` fp32, bf16 or fp16; the kernels multiply bf16 and accumulate fp32.
            top_k_index: `[T, k]` integer; top_k_weights: `[T, k]` float.
            lora: adapters.
            activation: `retain`, `recompute`, or `none` when no backward follows.
            activation_bits: 16, or 8 to quantize hidden states and SiLU's output to int8 token by token: faster where
                AMX-INT8 is, less exact (about 1% more error). Needs format `int8`, tiles and activation `none`.

        Returns:
            `[T, H]` in the input's dtype, and the handle `backward` takes (None with `none`).

        Raises:
            ValueError: wrong shapes or dtypes, an expert number out of range, NaN or Inf in hidden states, or
                `activation_bits` 8 where it cannot be.
        """
        x, index, weights = self._inputs(hidden_states, top_k_index, top_k_weights)
        native_lora, _keep_alive = self._lora(lora)
        out = torch.empty_like(x)
        saved = self._layer.forward(
            x.data_ptr(),
            DTYPES[x.dtype],
            index.data_ptr(),
            weights.data_ptr(),
            *index.shape,
            native_lora,
            getattr(core.Keep, activation),
            activation_bits,
            out.data_ptr(),
        )
        return out, saved

    def backward(
        self,
        saved: Any,
        grad_output: Tensor,
        hidden_states: Tensor,
        top_k_index: Tensor,
        top_k_weights: Tensor,
        lora: ExpertLora | None,
    ) -> Gradients:
        """Gradients of everything `forward` took, given its handle and the same inputs."""
        x, index, weights = self._inputs(hidden_states, top_k_index, top_k_weights)
        grad_output = grad_output.to(x.dtype).contiguous()
        grads = [
            torch.empty(tensor.shape, dtype=torch.float32)  # torch.zeros would wake threads that then spin
            for name in PROJECTIONS
            if lora is not None and name in lora.pairs
            for tensor in (lora.pairs[name].a, lora.pairs[name].b)
        ]
        native_lora, keep_alive = self._lora(lora, grads)
        grad_hidden = torch.empty_like(x)
        grad_weights = torch.empty(index.shape, dtype=torch.float32)
        self._layer.backward(
            saved,
            x.data_ptr(),
            grad_output.data_ptr(),
            DTYPES[x.dtype],
            weights.data_ptr(),
            native_lora,
            grad_hidden.data_ptr(),
            grad_weights.data_ptr(),
        )
        return Gradients(grad_hidden, grad_weights, [g.to(p.dtype) for g, p in zip(grads, keep_alive, strict=True)])

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
        return x.contiguous(), index.to(torch.int64).contiguous(), weights.to(torch.float32).contiguous()

    def _lora(self, lora: ExpertLora | None, grads: list[Tensor] | None = None) -> tuple[Any, list[Tensor]]:
        """The native view of the adapters, and the tensors it points into."""
        if lora is None or not lora.pairs:
            return None, []
        native, tensors = core.Lora(lora.dropout, lora.seed), []
        buffers = iter(grads or [])
        for name in PROJECTIONS:
            if (pair := lora.pairs.get(name)) is None:
                continue
            for which, tensor in (("lora_A", pair.a), ("lora_B", pair.b)):
                if tensor.dim() != 3 or tensor.shape[0] != self.num_experts or tensor.device.type != "cpu":
                    raise ValueError(
                        f"{self.name}.{name}.{which} must be a CPU tensor with {self.num_experts} experts in its first "
                        f"dimension, got {list(tensor.shape)} on {tensor.device}"
                    )
                if tensor.dtype not in (torch.float32, torch.bfloat16):
                    raise ValueError(f"{self.name}.{name}.{which} must be fp32 or bf16, got {tensor.dtype}")
            if pair.a.shape[1] != pair.b.shape[2]:
                raise ValueError(f"{self.name}.{name}: lora_A has rank {pair.a.shape[1]}, lora_B {pair.b.shape[2]}")
            a, b = pair.a.detach().contiguous(), pair.b.detach().contiguous()
            tensors += [a, b]
            native.add(
                NATIVE_PROJECTIONS[name],
                a.data_ptr(),
                DTYPES[a.dtype],
                b.data_ptr(),
                DTYPES[b.dtype],
                a.shape[1],
                a.shape[2],
                b.shape[1],
                pair.scaling,
                *(next(buffers).data_ptr() if grads else 0 for _ in range(2)),
            )
        return native, tensors
