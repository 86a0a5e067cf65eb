"""A fake engine for tests of `ktft.serve.front`: its row. `fake_server.py` is its server."""

from __future__ import annotations

import json

from ktft.serve.engine import Engine

FAKE = Engine(
    name="Fake",
    module="fake_server",
    packages={"cpu": "fake-server"},
    drafts=(),
    families=("qwen3_moe",),
    install=lambda device: f"pip install fake-server for the {device}",
    check_extra=lambda extra: None,
    allowed_origins=lambda extra: tuple(json.loads(extra[-1])) if extra else (),
    arguments=lambda settings, options, found: ["--port", str(options.port), *options.extra],
    environment=lambda given, settings, found: {
        **given,
        "FAKE_NAME": ",".join(name for name, _ in settings.adapters) or "base",
    },
    server_memory=1 << 20,
    kv_block=64,
    latent_on_cpu=True,
)
