"""Products of packed linear weights as a GPU has them, compared with the fp32 product of the decoded weight."""

from __future__ import annotations

import torch
from contract import OUTPUT_TOLERANCE, relative

from ktft import native
from ktft.lanes.ops import torch_ops
from ktft.serve.runtime.packed_weight import PackedWeight


def check(format: str, shape: tuple[int, int], tokens: int, device: str, *, biased: bool = False) -> None:
    """A product `[2, tokens / 2, rows]` or `[tokens, rows]` is that of the decoded weight, in the inputs' dtype."""
    torch.manual_seed(tokens)
    runtime, plain = native.runtime(threads=1), torch.randn(shape)
    bias = 3 * torch.randn(shape[0])
    weight = PackedWeight.of(runtime, format, plain.bfloat16(), bias, torch.device(device))
    assert weight.shape == shape
    decoded = torch.empty(shape)
    torch_ops.decode_matrix(format, weight.bytes.cpu(), weight.matrix, decoded)
    x = torch.randn(tokens, shape[1]).bfloat16()
    x = x.view(2, tokens // 2, -1) if tokens % 2 == 0 else x
    expected = x.float() @ decoded.T + (bias if biased else 0)
    for dtype in (torch.bfloat16, torch.float32):
        out = weight.product(x.to(device, dtype), biased)
        assert out.dtype == dtype and relative(out.cpu().float(), expected) < OUTPUT_TOLERANCE
