"""Counts and sizes as people write them: 200M, 512G."""

from __future__ import annotations

import re

_UNITS = ("", "K", "M", "G", "T")
_LEAST_BARE = 1 << 20


def parse_count(text: str, unit: int = 1000) -> int:
    """`200M`, `1.5T`, `24GB` or a plain number.

    Raises:
        ValueError: not a number of at least 0 with one of K, M, G, T.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(?:i?B)?", str(text).strip(), re.IGNORECASE)
    if match is None:
        raise ValueError(f"{str(text)!r} is not a size; give a number with K, M, G or T, for instance 512G")
    return int(float(match[1]) * unit ** _UNITS.index(match[2].upper()))


def parse_size(text: str | int, unit: int = 1024) -> int:
    """A size in bytes, as a person writes it; `unit` is 1024 for capacities, 1000 for rates.

    Raises:
        ValueError: not a size, or so few bytes without a unit that the unit was forgotten.
    """
    size = parse_count(str(text), unit)
    if 0 < size < _LEAST_BARE and str(text).strip()[-1].isdecimal():
        raise ValueError(f"{text} without a unit is {size} bytes; write {text}G if gigabytes are meant")
    return size
