"""Run vLLM's own tests of its HTTP API against `ktft serve`.

    .venv-serve/bin/python tests/scripts/serve_vllm_tests.py --tests DIR [--only chat_completion/test_chat.py] [--stock]

DIR is a checkout, or the source distribution, of the vLLM that is installed. The tests are its own; what starts their
server is ours (`serve_vllm_shim.py`), and so is the model: a tiny Qwen3-MoE with random weights, whose name replaces
those in the tests. `--stock` starts vLLM's own server on the same checkpoint instead. Needs pytest-asyncio beside the
environment of serving.

Prints a row for each file and a line for each test that did not pass, with the reason. Exits with 1 if one failed
that is not explained below.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[1] / "serve")]
from adapters import random_adapter  # noqa: E402
from serve_vllm_shim import SETTINGS  # noqa: E402
from tiny import END, PAD, START, write_checkpoint  # noqa: E402

FILES = (
    "openai/chat_completion/test_chat_completion.py",
    "openai/chat_completion/test_batched_chat_completions.py",
    "openai/chat_completion/test_chat_logit_bias_validation.py",
    "openai/chat_completion/test_logprob_token_ids.py",
    "openai/completion/test_prompt_validation.py",
    "openai/test_chunked_prompt.py",
    "openai/test_return_token_ids.py",
    "serve/tokenize/test_tokenization.py",
    "serve/instrumentator/test_basic.py",
    "openai/chat_completion/test_chat.py",
    "openai/completion/test_completion.py",
    "openai/chat_completion/test_chat_echo.py",
    "openai/chat_completion/test_enable_force_include_usage.py",
    "openai/chat_completion/test_completion_with_function_calling.py",
    "openai/chat_completion/test_include_reasoning.py",
    "openai/chat_completion/test_thinking_token_budget.py",
    "openai/chat_completion/test_root_path.py",
    "openai/completion/test_token_in_token_out.py",
    "openai/completion/test_completion_with_prompt_embeds.py",
    "openai/chat_completion/test_chat_completion_with_prompt_embeds.py",
    "openai/test_return_tokens_as_ids.py",
    "openai/models/test_models.py",
)
"""Of `tests/entrypoints`, those that ask a server of a language model for chat, completions and tokens over HTTP."""
MODELS = (
    "HuggingFaceH4/zephyr-7b-beta",
    "HuggingFaceTB/SmolLM2-135M-Instruct",
    "Qwen/Qwen2-1.5B-Instruct",
    "Qwen/Qwen2.5-1.5B-Instruct",
    "Qwen/Qwen3-0.6B",
    "facebook/opt-125m",
    "openai-community/gpt2",
)
"""Names under which the tests ask for a model. All become `MODEL`, so that one server serves many tests."""
MODEL = "tiny/moe"
IN_BODY = ("test_empty_prompt", "test_out_of_vocab_token_ids")
"""Tests that start their server themselves, and not in a fixture."""
_TRAINED = "asks for what a trained model answers"
_ENDS = "asks for an answer that ends of itself, which is rare with random weights"
_TOKENS = "counts the tokens of the original model's tokenizer"
_THINKS = "random weights think until the context is full: needs a trained model"
_CHOOSES = "the model has to call a tool of itself: needs a trained model"
_CHAT, _COMPLETION = "openai/chat_completion/test_chat.py::", "openai/completion/test_completion.py::"
_TOOLS = "openai/chat_completion/test_completion_with_function_calling.py::test_function_tool_use"
LEFT_OUT = {f"{_TOOLS}[watermarked-": "vLLM marks texts with Triton, which needs a GPU"}
"""Tests that cannot be asked of `ktft serve`, by the beginning of their name, and why."""
EXPLAINED = {
    f"{_TOOLS}[plain-True-": _THINKS,
    f"{_TOOLS}[plain-False-auto-": _CHOOSES,
    f"{_CHAT}test_more_than_one_prompt_logprobs_chat": "asks that a token of the prompt is the likeliest one",
    f"{_CHAT}test_single_chat_session": _TOKENS,
    f"{_CHAT}test_structured_outputs_json_chat": "random weights write strings of JSON that do not end, or control "
    "characters, which xgrammar allows in them and Python does not read",
    f"{_CHAT}test_response_format_json_object": _TRAINED,
    f"{_CHAT}test_response_format_json_schema": _TRAINED,
    f"{_CHAT}test_complex_message_content": _TRAINED,
    f"{_CHAT}test_custom_role": "ktft refuses roles that OpenAI's API does not have: most chat templates leave such a "
    "message out without a word",
    f"{_COMPLETION}test_single_completion": _TOKENS,
    f"{_COMPLETION}test_batch_completions": "the likeliest answers of random weights are two empty ones",
    "openai/chat_completion/test_chat_echo.py::test_chat_session_with_echo_and_continue_final_message": _ENDS,
    "openai/chat_completion/test_root_path.py::test_chat_session_root_path_with_api_key": _ENDS,
    "openai/test_return_token_ids.py::test_chat_completion_with_tool_use": _CHOOSES,
    "openai/test_return_token_ids.py::test_chat_completion_with_emoji_and_token_ids": _ENDS,
    "openai/chat_completion/test_completion_with_function_calling.py::test_named_tool_use": _THINKS,
    "openai/chat_completion/test_include_reasoning.py::": _THINKS,
    "openai/chat_completion/test_thinking_token_budget.py::test_thinking_token_budget_limits_reasoning": "the model "
    "has to begin to think of itself: needs a trained model",
    "serve/tokenize/test_tokenization.py::test_tokenize_chat_with_tools": "the original model's template shows no "
    "tools; the tiny one's does, with fields that vLLM fills in and the test does not",
}
"""Tests that fail, by the beginning of their name, and why that is no defect of `ktft serve`."""

SPECIAL = (PAD, START, END, "<think>", "</think>", "<tool_call>", "</tool_call>")
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}"
    "{% if tools and loop.first %}\n{{ tools | tojson }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
"""Where Qwen's templates have tools, and what they end with if the model is not to think."""


def write_model(path: Path, texts: Path) -> Path:
    """A tiny checkpoint whose vocabulary has the words of a folder's files: those of the tests fit into the context."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    raw = Tokenizer(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=8192, special_tokens=list(SPECIAL), initial_alphabet=alphabet, show_progress=False
    )
    raw.train([str(file) for file in sorted(texts.glob("*completion/*.py")) + sorted(texts.glob("*.py"))], trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw, eos_token=END, pad_token=PAD, model_max_length=32768)
    tokenizer.chat_template = TEMPLATE
    size = len(tokenizer)
    write_checkpoint("qwen3moe", path, head_dim=32, vocab_size=size, max_position_embeddings=32768)
    tokenizer.save_pretrained(path)
    return path


def prepare(folder: Path, tests: Path) -> dict[str, Any]:
    """Fill a folder in which vLLM's tests find themselves, their models and our shim."""
    shutil.copytree(tests / "tests/entrypoints", folder / "tests/entrypoints")
    (folder / "tests/__init__.py").touch()
    (folder / "tests/utils.py").write_text("from serve_vllm_shim import *\n")
    (folder / "tests/conftest.py").write_text("from serve_vllm_shim import LocalAssetServer, hf_runner\n")
    (folder / "logs").mkdir()
    checkpoint = write_model(
        folder / MODEL, tests / "tests/entrypoints/openai"
    )  # relative to the working directory, the path is a name
    for file in (folder / "tests").rglob("*.py"):
        text = file.read_text()
        file.write_text(re.sub("|".join(f'"{re.escape(name)}"' for name in MODELS), f'"{MODEL}"', text))
    bare = folder / "without-tokenizer"
    shutil.copytree(checkpoint, bare, ignore=shutil.ignore_patterns("tokenizer*", "special*", "chat_template*"))
    return {
        "adapter": str(random_adapter(checkpoint, folder / "adapter")),
        "without_tokenizer": str(bare),
        "logs": str(folder / "logs"),
        "results": str(folder / "results.json"),
        "left_out": LEFT_OUT,
        "in_body": IN_BODY,
    }


def run(folder: Path, files: Sequence[str], settings: dict[str, Any], checkout: Path) -> list[dict[str, str]]:
    """The outcomes of the files' tests."""
    paths = [str(folder), str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | {
        SETTINGS: json.dumps(settings),
        "SERVE_VLLM_CHECKOUT": str(checkout),
        "PYTHONPATH": os.pathsep.join(paths),
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
    }
    command = [sys.executable, "-m", "pytest", "-p", "serve_vllm_shim", "-p", "pytest_asyncio", "-q", "--tb=short"]
    command += ["-p", "no:cacheprovider", "--rootdir", str(folder), *(f"tests/entrypoints/{file}" for file in files)]
    with (folder / "logs/pytest.log").open("w") as output:
        subprocess.run(command, cwd=folder, env=environment, stdout=output, stderr=output)
    results = Path(settings["results"])
    return [json.loads(line) for line in results.read_text().splitlines()] if results.is_file() else []


def explain(record: dict[str, str]) -> None:
    """Give a failed test the reason that is known."""
    if record["outcome"] == "failed":
        for part, reason in EXPLAINED.items():
            if record["test"].startswith(part):
                record |= {"outcome": "explained", "message": reason}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tests", type=Path, required=True, help="a checkout of vLLM")
    parser.add_argument("--only", action="append", help="a file, or a part of its path; again for more")
    parser.add_argument("--stock", action="store_true", help="vLLM's own server instead of ktft's")
    parser.add_argument("--folder", type=Path, help="keep the logs here")
    given = parser.parse_args()
    if importlib.util.find_spec("pytest_asyncio") is None:
        parser.error("pytest-asyncio is missing")
    folder = given.folder or Path(tempfile.mkdtemp(prefix="vllm-tests-"))
    folder.mkdir(parents=True, exist_ok=True)
    settings = prepare(folder.resolve(), given.tests.resolve())
    settings["kind"] = "vllm" if given.stock else "ktft"
    files = [each for each in FILES if not given.only or any(part in each for part in given.only)]
    records = run(folder.resolve(), files, settings, given.tests.resolve())
    columns = ("passed", "explained", "left out", "skipped", "failed", "unit")
    total: Counter[str] = Counter()
    for file in files:
        own = [record for record in records if record["test"].startswith(f"{file}::")]
        for record in own or [{"test": file, "outcome": "failed", "message": f"no test ran: {folder}/logs/pytest.log"}]:
            explain(record)
            total[record["outcome"]] += 1
            if record["outcome"] not in ("passed", "unit"):
                lines = record["message"].strip().splitlines() or [""]
                print(f"    {record['outcome']}: {record['test']}: {lines[0][:300]}")
        counts = Counter(record["outcome"] for record in own)
        print(f"{file}: " + ", ".join(f"{counts[name]} {name}" for name in columns if counts[name]), flush=True)
    print("in all: " + ", ".join(f"{total[name]} {name}" for name in columns if total[name]))
    sys.exit(total["failed"] > 0)


if __name__ == "__main__":
    main()
