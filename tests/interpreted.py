"""Triton's interpreter, for tests without a GPU, with the bf16 arithmetic that it lacks."""

from __future__ import annotations

import os

import numpy as np
import pytest
import torch
import triton.language as tl
from triton.runtime import interpreter

ON_GPU = os.environ.get("TRITON_INTERPRET") != "1"  # see conftest.py
DEVICE = "cuda" if ON_GPU else "cpu"


@pytest.fixture(autouse=True)
def bf16_in_the_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter keeps bf16 as uint16, truncates floats instead of rounding, and multiplies the integers."""
    if ON_GPU:
        return
    builder, handle = interpreter.InterpreterBuilder, interpreter.TensorHandle
    cast, dot, patch = builder.cast_impl, builder.create_dot, interpreter._patch_lang_tensor

    def to_float(x: interpreter.TensorHandle) -> interpreter.TensorHandle:
        if x.dtype.scalar != tl.bfloat16:
            return x
        return handle((x.data.astype(np.uint32) << 16).view(np.float32), tl.float32)

    def cast_rounding(self, src, dst_type):
        if src.dtype.scalar != tl.float32 or dst_type.scalar != tl.bfloat16:
            return cast(self, src, dst_type)
        rounded = torch.from_numpy(np.ascontiguousarray(src.data)).bfloat16().view(torch.uint16)
        return handle(rounded.numpy(), tl.bfloat16)

    def patch_index(tensor, scope):
        patch(tensor, scope)  # numpy 2.4 refuses int() of an array with one element
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    monkeypatch.setattr(builder, "cast_impl", cast_rounding)
    monkeypatch.setattr(builder, "create_dot", lambda self, a, b, *rest: dot(self, to_float(a), to_float(b), *rest))
    monkeypatch.setattr(interpreter, "_patch_lang_tensor", patch_index)
