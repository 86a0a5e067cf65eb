"""The engines that `ktft serve` can start: one row each."""

from __future__ import annotations

from ktft import versions
from ktft.serve.engine import Engine
from ktft.serve.vllm import command, extra_arguments, families

VLLM = Engine(
    name="vLLM",
    module="ktft.serve.vllm",
    packages=command.PACKAGES,
    families=families.SERVED,
    drafts=families.DRAFTS,
    install=command.install,
    check_extra=extra_arguments.check_extra,
    allowed_origins=extra_arguments.allowed_origins,
    arguments=command.arguments,
    environment=command.environment,
    server_memory=3 << 29,  # Python with torch and vLLM in two processes, beside the one that loads the model
    kv_block=128,
    latent_on_cpu=False,  # `command.environment` turns it off
)

ENGINES = (VLLM,)


def installed() -> Engine:
    """The first engine that is installed, or the first one if none is: its messages say how to install it."""
    found = (each for each in ENGINES if any(versions.version_of(package) for package in each.packages.values()))
    return next(found, ENGINES[0])
