"""Families that have neither a row nor a test: each trains as stock transformers does, or is refused in one line.

Every model in the installed transformers that has routed experts and no row gets a tiny random checkpoint. ktft loads
it with what it derives, LoRA on the experts trains some steps beside stock experts with the same LoRA, and the adapter
is saved and loaded again. Prints a table; anything but a match or a refusal in one line is wrong.

    python tests/scripts/blind_families.py [NAME ...]
"""

from __future__ import annotations

import logging
import re
import sys
import tempfile
import traceback
import warnings
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
import transformers
from blind import CASES, config_of, load_stock, make
from peft import LoraConfig
from stock import IDS, VISION, same_choices
from torch import Tensor, nn
from torch.nn.utils import parametrize
from transformers import PreTrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES, model_type_to_module_name

import ktft
from ktft.adapters.lora import KtftExpertsLora
from ktft.checkpoint.families import FAMILIES
from ktft.config import PROJECTIONS
from ktft.model.experts import find_experts, is_transposed

STEPS = 20
LOGITS, LOSS = 0.02, 0.02


def unlisted() -> list[str]:
    """Folders of transformers' models with a class of experts and without a row."""
    folders = Path(transformers.__file__).parent / "models"
    known = {model_type_to_module_name(each) for each in CONFIG_MAPPING_NAMES if each in FAMILIES}
    return sorted(
        path.parent.name
        for path in folders.glob("*/modeling_*.py")
        if re.search(r"class \w*Experts\b", path.read_text()) and path.parent.name not in known
    )


class Merged(nn.Module):
    """A stock tensor of experts with LoRA in it: gate and up, or down."""

    def __init__(self, layer: KtftExpertsLora, names: tuple[str, ...], transposed: bool, scaling: float) -> None:
        super().__init__()
        self.names, self.transposed, self.scaling = names, transposed, scaling
        for kind in ("lora_A", "lora_B"):
            for name in names:
                tensor = layer.stacked(kind, "default")[name].detach().clone()
                self.register_parameter(f"{kind}_{name}", nn.Parameter(tensor))

    def forward(self, weight: Tensor) -> Tensor:
        a, b = ([getattr(self, f"{kind}_{name}") for name in self.names] for kind in ("lora_A", "lora_B"))
        delta = self.scaling * torch.cat([second @ first for first, second in zip(a, b, strict=True)], dim=1)
        return weight + (delta.mT if self.transposed else delta)


def farthest(stock: nn.Module, mine: nn.Module, own: list[nn.Parameter]) -> float:
    """How far apart the losses of some steps are at most. `own` are the stock model's trained parameters."""
    trained = own, [parameter for parameter in mine.parameters() if parameter.requires_grad]
    optimizers = [torch.optim.AdamW(parameters, lr=2e-3) for parameters in trained]
    worst = 0.0
    for _ in range(STEPS):
        found = []
        for model, optimizer in zip((stock, mine), optimizers, strict=True):  # the choices are those of the first
            loss = loss_of(model)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(float(loss))
        worst = max(worst, abs(found[0] - found[1]))
    return worst


def logits_of(model: nn.Module) -> Tensor:
    """The logits of `IDS`."""
    given = {"decoder_input_ids": IDS} if model.config.is_encoder_decoder else {}
    found: Tensor = model(input_ids=IDS, use_cache=False, **given).logits
    return found.float()


def loss_of(model: nn.Module) -> Tensor:
    """The loss of the next token."""
    return nn.functional.cross_entropy(logits_of(model)[:, :-1].flatten(0, 1), IDS[:, 1:].flatten())


def compare(path: Path, config: PreTrainedConfig) -> tuple[float, float, int]:
    """Relative difference of logits, the most of the losses, and how many modules got LoRA beside the experts.

    Raises:
        AssertionError: something is wrong.
    """
    stock, mine = load_stock(path, config), load_stock(path, config, ktft.KtftConfig(expert_format="bf16", threads=1))
    same_choices(stock, mine, list(find_experts(mine)))
    with torch.no_grad():
        expected, actual = logits_of(stock), logits_of(mine)
    apart = float((actual - expected).norm() / expected.norm())
    torch.manual_seed(0)
    adapted: Any = ktft.get_peft_model(mine, LoraConfig(r=4, lora_alpha=8, target_modules=["experts"]))
    loss_of(stock).backward()
    # What has no gradient in a model this small, though it is computed with
    without = {
        n.removesuffix(".weight") for n, p in stock.named_parameters() if p.grad is not None and not p.grad.any()
    }
    stock.requires_grad_(False)
    own: list[nn.Parameter] = []
    for name, layer in adapted.base_model.model.named_modules():
        if isinstance(layer, KtftExpertsLora):
            module = stock.get_submodule(name)
            for tensor, names in (("gate_up_proj", PROJECTIONS[:2]), ("down_proj", PROJECTIONS[2:])):
                merged = Merged(layer, names, is_transposed(module), 2.0)
                parametrize.register_parametrization(module, tensor, merged)
                own += merged.parameters()
    worst = farthest(stock.train(), adapted.train(), own)
    with tempfile.TemporaryDirectory() as folder:
        adapted.save_pretrained(folder)
        again = ktft.load_adapter(load_stock(path, config, ktft.KtftConfig(expert_format="bf16", threads=1)), folder)
    found = {name: parameter for name, parameter in again.named_parameters() if "lora" in name}
    kept = {name: parameter for name, parameter in adapted.named_parameters() if "lora" in name}
    assert found.keys() == kept.keys() and all(torch.equal(found[name], kept[name]) for name in kept), "other adapter"
    everywhere: Any = load_stock(path, config, ktft.KtftConfig(expert_format="bf16", threads=1))
    assert find_experts(everywhere)
    anywhere = LoraConfig(r=4, target_modules="all-linear", exclude_modules=VISION, init_lora_weights=False)
    everywhere = ktft.get_peft_model(everywhere, anywhere)
    loss_of(everywhere).backward()
    trained = {name: p for name, p in everywhere.named_parameters() if p.requires_grad}
    idle = {name for name, p in trained.items() if (p.grad is None or not p.grad.any()) and "lora_A" in name}
    idle = {name for name in idle if not re.search("visual|vision|audio|image|encoder|projector", name)}
    idle = {name for name in idle if name.partition(".lora_A")[0].removeprefix("base_model.model.") not in without}
    assert not idle, f"without a gradient: {sorted(idle)[:4]}"
    return apart, worst, len(trained)


def examine(name: str) -> tuple[bool, str]:
    """Whether all is well with a family, and what to say of it."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder)
        try:
            config = config_of(name)
            make(config, path)
        except Exception as error:
            return False, f"no tiny checkpoint: {type(error).__name__}: {str(error)[:300]}"
        try:
            load_stock(path, config, ktft.KtftConfig(expert_format="bf16", threads=1))
        except ValueError as error:
            return "\n" not in str(error) and "ktft" in str(error), f"refused: {error}"
        except Exception as error:
            return False, "".join(traceback.format_exception(error)[-3:])
        try:
            apart, worst, count = compare(path, config)
        except Exception as error:
            return False, "".join(traceback.format_exception(error)[-3:])
    return apart <= LOGITS and worst <= LOSS, f"trains | {apart:.2%} | {worst:.4f} | {count}"


if __name__ == "__main__":
    warnings.filterwarnings("ignore")
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    logging.disable(logging.WARNING)
    wanted = sys.argv[1:] or unlisted()
    right = True
    for name in wanted:
        if name not in CASES:
            print(f"WRONG | {name} | no case", flush=True)
            right = False
            continue
        well, text = examine(name)
        right &= well
        print(f"{'ok' if well else 'WRONG'} | {name} | {text}", flush=True)
    sys.exit(not right)
