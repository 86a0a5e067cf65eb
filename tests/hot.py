"""Experts that are resident on a GPU, for a few tokens, compared with the fp32 reference."""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
from contract import EXPERTS, OUTPUT_TOLERANCE, dequantized, relative

from ktft import native, reference
from ktft.lanes.gpu.lane import GpuLane
from ktft.lora import ExpertLora
from ktft.native import ELSEWHERE, ExpertLayer
from ktft.serve.runtime.resident_experts import HotExperts, HotOperations

ISA = native.default_isa()


def routing(tokens: int, top_k: int = 3) -> tuple[torch.Tensor, torch.Tensor]:
    """Different experts for each token, and their weights."""
    index = torch.stack([torch.randperm(EXPERTS)[:top_k] for _ in range(tokens)])
    return index, torch.rand(tokens, top_k)


def hot_experts(*layers: ExpertLayer, blocks: int = EXPERTS, rank: int = 0, device: str = "cpu") -> HotExperts:
    """Resident experts with room for `blocks` of them, not counting two adapters."""
    room = 2 << 20 if rank else 0
    return HotExperts(GpuLane(device), blocks * (layers[0].packed_bytes // EXPERTS + 256 + room), layers, rank, 2)


def start(hot: HotExperts, *experts: int) -> None:
    """Make these the residents of the first layer."""
    hot.start({hot.layers[0].layer: [float(e in experts) for e in range(EXPERTS)]})


def check_mix(
    ops: HotOperations,
    layer: ExpertLayer,
    lora: ExpertLora | None = None,
    oracle=reference.moe,
    device: str = "cpu",
    tokens: int = 4,
) -> None:
    """Residents and the CPU's experts together give the layer's output, for tokens of two adapters and of none."""
    torch.manual_seed(5)
    hot = hot_experts(layer, rank=40 if lora else 0, device=device)
    start(hot, 4, 0, 3)
    loras, of_token = [None], torch.zeros(tokens, dtype=torch.int32)
    if lora is not None:
        other = copy.deepcopy(lora)
        for parameter in other.parameters():
            parameter.data.mul_(-0.7)
        loras, of_token = [lora, other, None], (torch.arange(tokens, dtype=torch.int32) + 1) % 3 - 1
        for place in (0, 1):
            hot.set_adapter(place, {0: loras[place]})
    x, (index, weights) = torch.randn(tokens, layer.hidden_size).bfloat16(), routing(tokens)

    def each(compute: Callable[..., torch.Tensor], *given: torch.Tensor) -> torch.Tensor:
        """Each token by the adapter that it has."""
        whole = [compute(*given, lora) for lora in loras]
        return torch.stack([whole[place][token] for token, place in enumerate(of_token.tolist())])

    blocks, away = ops.route(hot.layers[0], index.to(device))
    assert torch.equal(away.cpu(), index.masked_fill(torch.isin(index, torch.tensor([4, 0, 3])), ELSEWHERE))
    given = hot.layers[0], x.to(device), blocks, weights.to(device), of_token.to(device) if lora else None
    here, again = ops.forward(*given), ops.forward(*given)
    assert torch.equal(here, again) and here.dtype == torch.float32
    there = each(lambda *call: layer.forward(*call, "none")[0], x, away.cpu(), weights)
    weight = dequantized(layer)
    expected = each(lambda x, index, weights, lora: oracle(x, index, weights, *weight, lora), x.float(), index, weights)
    assert relative(here.cpu() + there, expected) < OUTPUT_TOLERANCE
    mine = index.masked_fill(away.cpu() != ELSEWHERE, 1)  # alone, so that the CPU's part cannot hide an error
    alone = weights.where(away.cpu() == ELSEWHERE, 0.0)
    part = each(lambda x, index, weights, lora: oracle(x, index, weights, *weight, lora), x.float(), mine, alone)
    assert relative(here, part.to(here.device)) < OUTPUT_TOLERANCE
    if lora is not None:  # without the adapters it is what the base gives
        plain = ops.forward(*given[:-1])
        part = oracle(x.float(), mine, alone, *weight, None)
        assert relative(plain, part.to(plain.device)) < OUTPUT_TOLERANCE
    counts = torch.bincount(index.flatten(), minlength=EXPERTS)
    counts[[1, 2]] = 0
    assert torch.equal(hot.heat[0].cpu(), counts)
