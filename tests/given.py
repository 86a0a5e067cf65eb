"""The types of the fixtures of `conftest.py`."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

Checkpoint = Callable[[str], Path]
TrainYaml = Callable[..., dict[str, Any]]
RunCli = Callable[..., subprocess.CompletedProcess[str]]
RunPython = Callable[[str], subprocess.CompletedProcess[str]]
RunExp = Callable[[dict[str, Any]], None]
Train = Callable[[dict[str, Any]], str]
