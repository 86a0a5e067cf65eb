"""A checkpoint of a real model's layers with random weights and a tokenizer, for servers to load."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from benchmarks.cases import Shape
from benchmarks.step.models import empty_model, fill

VOCABULARY = 32768
END, PAD = "<end>", "<pad>"
CHAT_TEMPLATE = "{% for m in messages %}{{ m['content'] }}{% endfor %}"


def write_checkpoint(shape: Shape, layers: int, path: Path) -> Path:
    """Write `layers` of `shape` in bf16, all with routed experts. Returns `path`."""
    model: Any = empty_model(shape, layers, VOCABULARY)
    fill(model)
    tokenizer = _tokenizer()
    model.config.use_cache = True
    model.config.eos_token_id = model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.config.pad_token_id = model.generation_config.pad_token_id = tokenizer.pad_token_id
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


def describe(path: Path) -> tuple[int, int]:
    """Layers and vocabulary size of a checkpoint. Raises ValueError if it is none."""
    if not (path / "config.json").is_file():
        raise ValueError(f"{path} is not a directory with a config.json")
    config = json.loads((path / "config.json").read_bytes())
    config = config.get("text_config", config)
    return config["num_hidden_layers"], config["vocab_size"]


def _tokenizer() -> PreTrainedTokenizerFast:
    """A word for each number: `w7` is token 7."""
    words = [PAD, END, *(f"w{number}" for number in range(2, VOCABULARY))]
    raw = Tokenizer(models.WordLevel(vocab={word: number for number, word in enumerate(words)}, unk_token=PAD))
    raw.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    raw.add_special_tokens([PAD, END])
    fast = PreTrainedTokenizerFast(tokenizer_object=raw, eos_token=END, pad_token=PAD)
    fast.chat_template = CHAT_TEMPLATE
    return fast
