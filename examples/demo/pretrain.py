"""Stage 3: a small DeepSeek-V3, pretrained from scratch with plain torch and transformers."""

from __future__ import annotations

import math
import time
from pathlib import Path
from typing import Any

import torch
from scale import Recipe
from torch import Tensor
from tqdm import tqdm
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM, PreTrainedTokenizerFast


def model_config(tokenizer: PreTrainedTokenizerFast, **overrides: Any) -> DeepseekV3Config:
    """DeepSeek-V3 in miniature: latent attention, a dense first layer, a shared expert, grouped routing."""
    small: dict[str, Any] = {
        "hidden_size": 128,
        "num_hidden_layers": 4,
        "intermediate_size": 256,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "q_lora_rank": 64,
        "kv_lora_rank": 32,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 16,
        "v_head_dim": 32,
        "first_k_dense_replace": 1,
        "moe_intermediate_size": 64,
        "n_routed_experts": 32,
        "num_experts_per_tok": 4,
        "n_shared_experts": 1,
        "n_group": 4,
        "topk_group": 2,
        "topk_method": "noaux_tc",  # as in the released config.json: how other programs know the router's bias
        "routed_scaling_factor": 2.0,
        "max_position_embeddings": 1024,
    }
    return DeepseekV3Config(
        vocab_size=math.ceil(len(tokenizer) / 64) * 64,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        **(small | overrides),
    )


class LoadBalancer:
    """DeepSeek-V3's balancing without an auxiliary loss: a bias per expert that only the choice of experts sees."""

    def __init__(self, model: DeepseekV3ForCausalLM) -> None:
        """Counts, from now on, the tokens that each layer sends to each expert."""
        self.layers = [layer.mlp for layer in model.model.layers if hasattr(layer.mlp, "experts")]
        self.loads = [torch.zeros(mlp.n_routed_experts) for mlp in self.layers]
        self.hooks = [
            mlp.experts.register_forward_pre_hook(lambda _, args, load=load: self._count(args[1], load))
            for mlp, load in zip(self.layers, self.loads, strict=True)
        ]

    @staticmethod
    def _count(top_k_index: Tensor, load: Tensor) -> None:
        load += torch.bincount(top_k_index.flatten(), minlength=load.numel())

    @property
    def imbalance(self) -> float:
        """Load of the busiest expert over the mean, the worst layer's, since the last `step`."""
        return max(float(load.max() / load.mean()) for load in self.loads)

    def step(self, speed: float) -> None:
        """Makes overloaded experts less and underloaded ones more likely, then forgets the counts."""
        for mlp, load in zip(self.layers, self.loads, strict=True):
            mlp.gate.e_score_correction_bias += speed * torch.sign(load.mean() - load)
            load.zero_()

    def remove(self) -> None:
        """Stops counting."""
        for hook in self.hooks:
            hook.remove()


def tokens(tokenizer: PreTrainedTokenizerFast, texts: list[str]) -> Tensor:
    """One stream [N] of token ids, each text between its bos and eos."""
    encodings = tokenizer.backend_tokenizer.encode_batch([tokenizer.bos_token + t + tokenizer.eos_token for t in texts])
    return torch.tensor([token for encoding in encodings for token in encoding.ids])


def windows_of(stream: Tensor, length: int) -> Tensor:
    """Consecutive windows [N / length, length] of a stream [N], its end left out."""
    return stream[: stream.numel() // length * length].view(-1, length)


def learning_rate(progress: float, recipe: Recipe) -> float:
    """Linear warm-up, then a cosine down to a twentieth; `progress` runs from 0 to 1."""
    cosine = 0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * min(progress, 1.0)))
    return recipe.learning_rate * min(1.0, (progress + 1e-3) / recipe.warmup) * cosine


def optimizer_for(model: torch.nn.Module, recipe: Recipe) -> torch.optim.Optimizer:
    """AdamW with no decay on norms and embeddings."""
    decayed = [p for n, p in model.named_parameters() if p.dim() > 1 and "embed" not in n]
    others = [p for n, p in model.named_parameters() if p.dim() <= 1 or "embed" in n]
    groups = [{"params": decayed, "weight_decay": recipe.weight_decay}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=recipe.learning_rate, betas=(0.9, 0.95), fused=True)


def pretrain(model: DeepseekV3ForCausalLM, stream: Tensor, recipe: Recipe) -> dict[str, Any]:
    """Trains `model` in place on windows of `stream`, each seen once per epoch in a seeded order."""
    generator = torch.Generator().manual_seed(recipe.seed)
    windows = windows_of(stream, recipe.sequence_length)
    epochs = math.ceil(recipe.steps * recipe.batch_size / len(windows))
    order = torch.cat([torch.randperm(len(windows), generator=generator) for _ in range(epochs)])
    optimizer, balancer = optimizer_for(model, recipe), LoadBalancer(model)
    started, progress, loss, imbalance, step = time.perf_counter(), 0.0, math.nan, math.nan, 0
    model.train()
    with tqdm(total=recipe.steps * recipe.batch_size * recipe.sequence_length, unit="tok", unit_scale=True) as bar:
        while progress < 1.0:
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(progress, recipe)
            batch = windows[order[step * recipe.batch_size : (step + 1) * recipe.batch_size]]
            output = model(input_ids=batch, labels=batch)
            output.loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            imbalance = balancer.imbalance
            balancer.step(recipe.bias_update_speed * (1.0 - progress))
            now = output.loss.item()
            loss = now if math.isnan(loss) else 0.95 * loss + 0.05 * now
            step += 1
            # On a slow machine the clock, not the step count, drives the schedule to its end.
            progress = max(step / recipe.steps, (time.perf_counter() - started) / recipe.max_seconds)
            bar.update(batch.numel())
            bar.set_postfix(loss=f"{loss:.3f}", imbalance=f"{imbalance:.2f}")
    balancer.remove()
    tokens_seen = step * recipe.batch_size * recipe.sequence_length
    return {"steps": step, "tokens": tokens_seen, "loss": loss, "imbalance": imbalance}


@torch.no_grad()
def heldout_loss(model: DeepseekV3ForCausalLM, stream: Tensor, recipe: Recipe, batches: int = 16) -> float:
    """Mean loss over the first windows of `stream`."""
    model.eval()
    split = windows_of(stream, recipe.sequence_length).split(recipe.batch_size)[:batches]
    losses = [model(input_ids=batch, labels=batch).loss.item() for batch in split]
    return sum(losses) / len(losses)


def save(model: DeepseekV3ForCausalLM, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Writes a bf16 checkpoint as DeepSeek publishes them: per-expert names, the router's bias in fp32."""
    biases = {name: buffer.clone() for name, buffer in model.named_buffers() if name.endswith("correction_bias")}
    torch.nn.Module.to(model, torch.bfloat16)
    for name, bias in biases.items():
        module, _, leaf = name.rpartition(".")
        model.get_submodule(module).register_buffer(leaf, bias)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def build(
    tokenizer: PreTrainedTokenizerFast,
    train: list[str],
    heldout: list[str],
    folder: Path,
    recipe: Recipe,
    **overrides: Any,
) -> dict[str, Any]:
    """Creates, pretrains and saves the model; `overrides` change its configuration."""
    torch.manual_seed(recipe.seed)
    model = DeepseekV3ForCausalLM(model_config(tokenizer, **overrides))
    model.set_experts_implementation("grouped_mm")  # the fastest of transformers' on CPU
    figures: dict[str, Any] = {"parameters": sum(p.numel() for p in model.parameters())}
    figures |= pretrain(model, tokens(tokenizer, train), recipe)
    figures["heldout_loss"] = heldout_loss(model, tokens(tokenizer, heldout), recipe)
    save(model, tokenizer, folder)
    return figures
