"""All defaults, environment variables and checks of settings. Standard library only, because `ktft --help` loads it."""

from __future__ import annotations

import difflib
import operator
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from ktft.formats import FORMAT_TRAITS
from ktft.sizes import parse_size
from ktft.sources import check_expert_checkpoint

PROJECTIONS = ("gate_proj", "up_proj", "down_proj")
EXPERT_FORMATS = tuple(FORMAT_TRAITS)
DEFAULT_EXPERT_FORMAT = "int8"
ACTIVATIONS = ("retain", "recompute")
PER_EXPERT, SHARED_OUTER = EXPERT_LORA = ("per_expert", "shared_outer")
PLACEMENTS = ("auto", "cpu", "stream", "resident")
DENSE_FORMATS = ("bf16", "fp8", "int8", "k4")
DENSE_PLACEMENTS = ("auto", "gpu", "host")
LANE_BYTES = 7 << 28
"""Bytes of GPU memory for the staging buffers and the decoded weights of streamed experts, for every model."""


def cuda_library() -> str:
    """The name by which the dynamic linker finds CUDA's driver library; `KTFT_LIBCUDA` names another library."""
    return os.environ.get("KTFT_LIBCUDA") or "libcuda.so.1"


def memory_limit() -> int | None:
    """The bytes of memory that `KTFT_MEMORY_LIMIT` (for instance 400G) lets ktft use; None if it is unset.

    Raises:
        ValueError: its value is not a size.
    """
    text = os.environ.get("KTFT_MEMORY_LIMIT", "")
    try:
        return parse_size(text) if text else None
    except ValueError as error:
        raise ValueError(f"KTFT_MEMORY_LIMIT: {error}") from None


TRACE_STEPS = 20
"""The number of steps in a trace."""


def trace_file() -> Path | None:
    """The file of `KTFT_TRACE`, to which a trace of the first `TRACE_STEPS` steps is written; None if it is unset."""
    text = os.environ.get("KTFT_TRACE", "")
    return Path(text) if text else None


def skip_memory_check() -> bool:
    """Whether `KTFT_SKIP_MEMORY_CHECK` allows loading a model that does not seem to fit in memory."""
    return os.environ.get("KTFT_SKIP_MEMORY_CHECK", "0") not in ("", "0")


SERVE_ENV = "KTFT_SERVE"
"""This variable carries `ktft.serve.runtime.settings.ServeSettings` from `ktft serve` to the server's processes."""
MAX_ADAPTERS = 8
"""Adapters that `ktft serve` serves at once unless it is told otherwise."""


def serve_settings(environment: Mapping[str, str] = os.environ) -> str | None:
    """The value of `KTFT_SERVE`; None in a process that does not serve."""
    return environment.get(SERVE_ENV) or None


API_KEY_ENV, ADMIN_KEY_ENV = "VLLM_API_KEY", "KTFT_ADMIN_KEY"


def server_keys() -> tuple[str | None, str | None]:
    """The key that a server's users must send, and the key for changes that affect all users; None for a key not set.

    The keys come from the environment, which a list of processes does not show. `VLLM_API_KEY` is vLLM's own name.
    """
    return os.environ.get(API_KEY_ENV) or None, os.environ.get(ADMIN_KEY_ENV) or None


def emulate_gpu() -> bool:
    """Whether torch on the CPU does a GPU's share of the routed experts' work. Tests set `KTFT_EMULATE_GPU`."""
    return os.environ.get("KTFT_EMULATE_GPU", "0") not in ("", "0")


def other_hub() -> bool:
    """Whether LLaMA-Factory is set to fetch models from a hub other than Hugging Face's."""
    return any(os.environ.get(hub, "0") not in ("", "0") for hub in ("USE_MODELSCOPE_HUB", "USE_OPENMIND_HUB"))


def show_tracebacks() -> bool:
    """Whether `KTFT_TRACEBACK` shows the traceback of every error, including those that are meant for the user."""
    return os.environ.get("KTFT_TRACEBACK", "0") not in ("", "0")


def emulate_cpus() -> bool:
    """Whether settings may ask for more threads and NUMA nodes than there are. Tests set `KTFT_EMULATE_CPUS`."""
    return os.environ.get("KTFT_EMULATE_CPUS", "0") not in ("", "0")


def use_triton() -> bool:
    """Whether Triton kernels may do a GPU's work; `KTFT_TRITON=0` selects torch operations instead."""
    return os.environ.get("KTFT_TRITON", "1") != "0"


@dataclass(frozen=True)
class Settings:
    """How the routed experts are held and run.

    Attributes:
        expert_format: the format of the weights in memory, one of `EXPERT_FORMATS`. None takes a converted checkpoint's
            own format, the one nearest to a GGUF file's, and `DEFAULT_EXPERT_FORMAT` for any other checkpoint.
        threads: CPU threads of the kernels; None takes one per physical core that this process may use.
        numa_nodes: NUMA nodes to spread the experts over; None takes all nodes this process may use.
        activation: `retain` keeps gate and up outputs for backward, `recompute` computes them again to save memory.
        expert_checkpoint: the directory of a safetensors checkpoint, as released or converted, or a GGUF file (or the
            directory of its parts), from which the experts are read; None takes the model's own.
        verify_checksums: whether the checksums of a converted checkpoint's experts are compared while they load.
        isa: the instruction set of the kernels; None takes the one in KTFT_ISA, or else the best that this CPU has.
        placement: where experts run. `auto` decides for each layer and batch; `cpu` and `stream` run all of them on the
            CPU or the GPU; `resident` runs those that stay on the GPU there and all others on the CPU. Without a GPU
            `auto` is `cpu`.
        gpu_expert_memory: bytes of GPU memory for experts that stay there, also given as `8G`; `auto` takes what
            training leaves, and gives it back before a batch that needs more. None is `auto` where `placement` may use
            such experts, and 0 where it is `cpu` or `stream`.
        micro_batches_together: how many of the micro-batches of an optimizer step go through each layer together, so
            that an expert is needed once for all of them; `auto` takes as many as memory allows. With 1 each goes
            through the whole model before the next.
        cuda_graphs: whether what a decoder layer does around its experts is recorded on a GPU, and played back in a few
            launches, if its activations are checkpointed.
        gpu_activation_memory: bytes of GPU memory, also given as `8G`, in which layers under gradient checkpointing may
            keep their activations, so that they are not run again, and then gate and up of their experts; `auto` takes
            what training leaves.
        expert_routing: a file with the tokens that each expert got in an earlier run, by which several processes share
            the experts so that each gets about as many; None leaves neighbours to different processes.
        expert_lora: whether a new adapter gives each expert matrices of its own (`per_expert`), or one A for gate, one
            for up and one B for down to all experts of a layer (`shared_outer`). None is `per_expert` for a new
            adapter and takes a saved one as it is; a value refuses to train a saved adapter of the other form.
        dense_format: the format of the frozen linear weights outside the routed experts, one of `DENSE_FORMATS`; `fp8`
            keeps FP8 weights of the checkpoint as they are. None takes the most exact that fits.
        dense_placement: where these weights are: `gpu`; or `host`, from where each layer's are copied to the GPU as it
            comes, once a step; `auto` is `gpu` if they fit there. Without a GPU they are in memory.
        gpu_memory: bytes of GPU memory that the process may use, also given as `22G`; None is all of the GPU.

    Raises:
        ValueError: a value is not accepted, or two values contradict each other.
    """

    expert_format: str | None = None
    threads: int | None = None
    numa_nodes: int | None = None
    activation: str = "retain"
    expert_checkpoint: str | None = None
    verify_checksums: bool = True
    isa: str | None = None
    placement: str = "auto"
    gpu_expert_memory: int | str = None  # type: ignore[assignment]  # never None once it is made
    micro_batches_together: int | str = "auto"
    cuda_graphs: bool = True
    gpu_activation_memory: int | str = "auto"
    expert_routing: str | None = None
    expert_lora: str | None = None
    dense_format: str | None = None
    dense_placement: str = "auto"
    gpu_memory: int | None = None

    @property
    def needs_gpu(self) -> str:
        """Describes the setting that requires a GPU; empty if there is none."""
        if self.placement in ("stream", "resident"):
            return f"placement is {self.placement!r}"
        if isinstance(self.gpu_expert_memory, int) and self.gpu_expert_memory:
            return f"gpu_expert_memory is {self.gpu_expert_memory} bytes"
        if self.dense_placement == "host":
            return "dense_placement is 'host'"
        return ""

    def capped(self, gpu_bytes: int) -> int:
        """What the process may use of a GPU that has so many bytes of memory."""
        return min(gpu_bytes, self.gpu_memory or gpu_bytes)

    def __post_init__(self) -> None:
        for name in SETTINGS:
            object.__setattr__(self, name, checked(name, getattr(self, name)))
        if self.gpu_expert_memory is None or (self.placement == "cpu" and self.gpu_expert_memory == "auto"):
            object.__setattr__(self, "gpu_expert_memory", 0 if self.placement in ("cpu", "stream") else "auto")
        if self.placement == "cpu" and self.gpu_expert_memory != 0:
            raise ValueError(
                f"placement is 'cpu', but gpu_expert_memory is {self.gpu_expert_memory!r}: no expert would use it; set "
                "placement: auto, or gpu_expert_memory: 0"
            )
        if self.placement == "resident" and self.gpu_expert_memory == 0:
            raise ValueError(
                "placement is 'resident', but gpu_expert_memory is 0: no expert would be on the GPU; set "
                "gpu_expert_memory to a size, for instance 8G, or auto"
            )


SETTINGS = tuple(field.name for field in fields(Settings))


def _one_of(name: str, accepted: tuple[str | None, ...]) -> Callable[[Any], Any]:
    def check(value: Any) -> Any:
        if value not in accepted:
            raise ValueError(f"{name} is {value!r}; supported: {', '.join(each for each in accepted if each)}")
        return value

    return check


def _count(name: str, other: str = "") -> Callable[[Any], Any]:
    """A check for whole numbers. `other` is what the message names beside them."""

    def check(value: Any) -> Any:
        if value is None:
            return None
        # The value decides, not Python's type: numpy's integers are accepted, booleans are not
        number = operator.index(value) if hasattr(value, "__index__") and not isinstance(value, bool) else 0
        if number < 1:
            others = f", {other}," if other else ","
            raise ValueError(f"{name} is {value!r}; give a whole number of at least 1{others} or leave it out")
        return number

    return check


def _flag(name: str) -> Callable[[Any], bool]:
    def check(value: Any) -> bool:
        if not isinstance(value, bool):
            raise ValueError(f"{name} is {value!r}; give true or false")
        return value

    return check


def _check_expert_routing(value: Any) -> Any:
    if value is not None and not Path(value).is_file():
        raise ValueError(
            f"expert_routing is {str(value)!r}, which is not a file; give the expert_routing.json that a training "
            "wrote into its output_dir"
        )
    return value


def _share_of_gpu(name: str, *others: object) -> Callable[[Any], Any]:
    """A check for a size or `auto`. A text is a size as a person writes it; a whole number is a number of bytes."""
    wanted = "give a size, for instance 8G, or auto, or 0"

    def check(value: Any) -> Any:
        if value in ("auto", *others) or (isinstance(value, int) and not isinstance(value, bool) and value >= 0):
            return value
        if not isinstance(value, str):
            raise ValueError(f"{name} is {value!r}; {wanted}")
        try:
            return parse_size(value)
        except ValueError as error:
            raise ValueError(f"{name} is {value!r}; {wanted} ({error})") from None

    return check


def _check_gpu_memory(value: Any) -> int | None:
    """A text is a size as a person writes it; a whole number is a number of bytes."""
    if value is None or (isinstance(value, int) and not isinstance(value, bool) and value > 0):
        return value
    try:
        if not isinstance(value, str) or (size := parse_size(value)) <= 0:
            raise ValueError("not a size above zero")
    except ValueError as error:
        raise ValueError(f"gpu_memory is {value!r}; give a size, for instance 22G ({error})") from None
    return size


_CHECKS: dict[str, Callable[[Any], Any]] = {
    "expert_format": _one_of("expert_format", (None, *EXPERT_FORMATS)),
    "threads": _count("threads"),
    "numa_nodes": _count("numa_nodes"),
    "activation": _one_of("activation", ACTIVATIONS),
    "expert_checkpoint": check_expert_checkpoint,
    "verify_checksums": _flag("verify_checksums"),
    "placement": _one_of("placement", PLACEMENTS),
    "gpu_expert_memory": _share_of_gpu("gpu_expert_memory", None),
    "gpu_activation_memory": _share_of_gpu("gpu_activation_memory"),
    "micro_batches_together": lambda value: (
        value if value == "auto" else _count("micro_batches_together", "auto")(value)
    ),
    "cuda_graphs": _flag("cuda_graphs"),
    "expert_routing": _check_expert_routing,
    "expert_lora": _one_of("expert_lora", (None, *EXPERT_LORA)),
    "dense_format": _one_of("dense_format", (None, *DENSE_FORMATS)),
    "dense_placement": _one_of("dense_placement", DENSE_PLACEMENTS),
    "gpu_memory": _check_gpu_memory,
}


def checked(setting: str, value: Any) -> Any:
    """One setting's value as `Settings` keeps it.

    Raises:
        ValueError: the value is not accepted.
    """
    return _CHECKS[setting](value) if setting in _CHECKS else value


def unknown_key(key: str, known: Mapping[str, Any] | tuple[str, ...], shown: str = "") -> ValueError:
    """The error for an unknown key, with the nearest key in `known`; `shown` is the key with its place in the YAML."""
    near = difflib.get_close_matches(key, list(known), n=1, cutoff=0.0)
    return ValueError(f"unknown key {(shown or key)!r}; the nearest valid key is {near[0]!r}")
