"""Where experts may be read from, judged by the names of files alone. Standard library only, like all settings."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from typing import Any

GGUF = ".gguf"
_SPLIT = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf")  # llama.cpp's names of a file's parts
_VISION = "mmproj"  # llama.cpp's name for the part of a model that sees images, which lies beside the language model
NO_PACKAGE = "reading GGUF needs the package gguf: pip install 'ktft[gguf]'"


def is_gguf(path: Path) -> bool:
    """Whether this is a GGUF file, or a directory that holds some and no safetensors."""
    if path.is_dir():
        return not any(path.glob("*.safetensors")) and any(path.glob(f"*{GGUF}"))
    return path.suffix == GGUF


def gguf_files(path: Path) -> list[Path]:
    """All parts of a GGUF model, in order.

    Args:
        path: its only file, any of its parts, or a directory that holds nothing but this model.

    Raises:
        ValueError: a part is missing, or the directory holds several models.
    """
    if path.is_dir():
        path = _only_model(path)
    part = _SPLIT.fullmatch(path.name)
    if part is None:
        return [path]
    count = int(part[3])
    parts = [path.with_name(f"{part[1]}-{number:05d}-of-{count:05d}{GGUF}") for number in range(1, count + 1)]
    for each in parts:
        if not each.is_file():
            raise ValueError(f"{path} is one of {count} parts, and {each} is missing; download it too")
    return parts or [path]


def _only_model(directory: Path) -> Path:
    """One file of the model in a directory."""
    models: dict[str, Path] = {}
    for path in sorted(directory.glob(f"*{GGUF}")):
        part = _SPLIT.fullmatch(path.name)
        if not path.name.startswith(_VISION):
            models.setdefault(f"{part[1]} in {part[3]} parts" if part else path.name, path)
    if len(models) != 1:
        raise ValueError(
            f"{directory} holds {len(models)} GGUF models ({', '.join(list(models)[:3])}); give the path of one file"
        )
    return next(iter(models.values()))


def check_expert_checkpoint(value: Any) -> Any:
    """The check of the setting `expert_checkpoint`.

    Raises:
        ValueError: there is no checkpoint that ktft reads, or it is GGUF and the package gguf is not installed.
    """
    if value is None:
        return None
    path = Path(value)
    if path.is_file() and path.suffix != GGUF:
        raise ValueError(
            f"expert_checkpoint {str(path)!r} is a file; give a directory with safetensors files, or a {GGUF} file"
        )
    if not path.exists():
        raise ValueError(
            f"expert_checkpoint is {str(path)!r}, which is not a directory or a {GGUF} file; give a directory with "
            f"safetensors files, or a {GGUF} file"
        )
    safetensors, gguf = (path.is_dir() and any(path.glob(f"*{suffix}")) for suffix in (".safetensors", GGUF))
    if safetensors and gguf:
        raise ValueError(
            f"expert_checkpoint {str(path)!r} holds both .safetensors and {GGUF} files; give the {GGUF} file's own "
            "path, or a directory with the safetensors alone"
        )
    if is_gguf(path):
        gguf_files(path)
        require_gguf()
    elif not safetensors:
        raise ValueError(
            f"expert_checkpoint {str(path)!r} holds no .safetensors and no {GGUF} file: ktft packs a Hugging Face "
            "checkpoint or a GGUF file itself and cannot read converted .kt weights; give the original checkpoint"
        )
    return value


def require_gguf() -> None:
    """Raise ValueError if the package gguf is not installed."""
    if importlib.util.find_spec("gguf") is None:
        raise ValueError(NO_PACKAGE)
