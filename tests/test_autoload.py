"""The hook that torch runs at import: harmless when anything is wrong, inert until `use_kt: true`."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from given import RunPython

import ktft_autoload

ARGUMENTS = """
args = {"model_name_or_path": ".", "stage": "sft", "do_train": True, "finetuning_type": "lora", "dataset": "d",
        "template": "default", "output_dir": "/nonexistent/out", "use_cpu": True, "report_to": "none"}
"""


def python(code: str, **env: str) -> subprocess.CompletedProcess[str]:
    environment = {k: v for k, v in os.environ.items() if k not in ("KTFT_DISABLE", "TORCH_DEVICE_BACKEND_AUTOLOAD")}
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=300, env=environment | env
    )


IMPORTED = """
import sys, torch
print([type(f).__module__ for f in sys.meta_path].count('ktft_autoload'))
print([m for m in ('transformers', 'peft', 'ktft', 'yaml') if m in sys.modules])
"""


@pytest.mark.parametrize(("environment", "finders"), [({}, "1"), ({"KTFT_DISABLE": "1"}, "0")])
def test_import_torch_only_adds_a_finder(environment: dict[str, str], finders: str) -> None:
    done = python(IMPORTED, **environment)
    assert done.stdout.splitlines() == [finders, "[]"], done.stderr
    assert "ktft" not in done.stderr


def test_a_broken_ktft_never_breaks_torch() -> None:
    done = python("import sys; sys.modules['ktft'] = None\nimport torch; print(torch.ones(2).sum().item())")
    assert (done.stdout.strip(), done.stderr) == ("2.0", "")


INSTALLED = """
import sys
sys.meta_path[:] = [f for f in sys.meta_path if "editable" not in type(f).__module__]  # as an installed wheel is found
sys.path.insert(0, {folder!r})
import torch
print(torch.ones(2).sum().item(), "ktft" in sys.modules)
print("torch is there", file=sys.stderr)
import llamafactory.hparams
"""


@pytest.mark.parametrize("other", [pytest.param("ktft.py", marks=pytest.mark.full), "ktft/__init__.py"])
def test_something_else_named_ktft_never_breaks_torch(other: str, tmp_path: Path) -> None:
    """Nor is it executed; it may be a program of that name which imports torch itself."""
    file = tmp_path / other
    file.parent.mkdir(exist_ok=True)
    file.write_text("raise SystemExit('executed')")
    done = python(INSTALLED.format(folder=str(tmp_path)))
    assert (done.returncode, done.stdout.strip()) == (0, "2.0 False"), done.stderr
    assert done.stderr.startswith("torch is there\n")
    assert done.stderr.count("is imported in place of ktft, since its folder comes first on sys.path: rename it") == 1
    assert str(file if other == "ktft.py" else file.parent) in done.stderr


def test_metadata_of_an_older_install_finds_the_hook() -> None:
    from ktft import _autoload

    assert _autoload.install is ktft_autoload.install


def test_a_broken_hook_leaves_llamafactory_as_it_was(fork_python: RunPython) -> None:
    """Stock behaviour without use_kt; with it, LLaMA-Factory's own refusal and never a stock model."""
    code = (
        "import sys; sys.modules['ktft.train.llamafactory'] = None\n"
        "import llamafactory.model\nfrom llamafactory.hparams import get_train_args\n"
        + ARGUMENTS
        + "print(get_train_args(dict(args))[0].use_kt)\n"
        "try: get_train_args({**args, 'use_kt': True})\n"
        "except Exception as error: print(type(error).__name__)"
    )
    done = fork_python(code)
    assert done.stdout.splitlines()[-2:] == ["False", "PackageNotFoundError"], done.stdout + done.stderr
    assert done.stderr.count("ktft: its LLaMA-Factory integration is off") == 1


def test_modules_imported_before_are_adapted_too(fork_python: RunPython) -> None:
    code = (
        "import sys\n"  # as after TORCH_DEVICE_BACKEND_AUTOLOAD=0
        "sys.meta_path[:] = [each for each in sys.meta_path if type(each).__module__ != 'ktft_autoload']\n"
        "import llamafactory.train.tuner\nfrom llamafactory.hparams import get_train_args\n"
        "assert 'ktft' not in sys.modules\n"
        "import ktft_autoload\nktft_autoload.install(); ktft_autoload.install()\n"
        "from ktft.train.llamafactory import settings_of\n"
        + ARGUMENTS
        + "model_args = get_train_args({**args, 'use_kt': True, 'kt_config': {'threads': 3}})[0]\n"
        "print(settings_of(model_args).threads)"
    )
    done = fork_python(code)
    assert done.stdout.splitlines()[-1] == "3", done.stdout + done.stderr


def test_install_is_idempotent_and_finds_nothing_else() -> None:
    ktft_autoload.install()
    ktft_autoload.install()
    (finder,) = [finder for finder in sys.meta_path if isinstance(finder, ktft_autoload._Finder)]
    assert finder.find_spec("json") is None
    assert finder.find_spec(ktft_autoload.MODULES[0], []) is None


@pytest.mark.full
def test_llamafactory_imported_before_torch() -> None:
    """A module that imports torch is adapted before anyone can call its functions."""
    done = python(
        "import llamafactory.train.tuner as tuner\n"
        "print(tuner._training_function.__wrapped__.__name__, type(tuner).__name__)\n"
        "from ktft import hosts\n"
        "print(len([each for each in hosts.installed() if each.owner == 'llamafactory.train.tuner']))"
    )
    assert done.stdout.splitlines() == ["_training_function module", "1"], done.stderr
    assert "ktft:" not in done.stderr
