"""SGLang's own classes with ktft's plugin: its model runner in this process, with what it computes and what it refuses.

`test_sglang_server.py` starts the server.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from adapters import random_adapter
from effects import expected
from sglang_process import IDS, MISSING, Runner, environment, installed, runner
from tiny import write_checkpoint

from ktft.config import SERVE_ENV
from ktft.hosts.sglang import HOOKED
from ktft.serve.engine import Findings, Options
from ktft.serve.engines import SGLANG
from ktft.serve.runtime.served_model import current
from ktft.serve.runtime.settings import GRAPH_TOKENS, ServeSettings

pytestmark = pytest.mark.skipif(not installed(), reason=MISSING)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint("qwen3moe", tmp_path_factory.mktemp("base") / "tiny-moe", head_dim=32)


@pytest.fixture(scope="module")
def served(base: Path) -> Iterator[Runner]:
    with runner(base) as running:
        yield running


# --- what is computed -------------------------------------------------------------------------------------------------


def test_ktft_computes_the_experts_and_sglang_holds_none(served: Runner, base: Path) -> None:
    config = served.model.config
    assert not [name for name, _ in served.model.named_parameters() if ".experts." in name]
    before = current().work()["lanes"]["cpu"]["pairs"]
    found, wanted = served.logprobs(), expected(base)
    assert (found - wanted).norm() < 1e-2 * wanted.norm()
    tokens = sum(range(1, len(IDS)))
    computed = current().work()["lanes"]["cpu"]["pairs"] - before
    assert computed == tokens * config.num_experts_per_tok * config.num_hidden_layers


@pytest.mark.parametrize(
    "targets",
    [["q_proj"], ["k_proj"], ["v_proj"], ["o_proj"], ["experts"], "all-linear"],
    ids=lambda each: "".join(each),
)
def test_every_kind_of_module_takes_effect(served: Runner, base: Path, tmp_path: Path, targets: Any) -> None:
    adapter = random_adapter(base, tmp_path / "a", std=0.3, target_modules=targets)
    plain, wanted = served.logprobs(), expected(base, adapter) - expected(base)
    assert wanted.norm() > 0.3, "the adapter has to matter"
    served.load(1, adapter)
    try:
        effect = served.logprobs(1) - plain
        (told,) = current().status()["adapters"]
    finally:
        served.unload(1)
    assert (effect - wanted).norm() < 0.1 * wanted.norm()
    assert all(each["modules"] == each["nonzero"] > 0 for each in told["applied"].values()), told
    assert torch.equal(served.logprobs(), plain)


def test_each_request_of_a_batch_has_its_own_adapter(served: Runner, base: Path, tmp_path: Path) -> None:
    numbers = (1, 2)
    for number in numbers:
        served.load(number, random_adapter(base, tmp_path / str(number), std=0.5, seed=number))
    try:
        asked = [(IDS[: 5 + place], number) for place, number in enumerate((2, 0, 1, 2, 0, 1))]
        together = served.next_logprobs(asked)
        alone = torch.cat([served.next_logprobs([each]) for each in asked])
        others = torch.cat([served.next_logprobs([(ids, (number + 1) % 3)]) for ids, number in asked])
    finally:
        for number in numbers:
            served.unload(number)
    assert (together - alone).abs().max() < 0.05
    assert ((others - together).norm(dim=1) > 1).all(), "another adapter must be seen"


# --- what is refused --------------------------------------------------------------------------------------------------


def test_a_bad_adapter_changes_nothing(served: Runner, base: Path, tmp_path: Path) -> None:
    plain = served.logprobs()
    with pytest.raises(ValueError, match="has rank 128, the server takes 64 at most; start it with"):
        served.load(1, random_adapter(base, tmp_path / "high", r=128))
    other = write_checkpoint("qwen3moe", tmp_path / "other", head_dim=32, moe_intermediate_size=64)
    with pytest.raises(ValueError, match="layers.0.mlp.experts.0.down_proj.lora_A.weight has shape"):
        served.load(1, random_adapter(other, tmp_path / "of-other"))
    assert current().adapters == {} and torch.equal(served.logprobs(), plain)


def test_a_weight_without_a_place_is_an_error(served: Runner) -> None:
    from ktft.serve.sglang.loader import _mark, _marked

    model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Linear(3, 2))
    _mark(model)
    assert _marked(model) == [name for name, _ in model.named_parameters()]
    torch.nn.init.ones_(model[0].weight)
    assert _marked(model) == ["0.bias", "1.weight", "1.bias"]


@pytest.mark.parametrize(
    ("layer", "config", "what"),
    [
        ({"moe_tp_size": 2}, {}, "tensor parallelism"),
        ({"moe_ep_size": 2}, {}, "expert parallelism"),
        ({}, {"activation": "gelu"}, "the activation 'gelu'"),
        ({}, {"routed_scaling_factor": 2.5}, "a factor on the routed experts' sum"),
        ({}, {"apply_router_weight_on_input": True}, "routing weights on the experts' input"),
        ({}, {"num_fused_shared_experts": 1}, "shared experts among the routed ones"),
    ],
)
def test_experts_that_the_kernels_do_not_compute(served: Runner, layer: Any, config: Any, what: str) -> None:
    from sglang.srt.layers.moe import MoeRunnerConfig

    from ktft.serve.sglang.moe import SglangMoEMethod

    plain = {"layer_id": 0, "layer_name": "layers.0.mlp.experts", "moe_tp_size": 1, "moe_ep_size": 1}
    SglangMoEMethod(SimpleNamespace(**plain, moe_runner_config=MoeRunnerConfig()))
    with pytest.raises(ValueError, match=f"layers.0.mlp.experts: SGLang asks for {what}, which"):
        SglangMoEMethod(SimpleNamespace(**plain | layer, moe_runner_config=MoeRunnerConfig(**config)))


# --- how it is put into SGLang ----------------------------------------------------------------------------------------


def test_the_installed_version_has_each_row(served: Runner) -> None:
    from ktft.serve.sglang import hooks

    hooks.require_applied()
    for row in HOOKED:
        assert callable(row.find_wrapper()) and row.tested


def test_sglang_takes_the_arguments(served: Runner, base: Path) -> None:
    from sglang.srt.server_args import prepare_server_args

    settings = ServeSettings(str(base), adapter_swap=True, max_lora_rank=8, served_name="base")
    found = Findings(SGLANG, "qwen3_moe", False, 128, 3 * 2 * 2 * 2 * 32 * 2 * 200)
    words = SGLANG.arguments(settings, Options(port=8123, max_num_seqs=4, extra=("--log-level", "warning")), found)
    args = prepare_server_args(words)
    assert (args.quantization, args.device, args.attention_backend) == ("ktft", "cpu", "torch_native")
    assert (args.max_running_requests, args.context_length, args.port) == (4, 128, 8123)
    assert args.max_total_tokens == 400 and args.enable_lora and args.served_model_name == "base"
    assert args.log_level == "warning"
    with pytest.raises(ValueError, match="--tp cannot be passed on to SGLang"):
        SGLANG.check_extra(["--tp", "2"])
    with pytest.raises(ValueError, match="--dense-format k4 is not served with SGLang"):
        SGLANG.arguments(ServeSettings(str(base), dense_format="k4"), Options(), found)


def test_arguments_and_environment_on_a_gpu(base: Path) -> None:
    settings = ServeSettings(str(base), gpu_expert_memory="1G")
    found = Findings(SGLANG, "qwen3_moe", True, 128, None)
    words = SGLANG.arguments(settings, Options(max_num_seqs=3), found)
    at = words.index("--cuda-graph-bs-decode")
    assert words[at + 1 : at + 6] == ["1", "2", "3", "--cuda-graph-backend-prefill", "disabled"]
    assert "--device" not in words and "--attention-backend" not in words
    assert "SGLANG_USE_CPU_ENGINE" not in SGLANG.environment({}, settings, found)
    many = SGLANG.arguments(settings, Options(max_num_seqs=500), found)
    assert str(GRAPH_TOKENS) in many and str(GRAPH_TOKENS + 1) not in many


def test_the_model_for_a_gpu(tmp_path: Path) -> None:
    """In a process of its own, since SGLang loads a model once in a process."""
    script, here = Path(__file__).parent / "sglang_hybrid.py", [str(Path(__file__).parent)]
    own = os.environ | environment()
    own["PYTHONPATH"] = os.pathsep.join([*here, *filter(None, [own.get("PYTHONPATH")])])
    done = subprocess.run([sys.executable, script, tmp_path], env=own, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]


PLAIN = """
import sys
from sglang.srt.plugins import load_plugins
load_plugins()
print([f"ktft.serve.sglang.{name}" in sys.modules for name in ("plugin", "hooks", "moe")])
"""


def test_sglang_without_ktft_serve_is_left_alone() -> None:
    own = {name: value for name, value in os.environ.items() if name != SERVE_ENV} | environment()
    done = subprocess.run([sys.executable, "-c", PLAIN], env=own, capture_output=True, text=True, timeout=300)
    assert done.stdout.splitlines()[-1:] == ["[True, False, False]"], done.stdout + done.stderr
