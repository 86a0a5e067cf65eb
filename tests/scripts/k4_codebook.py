"""Find the codebook of k4: `python tests/scripts/k4_codebook.py`. It takes a minute or two.

Lloyd-Max that also fits the scales: on Gaussian groups of 32 it alternates between choosing each group's scale for the
current codebook (many candidates, each refined by least squares) and moving each code to the centroid of its values.
The result, scaled to a largest value of 127 and rounded, is in csrc/quant/k4-inl.h.
"""

from __future__ import annotations

import torch
from torch import Tensor

GROUPS, ROUNDS = 60_000, 25


def codes(magnitudes: Tensor, codebook: Tensor) -> Tensor:
    return torch.bucketize(magnitudes, (codebook[1:] + codebook[:-1]) / 2)


def best_scales(x: Tensor, codebook: Tensor) -> Tensor:
    """[groups, 1] from magnitudes x [groups, 32]."""
    best_score, best = torch.zeros(len(x)), torch.ones(len(x))
    for taken_for in torch.linspace(90, 180, 25).tolist():
        c = codebook[codes(x * (taken_for / x.amax(1, keepdim=True)), codebook)]
        xc, cc = (x * c).sum(1), (c * c).sum(1)
        score = xc * xc / cc
        best = torch.where(score > best_score, xc / cc, best)
        best_score = torch.maximum(score, best_score)
    return best[:, None]


def main() -> None:
    torch.manual_seed(0)
    x = torch.randn(GROUPS, 32).abs()
    codebook = 127 * torch.linspace(1 / 15, 1, 8) ** 1.3
    for _ in range(ROUNDS):
        scale = best_scales(x, codebook)
        chosen = codes(x / scale, codebook).flatten()
        weighted = torch.zeros(8).index_add_(0, chosen, (scale * x).flatten())
        codebook = weighted / torch.zeros(8).index_add_(0, chosen, (scale * scale).expand_as(x).flatten())
        codebook = codebook * (127 / codebook.max())
    for name, values in (("found", codebook), ("rounded", codebook.round())):
        scale = best_scales(x, values)
        error = (x - scale * values[codes(x / scale, values)]).norm() / x.norm()
        print(f"{name}: {[round(v, 2) for v in values.tolist()]}, {100 * float(error):.3f}% relative RMS")


if __name__ == "__main__":
    main()
