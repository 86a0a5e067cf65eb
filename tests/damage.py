"""Damage to files: a flipped bit, other values in a JSON object."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def flip(path: Path, at: int = -1) -> None:
    """Flip one bit of this byte."""
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)


def edit_json(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
