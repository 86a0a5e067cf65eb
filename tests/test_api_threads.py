"""`llamafactory-cli api` and clients that disconnect: their generations go on in threads, beside later ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest
from api import api_server
from forked import Forks
from given import Checkpoint


def request(number: int, **options: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": f"add {number} and {3 * number}"}]
    return {"model": "ktft", "messages": messages, "do_sample": False, "max_tokens": 12} | options


@pytest.mark.parametrize("leaving", [2, pytest.param(20, marks=pytest.mark.full)])
def test_disconnected_clients_do_not_change_later_answers(
    tiny_checkpoint: Checkpoint, forks: Forks, tmp_path: Path, leaving: int
) -> None:
    """Each token has two experts, whose sum has the same bits in whichever order the lanes add them."""
    settings = {
        "model_name_or_path": str(tiny_checkpoint("dsv3")),
        "template": "default",
        "use_kt": True,
        "kt_config": {"expert_format": "bf16", "threads": 1, "placement": "stream"},
    }

    def ask(client: httpx.Client, number: int) -> str:
        reply = client.post("/v1/chat/completions", json=request(number)).raise_for_status().json()
        content: str = reply["choices"][0]["message"]["content"]
        return content

    with api_server(forks, tmp_path, settings, KTFT_EMULATE_GPU="1") as client:
        undisturbed = [ask(client, number) for number in range(4)]
        assert len(set(undisturbed)) > 1
        for number in range(leaving):
            body = request(number, stream=True, max_tokens=40)
            with client.stream("POST", "/v1/chat/completions", json=body) as stream:
                lines = stream.iter_lines()
                for _ in range(3):
                    next(lines)
            assert ask(client, number % 4) == undisturbed[number % 4], f"after {number + 1} clients left"
