"""The engines that `ktft serve` can start: one row each."""

from __future__ import annotations

from ktft import versions
from ktft.serve.engine import Engine
from ktft.serve.sglang import command as sglang_command
from ktft.serve.sglang import extra_arguments as sglang_arguments
from ktft.serve.sglang import families as sglang_families
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

SGLANG = Engine(
    name="SGLang",
    module="ktft.serve.sglang",
    packages=sglang_command.PACKAGES,
    families=sglang_families.SERVED,
    drafts=(),
    install=sglang_command.install,
    check_extra=sglang_arguments.check_extra,
    allowed_origins=sglang_arguments.allowed_origins,
    arguments=sglang_command.arguments,
    environment=sglang_command.environment,
    server_memory=3 << 29,
    kv_block=1,
    latent_on_cpu=True,
)

ENGINES = (VLLM, SGLANG)


def installed() -> Engine:
    """The first engine that is installed, or the first one if none is: its messages say how to install it."""
    found = (each for each in ENGINES if any(versions.version_of(package) for package in each.packages.values()))
    return next(found, ENGINES[0])
