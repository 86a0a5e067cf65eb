"""The Triton kernels for LoRA of several adapters on a linear layer: on a GPU, else in Triton's interpreter."""

from __future__ import annotations

import pytest

pytest.importorskip("triton", reason="Triton is not installed")

from interpreted import DEVICE, bf16_in_the_interpreter
from placed import check

from ktft.serve.runtime import triton_placed_lora

__all__ = ["bf16_in_the_interpreter"]


def test_each_row_by_its_own_adapter() -> None:
    check(DEVICE, triton_placed_lora, rows=(1, 5))
