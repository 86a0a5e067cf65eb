"""All defaults, environment variables and checks of settings. Standard library only, because `ktft --help` loads it."""

from __future__ import annotations

import difflib
import operator
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
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
LANE_BYTES = 3 << 29
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


def _check_gpu_expert_memory(value: Any) -> int | str | None:
    """A text is a size as a person writes it; a whole number is a number of bytes."""
    if value is None or value == "auto":
        return value
    if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return value
    if not isinstance(value, str):
        raise ValueError(f"gpu_expert_memory is {value!r}; {_GPU_EXPERT_MEMORY}")
    try:
        return parse_size(value)
    except ValueError as error:
        raise ValueError(f"gpu_expert_memory is {value!r}; {_GPU_EXPERT_MEMORY} ({error})") from None


_GPU_EXPERT_MEMORY = "give a size, for instance 8G, or auto, or 0"


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
    "gpu_expert_memory": _check_gpu_expert_memory,
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


_KT_FORMATS = {"amxbf16": "bf16", "amxint8": "int8", "amxfp8": "fp8", "amxint4": "k4", "rawint4": "int4"}
"""KTransformers' names of formats -> the nearest of `EXPERT_FORMATS`. FP8 and MXFP4 have the same names here."""
_AMXINT4 = {"amxint4": "becomes k4: also 4 bits, with a scale for each 32 inputs and not one a row, so more accurate"}


def _format(value: Any) -> str | None:
    name = str(value).lower()
    if name == "auto":
        return None
    name = _KT_FORMATS.get(name, name)
    if name not in EXPERT_FORMATS:
        raise ValueError(f"{value!r} is not a supported expert format; supported: {', '.join(EXPERT_FORMATS)}")
    return name


def _written_size(value: Any) -> Any:
    """Turns a number into text, so that `parse_size` checks its unit: a person who writes 8 in YAML forgot the unit."""
    return str(value) if isinstance(value, int) and not isinstance(value, bool) and value > 0 else value


def _one_node_if_false(value: Any) -> int | None:
    if not isinstance(value, bool):
        raise ValueError(f"{value!r} is neither true nor false")
    return None if value else 1


def _only(accepted: Any, cure: str) -> Callable[[Any], None]:
    """A converter for keys that accept one value only. The value sets nothing in ktft."""

    def convert(value: Any) -> None:
        if value != accepted or isinstance(value, bool) != isinstance(accepted, bool):
            raise ValueError(f"{value!r} is not supported; {cure}")

    return convert


def _refused(cure: str) -> Callable[[Any], None]:
    def convert(value: Any) -> None:
        raise ValueError(cure)

    return convert


@dataclass(frozen=True)
class KtKey:
    """What one key does in ktft.

    Attributes:
        setting: the setting that the key sets; None if it sets nothing.
        convert: turns the key's value into the setting's value; a result of None sets nothing.
        note: why the key has no effect; empty if it has one.
        remarks: lower-case values whose meaning here differs -> what the user is told about it.
    """

    setting: str | None = None
    convert: Callable[[Any], Any] = lambda value: value
    note: str = ""
    remarks: Mapping[str, str] = field(default_factory=dict)


_ELSEWHERE = "set {} at the top level of the YAML, where LLaMA-Factory reads it"
_ONE_PACKING = "one packed copy serves forward and backward"
_BY_MEMORY = (
    "experts that stay on the GPU are chosen by memory: set gpu_expert_memory to a size, for instance 8G, or auto"
)
_DENSE_LORA = "ktft has no dense LoRA experts; LoRA goes on the routed experts themselves"

KT_KEYS: dict[str, KtKey] = {
    **{name: KtKey(name) for name in SETTINGS},
    "gpu_expert_memory": KtKey("gpu_expert_memory", _written_size),
    "gpu_memory": KtKey("gpu_memory", _written_size),
    # These keys of KTransformers have a meaning in ktft.
    "kt_expert_weight_format": KtKey("expert_format", _format, remarks=_AMXINT4),
    "kt_backend": KtKey("expert_format", _format, remarks=_AMXINT4),
    "kt_num_threads": KtKey("threads"),
    "kt_threadpool_count": KtKey("numa_nodes"),
    "kt_tp_enabled": KtKey("numa_nodes", _one_node_if_false),
    "kt_activation_policy": KtKey("activation"),
    "kt_cpu_activation": KtKey("activation"),
    "kt_expert_checkpoint_path": KtKey("expert_checkpoint"),
    "kt_weight_path": KtKey("expert_checkpoint"),
    "cpu_infer": KtKey("threads"),
    # These keys accept one value, which is what ktft does in any case.
    "enabled": KtKey(None, _only(True, "to train without ktft set use_kt: false")),
    "kt_skip_expert_loading": KtKey(None, _only(True, "ktft always loads the experts itself; remove the key")),
    "kt_num_gpu_experts": KtKey(None, _only(0, _BY_MEMORY)),
    "kt_train_mode": KtKey(None, _only("lora", "ktft trains LoRA; set it to lora")),
    "kt_full_weight_grad": KtKey(None, _only(False, "ktft keeps expert weights frozen; set it to false")),
    "kt_use_lora_experts": KtKey(None, _only(False, f"{_DENSE_LORA}; set it to false and use lora_target: all")),
    # These are LoRA's own settings, which LLaMA-Factory keeps out of kt_config too.
    "kt_lora_rank": KtKey(None, _refused(_ELSEWHERE.format("lora_rank"))),
    "kt_lora_alpha": KtKey(None, _refused(_ELSEWHERE.format("lora_alpha"))),
    "kt_lora_dropout": KtKey(None, _refused(_ELSEWHERE.format("lora_dropout"))),
    "lora_rank": KtKey(note="the rank is lora_rank at the top level of the YAML"),
    # These keys have no effect in ktft.
    "kt_lora_expert_num": KtKey(note=_DENSE_LORA),
    "kt_lora_expert_intermediate_size": KtKey(note=_DENSE_LORA),
    "kt_weight_lifecycle": KtKey(note="packed experts live as long as the model"),
    "kt_share_backward_bb": KtKey(note=_ONE_PACKING),
    "kt_share_cache_pool": KtKey(note="activations belong to autograd; nothing is pooled"),
    "kt_max_cache_depth": KtKey(note="activations belong to autograd; no depth to set"),
    "kt_force_fused_expert_lora": KtKey(note="expert LoRA is always fused"),
    "kt_model_max_length": KtKey(note="buffers grow with the batch; no length to set"),
    "kt_non_expert_weight_path": KtKey(note="all other weights come from model_name_or_path"),
    "kt_wrap_fn": KtKey(note="experts are wrapped by ktft"),
    "kt_wrap_kwargs": KtKey(note="experts are wrapped by ktft"),
    "kt_checkpoint_files": KtKey(note="shards are found from model_name_or_path"),
    "kt_sharded_metadata": KtKey(note="shards are found from model_name_or_path"),
    "kt_optimize_rule": KtKey(note="placement needs no rule file"),
    "chunk_size": KtKey(note="no chunk size to set"),
    "mode": KtKey(note="there is one mode"),
    "kt_mode": KtKey(note="there is one mode"),
    "kt_maxlen": KtKey(note="buffers grow with the batch; no length to set"),
    "kt_use_cuda_graph": KtKey(note="CUDA graphs are not used in training"),
    "kt_force_think": KtKey(note="the chat template decides"),
}
"""Every key of `kt_config`: ktft's own, and those of KTransformers' integration from its first to its newest."""

TOP_LEVEL_KEYS = (
    "kt_weight_path",
    "kt_expert_checkpoint_path",
    "kt_use_lora_experts",
    "kt_lora_expert_num",
    "kt_lora_expert_intermediate_size",
)
"""Keys of `KT_KEYS` that LLaMA-Factory itself reads from the top level of the YAML."""


def parse_kt_config(
    kt_config: Mapping[str, Any], top_level: Mapping[str, Any] | None = None
) -> tuple[Settings, list[str]]:
    """Turn the YAML's `kt_config` mapping, and the `TOP_LEVEL_KEYS` beside it, into settings.

    Values that are None count as absent.

    Returns:
        The settings, and one line for each key that has no effect or whose value means something else here.

    Raises:
        ValueError: an unknown key (naming the nearest valid one), a value that is not accepted, or two keys that set
            the same setting to different values.
    """
    given = [(f"kt_config.{key}", str(key), value) for key, value in kt_config.items()]
    given += [(key, key, value) for key, value in (top_level or {}).items()]
    chosen: dict[str, tuple[str, Any]] = {}
    notes: list[str] = []
    for shown, key, value in given:
        if key not in KT_KEYS:
            raise unknown_key(key, KT_KEYS, shown)
        if value is None:
            continue
        row = KT_KEYS[key]
        try:
            converted = row.convert(value)
            if row.setting is not None and converted is not None:
                converted = checked(row.setting, converted)
        except ValueError as error:
            raise ValueError(f"{shown}: {error}") from None
        if row.note:
            notes.append(f"{shown} has no effect: {row.note}")
        if remark := row.remarks.get(str(value).lower()):
            notes.append(f"{shown}: {value} {remark}")
        if row.setting is None or converted is None:
            continue
        other, earlier = chosen.setdefault(row.setting, (shown, converted))
        if earlier != converted:
            raise ValueError(
                f"{other} sets {row.setting} to {earlier!r}, {shown} sets it to {converted!r}; keep one of them"
            )
    return Settings(**{setting: value for setting, (_, value) in chosen.items()}), notes
