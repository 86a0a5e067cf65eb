"""Imports the extension, as the only module that does, and maps torch's and ktft's names to its own."""

from __future__ import annotations

import torch

from ktft.config import PROJECTIONS

try:
    import ktft._C as core
except ImportError as error:
    raise ImportError(
        f"ktft's native core cannot be loaded ({error}). Install ktft for this Python from its folder: pip install ."
    ) from error

FORMATS: tuple[str, ...] = core.FORMATS
DTYPES = {torch.float32: core.Dtype.f32, torch.bfloat16: core.Dtype.bf16, torch.float16: core.Dtype.f16}
ENCODINGS = {torch.float32: core.Encoding.f32, torch.bfloat16: core.Encoding.bf16, torch.float16: core.Encoding.f16}
NATIVE_PROJECTIONS = {name: getattr(core.Projection, name) for name in PROJECTIONS}
