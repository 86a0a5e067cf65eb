"""Verifies a whole model: logits and a gradient, with ktft's experts and with transformers' own.

Both runs share the weights around the experts, in fp32, so only the experts differ. The reference is transformers' own
experts modules, filled with given weights.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AutoConfig, AutoTokenizer

from ktft.adapters.lora import KtftExpertsLora
from ktft.adapters.peft import load_adapter
from ktft.checkpoint.encoded import Encoded
from ktft.checkpoint.families import Family
from ktft.checkpoint.load import ExpertPlan
from ktft.config import PROJECTIONS, Settings
from ktft.formats import FORMAT_TRAITS
from ktft.lora import ExpertLora
from ktft.model.calls import taking_the_usual_call
from ktft.model.experts import KtftExperts, expert_modules, find_experts, is_transposed, layer_number
from ktft.model.meta import auto_class, meta_model
from ktft.model.quantizer import KtftConfig
from ktft.native import ExpertLayer
from ktft.verify.contract import relative_error
from ktft.verify.layers import SEED
from ktft.verify.problem import Problem

ARITHMETIC_LIMIT = 0.02
"""The limit of the relative error of logits and gradient against transformers' experts with the same weights and
choices, unless bf16 alone gives a larger error."""

AMPLIFIED, NOISE = 5.0, 3.0
"""Factors of a limit: compared with the source's weights, logits may be off by the first times the format's typical
error of weights plus the second times the bf16 noise. Experts with unrelated weights are off by 100% and more."""


@dataclass(frozen=True)
class Distance:
    """The distance of logits and a gradient from the reference's.

    Attributes:
        logits: relative L2 error.
        kl: mean Kullback-Leibler divergence of the next token's distribution, in nats.
        top1: share of positions with the same likeliest token.
        gradient: relative L2 error of the loss's gradient with respect to the embeddings.
    """

    logits: float
    kl: float
    top1: float
    gradient: float


@dataclass(frozen=True)
class WholeResult:
    """The result for a whole model. In all comparisons but `free`, both models use the same experts, because a near tie
    that rounding decides differently moves logits more than everything else.

    Attributes:
        arithmetic: the distance from transformers' experts with the packed weights.
        layers: layer number -> relative error of its experts' output in that comparison.
        quantization: the distance from transformers' experts with the source's weights; None without a source.
        free: the same with each model choosing experts itself, as a user sees it. It has no limit.
        noise: the distance of transformers' model in bf16 from the same in fp32.
        arithmetic_limit, gradient_limit, quantization_limit: the limits of relative errors.
        problems: the comparisons over their limits.
    """

    arithmetic: Distance
    layers: dict[int, float]
    quantization: Distance | None
    free: Distance | None
    noise: Distance
    arithmetic_limit: float
    gradient_limit: float
    quantization_limit: float
    problems: list[Problem] = field(default_factory=list)


@dataclass
class ModelRun:
    """What a model makes of one sequence, in fp32; several are joined along the tokens.

    Attributes:
        logits: `[1, n, vocabulary]`.
        gradient: `[1, n, hidden]`, of the loss with respect to the embeddings.
    """

    logits: Tensor
    gradient: Tensor

    @classmethod
    def joined(cls, runs: Sequence[ModelRun]) -> ModelRun:
        """The runs of several sequences as one."""
        return cls(torch.cat([run.logits for run in runs], 1), torch.cat([run.gradient for run in runs], 1))

    def distance(self, exact: ModelRun) -> Distance:
        """How far this run is from the exact one, over all positions."""
        kl, top1 = divergence(self.logits, exact.logits)
        off = relative_error(self.gradient, exact.gradient)
        return Distance(relative_error(self.logits, exact.logits), kl, top1, off)


def divergence(logits: Tensor, exact: Tensor) -> tuple[float, float]:
    """The mean Kullback-Leibler divergence of the next token's distribution from that of `exact`, in nats, and the
    share of positions with the same likeliest token.
    """
    log_p, log_q = exact.log_softmax(-1), logits.log_softmax(-1)
    kl = F.kl_div(log_q, log_p, log_target=True, reduction="none").sum(-1).mean()
    return max(float(kl), 0.0), float((logits.argmax(-1) == exact.argmax(-1)).float().mean())


def verify_whole(
    directory: Path, settings: Settings, tokens: int, adapter: Path | None, source: ExpertPlan | None
) -> Iterator[str | WholeResult]:
    """Verify a whole model. Yields the name of each next step, and the result at the end.

    Args:
        directory, settings, adapter: see `ktft.verify.layers.LayerVerifier`.
        tokens: the length of the one random sequence that goes through the model.
        source: the experts' weights before packing, if they are known.

    Raises:
        ValueError: the checkpoint is damaged, or the adapter does not fit.
    """
    yield "loading the model"
    model = load_model(directory, settings, adapter)
    experts = find_experts(model)
    family = next(iter(experts.values())).family
    ids = random_tokens(model, tokens)
    choices = Choices(set(family.without_lora) - {family.router})
    yield "ktft's experts"
    with choices.recorded(model):
        own = run_model(model, ids)
    yield "transformers' experts, packed weights"
    stock = _put_stock(model, directory)
    for each in stock.values():
        each.load_packed()
        each.merge()
    modules = {number: each.module for number, each in stock.items()}
    with choices.replayed(model, modules):
        exact = run_model(model, ids)
    arithmetic, quantization, free = own.distance(exact), None, None
    if source is not None:
        yield "transformers' experts, the source's weights"
        for _ in source.load({number: cast(ExpertLayer, each) for number, each in stock.items()}):
            pass
        for each in stock.values():
            each.merge()
        free = own.distance(run_model(model, ids))
        with choices.replayed(model, modules):
            exact = run_model(model, ids)
        quantization = own.distance(exact)
    yield "transformers' experts in bf16"
    with choices.replayed(model.to(torch.bfloat16), modules):
        noise = run_model(model, ids).distance(exact)
    expert_format = next(iter(stock.values())).layer.format
    yield _judge(arithmetic, choices.errors, quantization, free, noise, expert_format)


def whole_bytes(layers: dict[int, ExpertLayer], directory: Path) -> int:
    """Memory that `verify_whole` needs: all weights in fp32 and the packed experts."""
    model = meta_model(AutoConfig.from_pretrained(directory))
    packed = sum(
        layer.num_experts * sum(layer.canonical_bytes(name) for name in layer.projections) for layer in layers.values()
    )
    return packed + 4 * sum(parameter.numel() for parameter in model.parameters())


def _judge(
    arithmetic: Distance,
    layers: dict[int, float],
    quantization: Distance | None,
    free: Distance | None,
    noise: Distance,
    expert_format: str,
) -> WholeResult:
    limit = max(ARITHMETIC_LIMIT, noise.logits)
    gradient_limit = max(ARITHMETIC_LIMIT, noise.gradient)
    allowed = AMPLIFIED * FORMAT_TRAITS[expert_format].error + NOISE * noise.logits
    problems = [
        Problem("whole model", "output of the experts in the whole model", error, limit, number)
        for number, error in sorted(layers.items())
        if not error <= limit
    ][:1]
    comparisons = [
        ("logits with the packed weights", arithmetic.logits, limit),
        ("gradient of the embeddings", arithmetic.gradient, gradient_limit),
        ("logits against the source's weights", quantization.logits if quantization else 0.0, allowed),
    ]
    problems += [Problem("whole model", name, error, most) for name, error, most in comparisons if not error <= most]
    return WholeResult(arithmetic, layers, quantization, free, noise, limit, gradient_limit, allowed, problems)


def load_model(directory: Path, settings: Settings, adapter: Path | None, dtype: torch.dtype = torch.float32) -> Any:
    """A checkpoint with ktft's experts and everything else in one dtype, with or without an adapter."""
    auto = auto_class(AutoConfig.from_pretrained(directory))
    quantization = KtftConfig.from_settings(settings)
    model = auto.from_pretrained(directory, dtype=dtype, quantization_config=quantization)
    if adapter is not None:
        model = load_adapter(model, adapter)
    return model.eval().requires_grad_(False)


def _put_stock(model: Any, directory: Path) -> dict[int, StockExperts]:
    """Replace ktft's experts by empty ones of transformers. Returns them by layer number."""
    lora = {name: module for name, module in model.named_modules() if isinstance(module, KtftExpertsLora)}
    bare = {name: m for name, m in find_experts(model).items() if name.removesuffix(".base_layer") not in lora}
    places: dict[str, tuple[KtftExperts, Any]] = {name: (module, None) for name, module in bare.items()}
    places |= {name: (module.experts, module.active_lora()) for name, module in lora.items()}
    family = next(iter(places.values()))[0].family
    own = meta_model(AutoConfig.from_pretrained(directory))
    modules = {name: own.get_submodule(name) for _, name, _ in expert_modules(own, family)}
    stock = {}
    for name, (experts, adapter) in places.items():
        each = StockExperts(modules[experts.layer.name], family, experts.layer, adapter)
        model.set_submodule(name, each.module)
        stock[layer_number(name)] = each
    return stock


def random_tokens(model: Any, tokens: int) -> Tensor:
    """Random token ids `[1, tokens]` without special tokens, such as those for images."""
    config = model.config
    special = {value for name, value in vars(config).items() if name.endswith("_token_id") and isinstance(value, int)}
    usable = torch.tensor([i for i in range(config.get_text_config().vocab_size) if i not in special])
    return usable[torch.randint(len(usable), (1, tokens), generator=torch.Generator().manual_seed(SEED))]


def prompt_tokens(directory: Path, prompts: Path, most: int) -> list[Tensor]:
    """Token ids `[1, n]` of each line of a text file, of which the first `most` are taken.

    Raises:
        OSError, ValueError: the file or the tokenizer cannot be read, or no line has two tokens.
    """
    tokenizer: Any = AutoTokenizer.from_pretrained(directory)
    lines = [line for line in prompts.read_text(encoding="utf-8").splitlines() if line.strip()]
    found = [tokenizer(line, return_tensors="pt").input_ids[:, :most] for line in lines]
    found = [ids for ids in found if ids.shape[1] >= 2]
    if not found:
        raise ValueError(f"{prompts} has no line of two tokens or more; give a prompt a line")
    return found


def logits_of(model: Any, ids: Tensor) -> Tensor:
    """The model's logits `[1, n, vocabulary]` in fp32 for tokens `[1, n]`."""
    logits: Tensor = model(input_ids=ids, use_cache=False).logits
    return logits.float()


def run_model(model: Any, ids: Tensor) -> ModelRun:
    """Logits, and the next-token loss's gradient with respect to the embeddings, in fp32."""
    leaves: list[Tensor] = []

    def keep(_: nn.Module, __: Any, output: Tensor) -> Tensor:
        leaves.append(output.detach().requires_grad_())
        return leaves[-1]

    handle = model.get_input_embeddings().register_forward_hook(keep)
    try:
        logits = logits_of(model, ids)
    finally:
        handle.remove()
    loss = F.cross_entropy(logits[0, :-1], ids[0, 1:])
    (gradient,) = torch.autograd.grad(loss, leaves[:1])
    return ModelRun(logits.detach(), gradient.float())


class Choices:
    """Records the experts that one run chose, so that another run uses the same, because rounding may tip a near tie.

    Routing weights are constants in both runs, so that both gradients are of the same function.

    Args:
        others: names of further modules that choose, whose outputs are repeated.
    """

    def __init__(self, others: set[str]) -> None:
        self.others = others
        self.errors: dict[int, float] = {}
        self._inputs: dict[int, tuple[Tensor, Tensor]] = {}
        self._outputs: dict[int, Tensor] = {}
        self._chosen: dict[str, Any] = {}

    @contextmanager
    def recorded(self, model: nn.Module) -> Iterator[None]:
        """Record the choices within the block, while ktft's experts run."""

        def before(number: int, args: Any) -> Any:
            self._inputs[number] = (args[1], args[2].detach())
            return args[0], *self._inputs[number]

        def after(number: int, output: Tensor) -> None:
            self._outputs[number] = output.detach()

        with self._hooked(model, outermost_experts(model), before, after, self._chosen.__setitem__):
            yield

    @contextmanager
    def replayed(self, model: nn.Module, experts: dict[int, nn.Module]) -> Iterator[None]:
        """Repeat the choices within the block, in experts by layer number. The first time, compare their outputs."""

        def before(number: int, args: Any) -> Any:
            index, weights = self._inputs[number]
            return args[0], index, weights.to(args[2].dtype)

        def after(number: int, output: Tensor) -> None:
            if number in self._outputs:
                self.errors[number] = relative_error(self._outputs.pop(number), output.detach())

        with self._hooked(model, experts, before, after, lambda name, _: self._chosen[name]):
            yield

    @contextmanager
    def _hooked(
        self, model: nn.Module, experts: dict[int, nn.Module], before: Any, after: Any, choose: Any
    ) -> Iterator[None]:
        with ExitStack() as stack:
            for number, module in experts.items():
                stack.callback(module.register_forward_pre_hook(lambda _, args, n=number: before(n, args)).remove)
                stack.callback(module.register_forward_hook(lambda _, __, out, n=number: after(n, out)).remove)
            for name, module in model.named_modules():
                # A linear layer that LoRA leaves alone chooses nothing: its output is the model's to compute
                if name.rpartition(".")[2] in self.others and not isinstance(module, nn.Linear):
                    stack.callback(module.register_forward_hook(lambda _, __, out, n=name: choose(n, out)).remove)
            yield


def outermost_experts(model: nn.Module) -> dict[int, nn.Module]:
    """Layer number -> experts, with the adapter around them if there is one."""
    found: dict[int, nn.Module] = {}
    for name, module in model.named_modules():
        if isinstance(module, (KtftExperts, KtftExpertsLora)):
            found.setdefault(layer_number(name), module)
    return found


class StockExperts:
    """One layer's stacked experts in fp32, taking weights as `ExpertLayer` does.

    Args:
        stacked: transformers' experts module, on meta.
        family: the model's.
        lora: the adapter that `merge` merges into the weights.
    """

    format = "fp32"

    def __init__(self, stacked: nn.Module, family: Family, layer: ExpertLayer, lora: ExpertLora | None) -> None:
        self.stacked = stacked.to_empty(device="cpu").float().requires_grad_(False).eval()
        self.module = taking_the_usual_call(self.stacked, family)
        self._interleaved = family.layouts[0].interleaved
        self.layer, self.lora = layer, lora

    def _pick(self, stem: str, projection: str) -> Tensor:
        """One projection's part of a stacked tensor, with out_features before any in_features."""
        alone = projection == "down_proj" or not self.layer.swiglu.gated
        stacked: Tensor = self.stacked.get_parameter((projection if alone else "gate_up_proj") + stem)
        transposed = is_transposed(self.stacked)
        if transposed and stacked.dim() == 3:
            stacked = stacked.mT
        if alone:
            return stacked
        number = PROJECTIONS.index(projection)
        return stacked[:, number::2] if self._interleaved else stacked.chunk(2, dim=1)[number]

    def load(self, expert: int, projection: str, weight: Tensor, scales: Tensor | None = None, **more: Any) -> bool:
        """Copy one weight. The arguments are those of `ExpertLayer.load`."""
        self._pick("", projection)[expert].copy_(Encoded(weight, scales, **more).dequantize())
        return True

    def load_bias(self, expert: int, projection: str, bias: Tensor) -> None:
        """Copy one bias."""
        self._pick("_bias", projection)[expert].copy_(bias)

    def missing(self) -> list[tuple[int, str]]:
        """Always empty, because the plan that fills the layer has counted its weights."""
        return []

    def load_packed(self) -> None:
        """Copy the dequantized weights and the biases of the packed layer."""
        for expert in range(self.layer.num_experts):
            for projection in self.layer.projections:
                self.load(expert, projection, self.layer.dequantize(expert, projection))
                if self.layer.biases:
                    self.load_bias(expert, projection, self.layer.bias(expert, projection))

    def merge(self) -> None:
        """Add the adapter to the weights."""
        for projection, pair in self.lora.pairs.items() if self.lora is not None else ():
            for expert, weight in zip(range(self.layer.num_experts), self._pick("", projection), strict=False):
                weight += pair.scaling * pair.b[expert].detach().float() @ pair.a[expert].detach().float()
