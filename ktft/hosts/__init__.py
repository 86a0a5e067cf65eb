"""Every patch of transformers, peft, LLaMA-Factory, vLLM and SGLang, one row each."""

from __future__ import annotations

from ktft.hosts import llamafactory, peft, sglang, transformers, vllm
from ktft.hosts.patch import Patch, install, installed, undo
from ktft.versions import require_stack

__all__ = ["PATCHES", "Patch", "install", "install_for_models", "installed", "undo"]

PATCHES = (
    *transformers.PATCHES,
    *transformers.OTHERS,
    *peft.PATCHES,
    *peft.OTHERS,
    *llamafactory.PATCHES,
    *vllm.OF_PROCESS,
    *vllm.OTHERS,
    *sglang.HOOKED,
)
"""All rows."""


def install_for_models() -> None:
    """Install the rows of transformers and peft for the process. Called before a model with ktft's experts is made.

    Raises:
        ValueError: the installed versions were not tested together, or one lacks a name; the message has the cure.
    """
    require_stack()
    install((*transformers.PATCHES, *peft.PATCHES))
