"""The models whose steps are timed: transformers' own, with quickly filled random weights and routing from a table."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from transformers import DeepseekV2Config, DeepseekV2ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM
from transformers.initialization import no_init_weights
from transformers.modeling_utils import local_torch_dtype

from benchmarks.cases import Case, Shape
from benchmarks.layers import make_index
from benchmarks.step.cases import LORA_ATTENTION, VOCABULARY, Job
from ktft import native
from ktft.adapters.linear import shorten
from ktft.adapters.peft import get_peft_model as get_ktft_peft_model
from ktft.config import PROJECTIONS
from ktft.model.experts import expert_modules
from ktft.model.generic import family_of
from ktft.model.load_plan import swap_experts
from ktft.ranks.launch import Launch

SCALE = 0.02  # standard deviation of weights
DISTINCT = 4  # different packed matrices of each projection in a layer; each is copied to several experts' addresses
BLOCK = 1 << 22  # the number of random values that a parameter repeats
LONGEST = 32768


def make_config(shape: Shape, layers: int, vocabulary: int = VOCABULARY) -> Any:
    """The configuration of a model whose every layer has experts."""
    common: dict[str, Any] = {
        "vocab_size": vocabulary,
        "hidden_size": shape.hidden_size,
        "moe_intermediate_size": shape.intermediate_size,
        "num_hidden_layers": layers,
        "num_experts_per_tok": shape.top_k,
        "max_position_embeddings": LONGEST,
        "use_cache": False,
    }
    if shape.name == "deepseek-v2-lite":
        return DeepseekV2Config(
            **common,
            intermediate_size=10944,
            num_attention_heads=16,
            num_key_value_heads=16,
            n_routed_experts=shape.num_experts,
            n_shared_experts=2,
            first_k_dense_replace=0,
            q_lora_rank=None,
            kv_lora_rank=512,
            qk_nope_head_dim=128,
            qk_rope_head_dim=64,
            v_head_dim=128,
            n_group=1,
            topk_group=1,
            topk_method="greedy",
        )
    heads = max(1, shape.hidden_size // 64)
    config: Any = Qwen3MoeConfig(
        **common,
        intermediate_size=3 * shape.hidden_size,
        num_experts=shape.num_experts,
        num_attention_heads=heads,
        num_key_value_heads=max(1, heads // 8),
        norm_topk_prob=True,
    )
    config.head_dim = 128 if heads > 1 else 64
    return config


def empty_model(shape: Shape, layers: int, vocabulary: int = VOCABULARY) -> Any:
    """The model in bf16 on the default device. Its parameters are uninitialized, and their memory is untouched."""
    config = make_config(shape, layers, vocabulary)
    config._attn_implementation, config._experts_implementation = "sdpa", "grouped_mm"
    classes = {"qwen3_moe": Qwen3MoeForCausalLM, "deepseek_v2": DeepseekV2ForCausalLM}
    with local_torch_dtype(torch.bfloat16), no_init_weights():
        return classes[config.model_type](config)


@torch.no_grad()
def fill(model: nn.Module) -> None:
    """Fill matrices with random values and vectors (of norms) with ones. Each matrix repeats a rotated block."""
    for number, parameter in enumerate(model.parameters()):
        if parameter.dim() < 2:
            parameter.fill_(1)
            continue
        flat = parameter.view(-1)
        block = torch.randn(min(BLOCK, flat.numel()), dtype=parameter.dtype, device=parameter.device) * SCALE
        block = block.roll(number)
        for begin in range(0, flat.numel(), BLOCK):
            part = flat[begin : begin + BLOCK]
            part.copy_(block[: part.numel()])


def pack_some(layer: native.ExpertLayer) -> dict[tuple[int, str], Tensor]:
    """`DISTINCT` random experts: (number, projection) -> packed weight for `layer`."""
    few = native.ExpertLayer(
        layer.runtime,
        num_experts=DISTINCT,
        hidden_size=layer.hidden_size,
        intermediate_size=layer.intermediate_size,
        format=layer.format,
    )
    down = (layer.hidden_size, layer.intermediate_size)

    def pack(place: tuple[int, str]) -> Tensor:
        weight = torch.randn(down if place[1] == "down_proj" else down[::-1], dtype=torch.bfloat16) * SCALE
        few.load(*place, weight)
        return few.export_packed(*place)

    places = list(product(range(DISTINCT), PROJECTIONS))
    with ThreadPoolExecutor(layer.runtime.threads) as pool:
        return dict(zip(places, pool.map(pack, places), strict=True))


def fill_experts(layer: native.ExpertLayer) -> None:
    """Fill a layer with random experts. A few are packed and copied to the addresses of all."""
    packed = pack_some(layer)

    def place(expert: int) -> None:
        for name in PROJECTIONS:
            layer.import_packed(expert, name, packed[expert % DISTINCT, name])

    with ThreadPoolExecutor(layer.runtime.threads) as pool:
        list(pool.map(place, range(layer.num_experts)))


class SkippedExperts(nn.Module):
    """Replaces routed experts at no cost by returning the hidden states."""

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        return hidden_states


def stock_model(job: Job, device: torch.device) -> Any:
    """transformers' model on `device`, LoRA on attention alone."""
    with device:
        model = empty_model(job.shape, job.layers)
    fill(model)
    return attention_lora(model, job)


def skipped_model(job: Job, device: torch.device) -> Any:
    """The same model without experts."""
    model = empty_model(job.shape, job.layers)
    for _, name, _ in expert_modules(model, family_of(model)):
        model.set_submodule(name, SkippedExperts())
    model.to(device)
    fill(model)
    return attention_lora(model, job)


def ktft_model(job: Job, device: torch.device) -> Any:
    """The model with ktft's experts, LoRA on all that is linear, experts included."""
    model = empty_model(job.shape, job.layers)
    for module in swap_experts(model, family_of(model), job.settings()).values():
        fill_experts(module.layer)
    model.to(device)
    fill(model)
    config = LoraConfig(r=job.rank, lora_alpha=2 * job.rank, target_modules="all-linear")
    model = get_ktft_peft_model(model, config)
    shorten(model)
    return model


def attention_lora(model: Any, job: Job) -> Any:
    """peft's model with LoRA on attention's projections."""
    targets = list(LORA_ATTENTION[model.config.model_type])
    return get_peft_model(model, LoraConfig(r=job.rank, lora_alpha=2 * job.rank, target_modules=targets))


def set_checkpointing(model: Any, job: Job, use_reentrant: bool = True) -> None:
    """Gradient checkpointing as LLaMA-Factory switches it on."""
    model.train()
    if job.checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
        model.enable_input_require_grads()


def index_table(job: Job, layer: int, tokens: int, rank: int = 0) -> Tensor:
    """The experts of each token of a rank in a layer, `[T, k]` int64, the same for all runners of this model."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1000 + layer + 1000 * rank)
        return make_index(Case(job.shape, tokens, job.routing, job.format, job.rank))


def counts(job: Job, layer: int, tokens: int) -> list[int]:
    """The number of tokens, of all ranks, of each expert that rank 0 holds."""
    every = torch.cat([index_table(job, layer, tokens, rank) for rank in range(job.gpus)])
    found: list[int] = every.flatten().bincount(minlength=job.shape.num_experts).tolist()
    return found[:: job.gpus]


def fix_routing(model: nn.Module, job: Job, device: torch.device) -> None:
    """Make each experts module take its indices from `index_table`. The router's weights are kept.

    Micro-batches that go through a layer together have the table of one of them, once each.
    """
    modules = [module for name, module in model.named_modules() if name.endswith(".mlp.experts")]
    if len(modules) != job.layers:
        raise RuntimeError(f"{len(modules)} experts modules in {job.layers} layers")
    for layer, module in enumerate(modules):
        rank = Launch.of_environment().rank
        tables = {tokens: index_table(job, layer, tokens, rank).to(device) for tokens in job.tokens}
        module.register_forward_pre_hook(_replace_indices(tables))


def _replace_indices(tables: dict[int, Tensor]) -> Callable[[nn.Module, tuple[Any, ...]], tuple[Any, ...]]:
    def replace(module: nn.Module, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        hidden_states, index, weights = arguments
        rows = len(hidden_states)
        if rows not in tables:
            tokens = max(tokens for tokens in tables if rows % tokens == 0)
            tables[rows] = tables[tokens].repeat(rows // tokens, 1)
        return hidden_states, tables[rows].to(index.dtype), weights

    return replace
