"""`ktft serve` with the engine of `fake_engine.py` alone."""

from __future__ import annotations

import sys
import types

# It must need neither vLLM nor ktft's folder for it: importing either is an error here
modules: dict[str, types.ModuleType | types.SimpleNamespace | None] = sys.modules  # type: ignore[assignment]
assert "vllm" not in modules and "ktft.serve.vllm" not in modules
modules["vllm"] = modules["ktft.serve.vllm"] = None

from fake_engine import FAKE  # noqa: E402

from ktft.cli.main import app  # noqa: E402
from ktft.serve.front import checks, launch  # noqa: E402

modules["ktft.serve.engines"] = types.SimpleNamespace(installed=lambda: FAKE)
launch.DRAIN, launch.TRIES = 0.5, 3  # type: ignore[misc]
checks.check = lambda engine, *_: checks.Findings(engine, "qwen3_moe", False, 512, None)  # type: ignore[assignment]
app()
