"""SGLang's own classes with ktft's model for a GPU, for which the CPU stands in: `python sglang_hybrid.py DIRECTORY`.

A script, since SGLang loads a model once in a process. Requests of two adapters and the base share a batch; each must
get what transformers computes. Exits 1 otherwise.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from unittest.mock import patch

import torch

TARGETS = {1: "all-linear", 2: ["experts", "o_proj"]}


def main(folder: Path) -> int:
    from adapters import random_adapter
    from effects import expected
    from sglang_process import IDS, runner
    from tiny import write_checkpoint

    from ktft.serve.runtime.hybrid_experts import HybridModel
    from ktft.serve.runtime.placed_lora import PlacedLora
    from ktft.serve.runtime.served_model import current
    from ktft.serve.sglang.lora_linear import slots_of

    base = write_checkpoint("qwen3moe", folder / "base", head_dim=32)
    adapters = [random_adapter(base, folder / str(i), seed=i, target_modules=t) for i, t in TARGETS.items()]
    wanted = [expected(base), *(expected(base, adapter) for adapter in adapters)]
    with (
        patch("ktft.serve.sglang.loader.ACCELERATORS", ("cpu",)),
        runner(base, max_lora_rank=8, max_adapters=2, gpu_expert_memory=1 << 20) as served,
    ):
        model = current()
        assert isinstance(model, HybridModel) and model.hot is not None
        assert {type(slot) for slot in slots_of(served.model).values()} == {PlacedLora}
        for number, adapter in enumerate(adapters, start=1):
            served.load(number, adapter)
        asked = [(IDS[:count], adapter) for count in range(1, len(IDS)) for adapter in range(len(wanted))]
        found = served.next_logprobs(asked).view(len(IDS) - 1, len(wanted), -1)
        after = torch.tensor(IDS[1:])[:, None]
        mine = [found[:, place].gather(1, after)[:, 0] for place in range(len(wanted))]
        errors = [float((a - b).norm() / b.norm()) for a, b in zip(mine, wanted, strict=True)]
        few = served.next_logprobs([(IDS[:4], 2), (IDS[:3], 0), (IDS[:5], 1)])  # as many tokens as a graph may have
        rows = found[3, 2], found[2, 0], found[4, 1]
        errors += [float((a - b).abs().max()) for a, b in zip(few, rows, strict=True)]
    print("errors", [round(error, 4) for error in errors])
    return int(max(errors) > 0.02)


if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).parents[1])]
    os.environ["SGLANG_USE_CPU_ENGINE"] = "1"
    sys.exit(main(Path(sys.argv[1])))
