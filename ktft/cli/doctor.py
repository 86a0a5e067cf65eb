"""The checks of `ktft doctor`: one function per subject, which yields rows of (check, status, value, cure)."""

from __future__ import annotations

import importlib
import importlib.util
import os
import platform
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from ktft import system, versions

if TYPE_CHECKING:
    from ktft.device import Device

Status = Literal["ok", "warn", "fail"]

# Packages that only `ktft train` needs; the Trainer API works without them.
OPTIONAL_PACKAGES = ("llamafactory", "trl", "datasets")
# Launchers set these variables to the number of ranks.
RANK_VARIABLES = ("WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MV2_COMM_WORLD_SIZE")


@dataclass(frozen=True)
class Row:
    """One finding. `cure` says what to do about it and is empty if nothing is to be done."""

    check: str
    status: Status
    value: str
    cure: str = ""


def cpu() -> Iterator[Row]:
    from ktft import native

    features = [name for name, usable in native.cpu_features().items() if usable]
    yield Row("cpu features", "ok", " ".join(features) or "none")
    forced = os.environ.get("KTFT_ISA")
    try:
        isa = native.default_isa()
    except ValueError as error:
        yield Row("isa", "fail", str(error), "unset KTFT_ISA")
        return
    value = f"{isa} (KTFT_ISA={forced})" if forced else isa
    if isa != "scalar":
        yield Row("isa", "ok", value)
    elif forced:
        yield Row("isa", "warn", value, "unset KTFT_ISA: the scalar kernels are for tests")
    else:
        cure = "this CPU has no AVX2: training works, slowly; in a VM, pass the host's CPU through"
        yield Row("isa", "warn", value, cure)


def numa() -> Iterator[Row]:
    from ktft import native

    topology = native.topology()
    nodes, mbind = topology["nodes"], topology["mbind"]
    cores = ", ".join(f"node {node['id']}: {node['cores']} cores" for node in nodes)
    yield Row("numa", "ok", f"{len(nodes)} node{'s' * (len(nodes) > 1)} ({cores})")
    # One node needs no binding, so a refusal has no effect.
    if mbind == "ok" or len(nodes) == 1:
        yield Row("memory binding", "ok", mbind if mbind == "ok" else f"not needed on one node ({mbind})")
    else:
        cure = "docker run --cap-add SYS_NICE, or a seccomp profile that allows mbind; pages stay where first touched"
        yield Row("memory binding", "warn", mbind, cure)
    allowed, quota = len(os.sched_getaffinity(0)), topology["cgroup_cpus"]
    value = f"{allowed} CPUs" + (f", cgroup quota {quota:g}" if quota else ", no cgroup quota")
    few = quota is not None and quota < 2
    cure = "give the container more CPUs: docker run --cpus"
    yield Row("cpu limit", "warn" if few else "ok", value, cure if few else "")


def memory() -> Iterator[Row]:
    sizes, limit = system.memory(), system.cgroup_memory_limit()
    total, available = sizes.get("MemTotal", 0), sizes.get("MemAvailable", 0)
    value = f"{system.readable(total)} in all, {system.readable(available)} available"
    low = available < total // 4
    cure = "end what holds it: the quantized experts must fit in what is available"
    yield Row("memory", "warn" if low else "ok", value, cure if low else "")
    if limit is None or limit >= total:
        yield Row("memory limit", "ok", "none below the host's memory")
    else:
        cure = "the experts must fit below it: docker run --memory, or your scheduler's memory request"
        yield Row("memory limit", "warn", f"cgroup allows {system.readable(limit)}", cure)
    pages = system.transparent_hugepages()
    if pages in ("always", "madvise"):
        yield Row("hugepages", "ok", pages)
    else:
        cure = "echo madvise | sudo tee /sys/kernel/mm/transparent_hugepage/enabled"
        yield Row("hugepages", "warn", pages or "not offered by this kernel", cure if pages else "")


def gpu() -> Iterator[Row]:
    import torch

    from ktft.device import accelerators

    driver = system.read(Path("/proc/driver/nvidia/version"))
    names = [each.name() for each in accelerators()]
    if names:
        yield Row("gpu", "ok", f"{', '.join(names)}, CUDA {torch.version.cuda}")
        if len(names) > 1:
            yield from _links(accelerators())
    elif driver is None:
        yield Row("gpu", "ok", "none: CPU training works")
    elif torch.version.cuda is None:
        cure = "reinstall torch with CUDA: docs/guide/install.md"
        yield Row("gpu", "warn", f"torch {torch.__version__} is a CPU build", cure)
    else:
        cure = "nvidia-smi must list the GPU, with a driver new enough for torch's CUDA; check CUDA_VISIBLE_DEVICES"
        yield Row("gpu", "warn", f"torch {torch.__version__} (CUDA {torch.version.cuda}) sees none; {driver}", cure)


def _links(gpus: list[Device]) -> Iterator[Row]:
    """What processes that train together on these GPUs will have."""
    from ktft.ranks.cores import node_of

    count = len(gpus)
    yield Row("several gpus", "ok", f"llamafactory-cli train starts {count} processes, which share the experts")
    near = [node_of(each.bus_id()) for each in gpus]
    told = ", ".join(f"GPU {at} {'unknown' if node is None else node}" for at, node in enumerate(near))
    yield Row("gpus' numa nodes", "ok", told)
    apart = [(one, other) for one in range(count) for other in range(one + 1, count) if not gpus[one].reaches(other)]
    cure = "nothing must change; tokens go through host memory, which takes longer. nvidia-smi topo -m shows the links"
    if apart:
        pairs = ", ".join(f"{one} and {other}" for one, other in apart)
        yield Row("gpu links", "warn", f"no direct access between GPUs {pairs}", cure)
    else:
        yield Row("gpu links", "ok", "every GPU reaches every other directly")
    library = gpus[0].collectives_version()
    yield Row("collectives", "ok" if library else "fail", f"{gpus[0].collectives} {library or '(missing)'}",
              "" if library else "reinstall torch with CUDA: docs/guide/install.md")  # fmt: skip


def packages() -> Iterator[Row]:
    yield Row("python", "ok", platform.python_version())
    servers = {name: tested for name, tested in versions.TESTED_SERVERS.items() if versions.version_of(name)}
    for name, tested in (versions.TESTED_VERSIONS | servers).items():
        version, cure = versions.version_of(name), versions.pip_install(name)
        if version is None:
            yield Row(name, "warn" if name in OPTIONAL_PACKAGES else "fail", "not installed", cure)
        elif versions.is_within(version, tested):
            yield Row(name, "ok", version)
        else:
            yield Row(name, "fail", f"{version}; tested from {tested[0]} to below {tested[1]}", cure)
    if found := versions.stack():
        yield Row("tested together", "ok", f"{found.name}, for {found.users}")
    else:
        try:
            versions.require_stack()
        except ValueError as error:
            what, _, cure = str(error).partition("; run: ")
            yield Row("tested together", "fail", what, cure)
    for defect in versions.defects():
        yield Row(f"{defect.package} {versions.version_of(defect.package)}", "warn", defect.what, defect.cure)


def hook() -> Iterator[Row]:
    from ktft_autoload import disabled

    found = [point for point in metadata.entry_points(group="torch.backends") if point.name == "ktft"]
    switches = {
        "TORCH_DEVICE_BACKEND_AUTOLOAD": os.environ.get("TORCH_DEVICE_BACKEND_AUTOLOAD") == "0",
        "KTFT_DISABLE": disabled(),
    }
    off = [name for name, set_off in switches.items() if set_off]
    if not found:
        cure = "pip install --force-reinstall --no-deps ktft (in a checkout: make native)"
        yield Row("llamafactory hook", "fail", "ktft's torch.backends entry point is not installed", cure)
    elif off:
        value = ", ".join(f"{name}={os.environ[name]}" for name in off)
        yield Row("llamafactory hook", "fail", f"switched off by {value}", f"unset {' '.join(off)}")
    else:
        yield Row("llamafactory hook", "ok", f"installed: {found[0].value}")


def media() -> Iterator[Row]:
    """Check that torchaudio, and torchvision if installed, fit torch, because LLaMA-Factory imports both."""
    absent: dict[str, Status] = {"torchaudio": "warn", "torchvision": "ok"}
    for name, status in absent.items():
        cure = f"without a GPU: pip install ./ci/stubs/{name} in a ktft checkout; else reinstall {name} to match torch"
        if importlib.util.find_spec(name) is None:
            placeholder = versions.version_of(name) is not None
            value = "a placeholder, enough for text" if placeholder else "not installed"
            yield Row(name, "ok" if placeholder else status, value, "" if placeholder or status == "ok" else cure)
            continue
        try:
            version = importlib.import_module(name).__version__
        except Exception as error:
            # Binaries for another torch, or for CUDA on a CPU torch, fail in many ways inside their own import.
            yield Row(name, "fail", f"does not import: {str(error).splitlines()[0]}", cure)
        else:
            yield Row(name, "ok", version)


def ranks() -> Iterator[Row]:
    several = [f"{k}={os.environ[k]}" for k in RANK_VARIABLES if os.environ.get(k, "1") not in ("", "0", "1")]
    if several:
        yield Row("ranks", "ok", f"{' '.join(several)}: processes that share the experts, if they train")
    else:
        yield Row("ranks", "ok", "one process")


def known_limits() -> Iterator[Row]:
    """List what the tested versions cannot do together, and the alternative to each."""
    from ktft.model.quantizer import check_flash_attention

    trl, transformers = versions.version_of("trl") or "", versions.version_of("transformers") or ""
    if trl.startswith("0.24.") and transformers.startswith("5."):
        value = f"DPOTrainer of trl {trl} cannot be imported, or trained with, beside transformers {transformers}"
        yield Row("trl", "ok", f"{value}; LLaMA-Factory's stage: dpo works, SFTTrainer too")
    try:
        check_flash_attention("flash_attn: fa2")
    except ValueError as error:
        yield Row("flash attention", "ok", str(error))


CHECKS: tuple[Callable[[], Iterator[Row]], ...] = (cpu, numa, memory, gpu, packages, known_limits, hook, media, ranks)


def examine() -> list[Row]:
    """All rows. A check that fails with an error becomes a row, so that the other checks are still shown."""
    rows: list[Row] = []
    for check in CHECKS:
        try:
            rows += check()
        except Exception as error:
            cure = "please report this with the output of ktft doctor --json"
            if isinstance(error, ImportError):
                cure = "make native"
            rows.append(Row(check.__name__, "fail", f"{type(error).__name__}: {error}", cure))
    return rows
