"""Patches of other libraries: each row is there, is undone by one call, and is not in force before it is needed."""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Callable
from dataclasses import replace
from fnmatch import fnmatch
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from given import RunPython
from transformers.models.deepseek_v3 import modeling_deepseek_v3
from transformers.models.qwen3_moe import modeling_qwen3_moe

import ktft
import ktft_autoload
from ktft import hosts, versions
from ktft.hosts import PATCHES, Patch, llamafactory
from ktft.hosts.transformers import ROTARY

TRAINING = [
    patch
    for patch in PATCHES
    if patch.package not in ("vllm", "sglang") and versions.version_of(patch.package) and patch.needed
]
"""Rows for the libraries that are installed beside these tests; those of vLLM and SGLang are tested where they are."""
FOR_PROCESS = [patch for patch in TRAINING if not patch.on_instances and "*" not in patch.owner]
ROOT = Path(__file__).parents[1]


FRESH = """
import ktft, peft, transformers
from ktft import hosts
print(ktft.KtftConfig, ktft.Trainer, ktft.get_peft_model)
owners = transformers.Trainer, peft.PeftModel, peft.tuners.tuners_utils.BaseTuner
functions = [getattr(value, "__func__", value) for owner in owners for value in vars(owner).values()]
files = {each.__code__.co_filename for each in functions if hasattr(each, "__code__")}
ours = [file for file in files if file.startswith(ktft.__path__[0])]
print(hosts.installed(), len(transformers.trainer.DEFAULT_CALLBACKS), ours)
ktft.KtftConfig()
print(len(hosts.installed()), len(transformers.trainer.DEFAULT_CALLBACKS))
"""


def test_using_ktft_patches_nothing_before_there_is_a_model(fork_python: RunPython) -> None:
    done = fork_python(FRESH)
    rows = [patch for patch in FOR_PROCESS if patch.package != "llamafactory"]
    assert done.stdout.splitlines()[1:] == ["[] 1 []", f"{len(rows)} 3"], done.stdout + done.stderr


def test_a_row_for_each_name() -> None:
    assert len({(patch.owner, patch.name) for patch in PATCHES}) == len(PATCHES)


@pytest.mark.parametrize("patch", TRAINING, ids=lambda patch: f"{patch.owner}.{patch.name}")
def test_the_installed_version_has_it(patch: Patch) -> None:
    assert callable(patch.find_wrapper()) and patch.tested
    if "*" not in patch.owner:
        patch.find_owner()
        return
    codes = (modeling_qwen3_moe, modeling_deepseek_v3)
    owners = {code.__name__: code for code in codes} | {
        f"{code.__name__}.{name}": value for code in codes for name, value in vars(code).items()
    }
    found = [value for path, value in owners.items() if fnmatch(path, patch.owner)]
    assert any(hasattr(value, patch.name) for value in found)


def test_undo_gives_back_what_was_there(stock_hosts: None) -> None:
    def now() -> list[Any]:
        found = [inspect.getattr_static(patch.find_owner(), patch.name) for patch in FOR_PROCESS]
        return [(id(each), list(each) if isinstance(each, list) else None) for each in found]

    for patch in FOR_PROCESS:
        patch.find_owner()
    hosts.undo()  # LLaMA-Factory's modules were imported by this test, perhaps
    before = now()
    hosts.install(FOR_PROCESS)
    patched = now()
    assert all(mine != theirs for mine, theirs in zip(patched, before, strict=True))
    hosts.install(FOR_PROCESS)
    assert now() == patched and hosts.installed() == FOR_PROCESS
    assert hosts.undo() == FOR_PROCESS
    assert now() == before and hosts.installed() == []


class Base:
    def inherited(self, x: int) -> int:
        return x


class Host(Base):
    things = [1]  # noqa: RUF012  # as a library has it

    def method(self, x: int) -> int:
        return x

    @staticmethod
    def static(x: int) -> int:
        return x

    @classmethod
    def made(cls, x: int) -> tuple[type, int]:
        return cls, x


def double(original: Callable[..., Any], *args: Any) -> Any:
    return original(*args), original(*args)


def longer(elements: list[int]) -> list[int]:
    return [*elements, 2]


def row(name: str, wrapper: str = "double") -> Patch:
    return Patch(f"{__name__}.Host", name, f"{__name__}:{wrapper}", "Why not.")


def test_every_kind_of_attribute(stock_hosts: None) -> None:
    before, held = dict(vars(Host)), Host.things
    hosts.install([*map(row, ("inherited", "method", "static", "made")), row("things", "longer")])
    host = Host()
    assert host.inherited(3) == host.method(3) == Host.static(3) == (3, 3)
    assert Host.made(3) == ((Host, 3), (Host, 3))
    assert held is Host.things and held == [1, 2]
    assert Host.method.__name__ == "method" and Base().inherited(3) == 3
    hosts.undo()
    assert vars(Host) == before and held == [1] and held is Host.things


@pytest.mark.parametrize(
    "missing", [{"name": "_gone"}, {"owner": "transformers.gone.Trainer"}, {"owner": "transformers.trainer.Gone"}]
)
def test_a_version_that_lacks_a_name_is_refused(
    stock_hosts: None, monkeypatch: pytest.MonkeyPatch, missing: dict[str, str]
) -> None:
    """With both versions and the cure, before anything is changed."""
    monkeypatch.setattr("ktft.hosts.patch.version_of", lambda package: "5.99.0")
    first, *_, last = (patch for patch in PATCHES if patch.owner == "transformers.trainer.Trainer")
    gone = replace(last, **missing)
    low, high = versions.TESTED_VERSIONS["transformers"]
    message = (
        f"transformers 5.99.0 has no {gone.owner}.{gone.name}, which ktft replaces. {last.why} ktft was tested with "
        f"transformers {low} to below {high}; run: pip install 'transformers>={low},<{high}'"
    )
    with pytest.raises(ValueError) as error:
        hosts.install([first, gone])
    assert str(error.value).startswith(message) and hosts.installed() == []


def test_single_objects() -> None:
    patch = row("things")
    host = SimpleNamespace(things=[1])
    held = host.things
    patch.put(host, [5, 6])
    assert host.things is held and held == [5, 6]
    method = replace(patch, name="method", owner="transformers.Host")
    own = Host()
    method.put(own, lambda x: -x)
    assert own.method(3) == -3 and Host().method(3) == 3
    method.take_off(own)
    assert own.method(3) == 3
    with pytest.raises(ValueError, match=r"has no transformers\.Host\.gone"):
        replace(method, name="gone").put(own, 1)


def test_a_models_own_code(stock_hosts: None, monkeypatch: pytest.MonkeyPatch) -> None:
    code = ModuleType("own_code")
    code.apply_rotary_pos_emb = plain = lambda q, k: (q, k)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, code.__name__, code)
    hosts.install([replace(ROTARY, owner=code.__name__)])
    assert code.apply_rotary_pos_emb is not plain
    hosts.undo()
    assert code.apply_rotary_pos_emb is plain


def test_a_configuration_of_ktft_installs_the_rows_for_models(stock_hosts: None) -> None:
    ktft.KtftConfig(threads=1)
    assert {patch.package for patch in hosts.installed()} == {"transformers", "peft", "accelerate"}


def test_the_import_hook_waits_for_the_modules_of_the_rows() -> None:
    pytest.importorskip("llamafactory")
    for module in ktft_autoload.MODULES:
        importlib.import_module(module)
    owners = [f"{patch.owner}." for patch in llamafactory.PATCHES]
    assert all(any(owner.startswith(f"{module}.") for owner in owners) for module in ktft_autoload.MODULES)
    assert set(llamafactory.PATCHES) <= set(hosts.installed())
