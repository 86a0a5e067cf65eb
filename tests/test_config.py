"""Settings, and what the YAML's `kt_config` keys turn into."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

from ktft.config import PLACEMENTS, Settings, trace_file, use_triton
from ktft.kt_keys import KT_KEYS, TOP_LEVEL_KEYS, parse_kt_config
from ktft.versions import FACTORY, NEWEST, STACKS, TESTED_SERVERS, TESTED_VERSIONS

RESIDENT = {"placement": "resident"}


def test_defaults() -> None:
    assert parse_kt_config({}) == (Settings(None, None, None, "retain", None, True), [])


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"expert_format": "bf16", "threads": 3, "numa_nodes": 2}, Settings("bf16", 3, 2)),
        ({"kt_backend": "AMXBF16", "kt_num_threads": 4, "kt_threadpool_count": 2}, Settings("bf16", 4, 2)),
        ({"kt_backend": "AMXINT8"}, Settings("int8")),
        ({"kt_backend": "FP8"}, Settings("fp8")),
        ({"kt_backend": "MXFP4"}, Settings("mxfp4")),
        ({"kt_expert_weight_format": "RAWINT4"}, Settings("int4")),
        ({"expert_format": "k4"}, Settings("k4")),
        ({"kt_backend": "auto", "enabled": True}, Settings()),
        ({"kt_expert_weight_format": "int8", "kt_backend": "INT8"}, Settings("int8")),
        ({"kt_tp_enabled": False}, Settings(numa_nodes=1)),
        ({"kt_tp_enabled": True, "kt_num_gpu_experts": 0}, Settings()),
        ({"kt_activation_policy": "recompute"}, Settings(activation="recompute")),
        ({"kt_cpu_activation": "retain", "cpu_infer": 8}, Settings(threads=8)),
        ({"threads": None, "kt_weight_path": None}, Settings()),
        ({"placement": "stream"}, Settings(placement="stream")),
        ({"gpu_expert_memory": "8G"}, Settings(gpu_expert_memory=8 << 30)),
        ({"gpu_expert_memory": 0}, Settings(gpu_expert_memory=0)),
        ({"gpu_expert_memory": "auto"}, Settings()),
        ({"gpu_expert_memory": 0, "placement": "stream"}, Settings(placement="stream")),
        ({"gpu_expert_memory": "auto", "placement": "cpu"}, Settings(placement="cpu")),
        ({"gpu_expert_memory": "auto"} | RESIDENT, Settings(gpu_expert_memory="auto", **RESIDENT)),
    ],
)
def test_keys_that_set_something(given: dict[str, Any], expected: Settings) -> None:
    assert parse_kt_config(given) == (expected, [])


def test_keys_that_steer_nothing_are_noted() -> None:
    given = {"kt_share_backward_bb": True, "kt_max_cache_depth": 2}
    settings, notes = parse_kt_config(given, {"kt_lora_expert_num": 4})
    assert settings == Settings()
    names = [note.split(" has no effect: ")[0] for note in notes]
    assert names == [*(f"kt_config.{key}" for key in given), "kt_lora_expert_num"]


def test_amxint4_is_noted_as_another_format() -> None:
    settings, notes = parse_kt_config({"kt_backend": "AMXINT4"})
    assert settings == Settings("k4")
    assert len(notes) == 1 and notes[0].startswith("kt_config.kt_backend: AMXINT4 becomes k4")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"expert_fromat": "bf16"}, "unknown key 'kt_config.expert_fromat'; the nearest valid key is 'expert_format'"),
        ({"kt_num_thread": 4}, "the nearest valid key is 'kt_num_threads'"),
        ({"kt_backend": "FP6"}, "kt_config.kt_backend: 'FP6' is not a supported expert format; supported: bf16, int8"),
        ({"expert_format": "int3"}, "kt_config.expert_format is 'int3'; supported: bf16, int8"),
        ({"threads": 0}, "threads is 0; give a whole number"),
        ({"kt_num_threads": "many"}, "kt_config.kt_num_threads: threads is 'many'"),
        ({"numa_nodes": True}, "numa_nodes is True; give a whole number"),
        ({"activation": "drop"}, "activation is 'drop'; supported: retain, recompute"),
        (
            {"kt_num_gpu_experts": 8},
            "kt_config.kt_num_gpu_experts: 8 is not supported; experts that stay on the GPU are chosen by memory: set "
            "gpu_expert_memory to a size",
        ),
        ({"placement": "gpu"}, f"kt_config.placement is 'gpu'; supported: {', '.join(PLACEMENTS)}"),
        ({"gpu_expert_memory": "lots"}, "kt_config.gpu_expert_memory is 'lots'; give a size"),
        ({"gpu_expert_memory": True}, "gpu_expert_memory is True; give a size, for instance 8G, or auto, or 0"),
        ({"gpu_expert_memory": 8}, "8 without a unit is 8 bytes; write 8G if gigabytes are meant"),
        ({"gpu_expert_memory": "24"}, "24 without a unit is 24 bytes"),
        ({"gpu_expert_memory": -1}, "gpu_expert_memory is -1; give a size"),
        ({"placement": "cpu", "gpu_expert_memory": "4G"}, "placement is 'cpu', but gpu_expert_memory is 4294967296"),
        (
            RESIDENT | {"gpu_expert_memory": 0},
            "placement is 'resident', but gpu_expert_memory is 0: no expert would be",
        ),
        ({"kt_lora_rank": 8}, "kt_config.kt_lora_rank: set lora_rank at the top level"),
        ({"enabled": False}, "set use_kt: false"),
        ({"kt_tp_enabled": "no"}, "kt_config.kt_tp_enabled: 'no' is neither true nor false"),
        (
            {"threads": 2, "kt_num_threads": 3},
            "kt_config.threads sets threads to 2, kt_config.kt_num_threads sets it to 3; keep one",
        ),
        ({"kt_tp_enabled": False, "numa_nodes": 2}, "kt_config.kt_tp_enabled sets numa_nodes to 1"),
    ],
)
def test_bad_keys(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        parse_kt_config(given)


def test_sizes_of_gpu_memory_are_the_same_however_they_are_written() -> None:
    assert Settings(gpu_expert_memory="1.5G") == Settings(gpu_expert_memory=3 << 29)
    assert Settings(placement="stream").needs_gpu and Settings(gpu_expert_memory="1G").needs_gpu
    assert not Settings(gpu_expert_memory="auto").needs_gpu


def test_variables_of_the_lanes(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("KTFT_TRACE", "KTFT_TRITON"):
        monkeypatch.delenv(name, raising=False)
    assert (trace_file(), use_triton()) == (None, True)
    monkeypatch.setenv("KTFT_TRACE", "step.json")
    monkeypatch.setenv("KTFT_TRITON", "0")
    assert (trace_file(), use_triton()) == (Path("step.json"), False)


def test_top_level_keys(tmp_path: Path) -> None:
    assert set(TOP_LEVEL_KEYS) <= set(KT_KEYS)
    with pytest.raises(ValueError, match="kt_use_lora_experts: True is not supported; ktft has no dense LoRA experts"):
        parse_kt_config({}, {"kt_use_lora_experts": True})
    (tmp_path / "layer.0.kt").touch()
    with pytest.raises(ValueError, match=r"cannot read converted \.kt weights; give the original checkpoint"):
        parse_kt_config({}, {"kt_weight_path": str(tmp_path)})
    (tmp_path / "model.safetensors").touch()
    for key in ("kt_weight_path", "kt_expert_checkpoint_path"):
        assert parse_kt_config({}, {key: str(tmp_path)})[0].expert_checkpoint == str(tmp_path)


def test_tested_versions_are_those_of_the_package() -> None:
    def pins(versions: dict[str, tuple[str, str]]) -> set[str]:
        return {f"{name}>={lowest},<{too_new}" for name, (lowest, too_new) in versions.items()}

    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]
    extras = {name: set(pins) for name, pins in project["optional-dependencies"].items()}
    own = {name: tested for name, tested in TESTED_VERSIONS.items() if name not in ("llamafactory", "trl", "datasets")}
    assert pins(own) <= {*project["dependencies"]}
    assert extras["llamafactory"] == pins(FACTORY.versions | FACTORY.optional)
    assert extras["trl"] == pins(NEWEST.versions | NEWEST.optional)
    assert extras["serve"] | extras["serve-cpu"] | extras["serve-sglang"] >= pins(TESTED_SERVERS)
    assert extras["serve-cpu"] - pins(TESTED_SERVERS) <= extras["trl"]  # its transformers is of the newest stack
    for stack in STACKS:  # what the package allows has no gap that a stack leaves
        assert all(TESTED_VERSIONS[name][0] <= low for name, (low, _) in (stack.versions | stack.optional).items())
    assert FACTORY.versions["transformers"][1] == "5.9" and NEWEST.versions["transformers"][0] == "5.9.0"
