"""Counts and sizes as people write them: 200M, 512G."""

from __future__ import annotations

import re

_UNITS = ("", "K", "M", "G", "T")
_LEAST_BARE = 1 << 20


def parse_count(text: str, unit: int = 1000) -> int:
    """The number that a text such as `200M`, `1.5T`, `24GB` or `42` stands for. K stands for `unit`, M for its square.

    Raises:
        ValueError: the text is not a number of at least 0, alone or followed by K, M, G or T.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(?:i?B)?", str(text).strip(), re.IGNORECASE)
    if match is None:
        raise ValueError(f"{str(text)!r} is not a size; give a number with K, M, G or T, for instance 512G")
    return int(float(match[1]) * unit ** _UNITS.index(match[2].upper()))


def parse_size(text: str | int, unit: int = 1024) -> int:
    """The bytes of a size that a person wrote; `unit` is 1024 for capacities and 1000 for rates.

    Raises:
        ValueError: the text is not a size, or has no unit and is below 1 MiB, so that the unit was probably forgotten.
    """
    size = parse_count(str(text), unit)
    if 0 < size < _LEAST_BARE and str(text).strip()[-1].isdecimal():
        raise ValueError(f"{text} without a unit is {size} bytes; write {text}G if gigabytes are meant")
    return size
