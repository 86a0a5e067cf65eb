"""Packed linear weights as a GPU has them, decoded and multiplied by torch on the CPU."""

from __future__ import annotations

import pytest
from packed_weights import check

from ktft.serve.runtime import packed_weight
from ktft.serve.runtime.settings import SERVED_DENSE_FORMATS


@pytest.mark.parametrize("decoded_bytes", [1, 48 * 288 * 2, packed_weight.DECODED_BYTES])
@pytest.mark.parametrize("format", SERVED_DENSE_FORMATS)
def test_decoded_some_rows_at_a_time(format: str, decoded_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed_weight, "DECODED_BYTES", decoded_bytes)
    check(format, (80, 288), 1, "cpu")
    check(format, (80, 96), 6, "cpu", biased=True)
