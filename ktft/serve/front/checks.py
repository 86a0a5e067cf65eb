"""All checks before a server starts. Each failure is one message with both values and the cure."""

from __future__ import annotations

import socket
import sys
from collections.abc import Iterable
from pathlib import Path

from ktft import config, versions
from ktft.serve.engine import Engine, Findings, Options
from ktft.serve.front.door import is_loopback
from ktft.serve.front.headers import check_adapter, check_drafts, check_family, check_routing, read_model
from ktft.serve.front.kv_cache import size_up
from ktft.serve.runtime.settings import ServeSettings


def check(engine: Engine, settings: ServeSettings, options: Options) -> Findings:
    """Check everything, the cheapest first. Raises ValueError or FileNotFoundError, with a message for the user."""
    gpu = check_installed(engine)
    engine.check_extra(options.extra)
    check_keys(options)
    engine.allowed_origins(options.extra)
    check_port(options.host, options.port)
    from ktft import native

    native.check_machine(settings.threads, settings.numa_nodes)
    if not (Path(settings.checkpoint) / "config.json").is_file():
        raise ValueError(f"{settings.checkpoint} is not a directory with a config.json; download the checkpoint first")
    if gpu:
        _check_gpu(engine)
        if settings.speculative_tokens:
            raise ValueError(
                f"--speculative-tokens {settings.speculative_tokens} is for CPUs; ktft was not tested with drafts on a "
                "GPU: leave it out"
            )
    elif settings.gpu_expert_memory or settings.deferral:
        raise ValueError(
            f"--gpu-expert-memory and --deferral need a GPU, and {engine.name} for CPUs is installed; leave them out"
        )
    model = read_model(settings)
    check_family(engine, settings, model)
    check_drafts(engine, settings, model)
    check_routing(settings, model)
    for _, path in settings.adapters:
        check_adapter(settings, model, path)
    max_model_len, kv_cache, more = size_up(engine, settings, options, model, gpu=gpu)
    notes = (*host_notes(options), *key_notes(settings, options), *more)
    return Findings(engine, model.config.model_type, gpu, max_model_len, kv_cache, notes)


def check_installed(engine: Engine) -> bool:
    """Whether the installed engine computes on a GPU. Raises ValueError without one that ktft was tested with."""
    found = [device for device, package in engine.packages.items() if versions.version_of(package)]
    if not found:
        ways = {"gpu": "With a GPU", "cpu": "Without"}
        cures = [f"{ways[device]}: {engine.install(device)}" for device in engine.packages]
        raise ValueError(f"{engine.name} is not installed in {sys.prefix}. {'. '.join(cures)}")
    versions.require_server(engine.packages[found[0]])
    if len(found) > 1:  # one package for both
        return _sees_gpu()
    return found[0] == "gpu"


def _check_gpu(engine: Engine) -> None:
    if not _sees_gpu():
        cure = f" For the CPU: {engine.install('cpu')}" if "cpu" in engine.packages else ""
        raise ValueError(f"{engine.packages['gpu']} is installed, which needs a GPU, but torch sees none.{cure}")


def _sees_gpu() -> bool:
    from ktft.device import accelerator

    return accelerator() is not None


def check_port(host: str, port: int) -> None:
    """Raise ValueError if no server can listen at this address."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
            probe.listen()
    except OSError as error:
        reason = error.strerror or str(error)
        raise ValueError(f"cannot listen at {host}:{port}: {reason}. Give another --port or --host") from None


def check_keys(options: Options) -> None:
    """Raise ValueError if no request could give one of the keys, or if both are the same."""
    for name, key in (("--api-key", options.api_key), ("--admin-key", options.admin_key)):
        if key is not None and not (key.isascii() and key.isprintable() and key.strip() == key):
            raise ValueError(f"{name} has characters that no header of a request can have; give printable ASCII")
    if options.admin_key is not None and options.admin_key == options.api_key:
        raise ValueError("--admin-key is --api-key, so that every user could change the adapter; give another one")


def host_notes(options: Options) -> Iterable[str]:
    """A warning where others can reach the server without a key."""
    if not is_loopback(options.host) and options.api_key is None:
        yield (
            f"--host {options.host} lets other machines use the server, and there is no --api-key: anyone who reaches "
            "it can have it compute, and change its adapter"
        )


def key_notes(settings: ServeSettings, options: Options) -> Iterable[str]:
    """A warning where every user can change what the others get."""
    if options.api_key is not None and options.admin_key is None and settings.adapter_slots:
        yield (
            "whoever has the API key can change the adapter for all others; to keep that to yourself, set a second key "
            f"in the environment as {config.ADMIN_KEY_ENV}"
        )
