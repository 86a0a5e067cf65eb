"""Experts that are resident on a GPU, for a few tokens, compared with the fp32 reference."""

from __future__ import annotations

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
    """Resident experts with room for `blocks` of them, not counting adapters."""
    room = 1 << 20 if rank else 0
    return HotExperts(GpuLane(device), blocks * (layers[0].packed_bytes // EXPERTS + 256 + room), layers, rank)


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
    """Residents and the CPU's experts together give the layer's output."""
    torch.manual_seed(5)
    hot = hot_experts(layer, rank=40 if lora else 0, device=device)
    start(hot, 4, 0, 3)
    hot.set_lora({0: lora} if lora else {})
    x, (index, weights) = torch.randn(tokens, layer.hidden_size).bfloat16(), routing(tokens)
    blocks, away = ops.route(hot.layers[0], index.to(device))
    assert torch.equal(away.cpu(), index.masked_fill(torch.isin(index, torch.tensor([4, 0, 3])), ELSEWHERE))
    here = ops.forward(hot.layers[0], x.to(device), blocks, weights.to(device))
    again = ops.forward(hot.layers[0], x.to(device), blocks, weights.to(device))
    assert torch.equal(here, again) and here.dtype == torch.float32
    there, _ = layer.forward(x, away.cpu(), weights, lora, "none")
    expected = oracle(x.float(), index, weights, *dequantized(layer), lora)
    assert relative(here.cpu() + there, expected) < OUTPUT_TOLERANCE
    mine = index.masked_fill(away.cpu() != ELSEWHERE, 1)  # alone, so that the CPU's part cannot hide an error
    part = oracle(x.float(), mine, weights.where(away.cpu() == ELSEWHERE, 0.0), *dequantized(layer), lora)
    assert relative(here, part.to(here.device)) < OUTPUT_TOLERANCE
    counts = torch.bincount(index.flatten(), minlength=EXPERTS)
    counts[[1, 2]] = 0
    assert torch.equal(hot.heat[0].cpu(), counts)
