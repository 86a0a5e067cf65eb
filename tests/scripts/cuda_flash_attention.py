"""Train with LLaMA-Factory's `flash_attn: fa2` and `sdpa`, and compare the logged losses.

    python tests/scripts/cuda_flash_attention.py [STEPS]

Needs a GPU and a transformers whose flash attention works, such as 5.5.4. Where the package flash-attn is not
installed, a stand-in has its interface and calls torch's own FlashAttention-2 kernels. Exits 1 if a loss differs by
more than the tolerance, or if `fa2` never called the kernels.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import textwrap
from pathlib import Path

import yaml

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from tiny import factory_settings, write_checkpoint, write_data

TOLERANCE = 0.01  # relative, for the loss of every logged step
STAND_IN = textwrap.dedent('''
    """flash_attn's interface before torch's FlashAttention-2 kernels."""
    import os, torch
    __version__ = "2.8.3"
    forward = torch.ops.aten._flash_attention_forward

    def grouped(q, k, v):
        times = q.shape[-2] // k.shape[-2]
        with open(os.environ["FLASH_CALLS"], "a") as calls:
            calls.write("x")
        return q, k.repeat_interleave(times, -2), v.repeat_interleave(times, -2)

    def flash_attn_func(q, k, v, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1),
                        softcap=0.0, alibi_slopes=None, deterministic=False, return_attn_probs=False):
        q, k, v = grouped(q, k, v)
        return forward(q, k, v, None, None, q.shape[1], k.shape[1], dropout_p, causal, False, scale=softmax_scale)[0]

    def flash_attn_varlen_func(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p=0.0,
                               softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0,
                               alibi_slopes=None, deterministic=False, return_attn_probs=False, block_table=None):
        q, k, v = grouped(q, k, v)
        return forward(q, k, v, cu_seqlens_q, cu_seqlens_k, int(max_seqlen_q), int(max_seqlen_k), dropout_p, causal,
                       False, scale=softmax_scale)[0]

    def flash_attn_with_kvcache(*args, **kwargs):
        raise NotImplementedError
''')
PADDING = """
from transformers.modeling_flash_attention_utils import _pad_input as pad_input
from transformers.modeling_flash_attention_utils import _unpad_input as unpad_input
"""


def stand_in(folder: Path) -> None:
    """Write the package with its metadata, by which transformers finds it."""
    package, info = folder / "flash_attn", folder / "flash_attn-2.8.3.dist-info"
    package.mkdir()
    info.mkdir()
    (package / "__init__.py").write_text(STAND_IN)
    (package / "bert_padding.py").write_text(PADDING)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: flash-attn\nVersion: 2.8.3\n")
    (info / "top_level.txt").write_text("flash_attn\n")
    (info / "RECORD").write_text("flash_attn/__init__.py,,\n")


def losses(settings: dict[str, object], folder: Path, environment: dict[str, str]) -> list[float]:
    """The losses that LLaMA-Factory logged."""
    path = folder / "train.yaml"
    path.write_text(yaml.safe_dump(settings))
    command = [sys.executable, "-m", "llamafactory.cli", "train", str(path)]
    subprocess.run(command, env=os.environ | environment, check=True)
    lines = (Path(str(settings["output_dir"])) / "trainer_log.jsonl").read_text().splitlines()
    return [entry["loss"] for entry in map(json.loads, lines) if entry.get("loss") is not None]


def main() -> None:
    steps = int(sys.argv[1]) if len(sys.argv) > 1 else 20
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        calls = folder / "calls"
        environment = {"FLASH_CALLS": str(calls), "HF_HUB_OFFLINE": "1"}
        real = importlib.util.find_spec("flash_attn") is not None
        if not real:
            (folder / "site").mkdir()
            stand_in(folder / "site")
            paths = [str(folder / "site"), os.environ.get("PYTHONPATH", "")]
            environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
        model, data = write_checkpoint("qwen3moe", folder / "model"), write_data(folder / "data")
        found = {}
        for way in ("sdpa", "fa2"):
            settings = factory_settings(
                model, data, folder / way, use_cpu=False, bf16=True, flash_attn=way, max_steps=steps, logging_steps=1,
                learning_rate=1e-3, per_device_train_batch_size=4, lora_rank=8, save_strategy="no", seed=1,
            )  # fmt: skip
            found[way] = losses(settings, folder, environment)
        worst = max(abs(b - a) / a for a, b in zip(found["sdpa"], found["fa2"], strict=True))
        called = len(calls.read_text()) if calls.exists() else 0
    package = "flash-attn" if real else f"a stand-in with torch's kernels, called {called:,} times"
    print(f"{steps} steps, {package}: loss {found['fa2'][0]:.4f} to {found['fa2'][-1]:.4f}")
    print(f"largest difference to sdpa {worst:.3%}, tolerance {TOLERANCE:.0%}")
    sys.exit(worst > TOLERANCE or not (real or called))


if __name__ == "__main__":
    main()
