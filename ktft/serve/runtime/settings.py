"""What a server's processes must know of the model, its experts and its adapter: a JSON text in the environment."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from ktft.config import MAX_ADAPTERS, SERVE_ENV, Settings, serve_settings, unknown_key
from ktft.lora import MAX_RANK

ACTIVATION_BITS = (16, 8)
SERVED_DENSE_FORMATS = ("int8", "k4")
MOST_DRAFTS = 8
"""A layer that was trained to draft one token is rarely right about more."""
GRAPH_TOKENS = 32
"""Tokens of the largest call that a CUDA graph captures: decode's largest batch."""


@dataclass(frozen=True)
class ServeSettings:
    """How a model is served.

    Attributes:
        checkpoint: directory with config.json and all weights; those of the routed experts may be elsewhere.
        expert_checkpoint, expert_format, threads, numa_nodes, isa, verify_checksums, gpu_expert_memory: as those of
            `ktft.config.Settings`.
        dense_format: the format of the linear weights around the experts, one of `SERVED_DENSE_FORMATS`; None leaves
            them in the model's dtype.
        adapters: the adapters that are served from the start: what requests call each, and its directory.
        adapter_swap: whether adapters may be loaded and unloaded while the server runs.
        max_adapters: how many adapters may be served at once, beside the base; None takes
            `ktft.config.MAX_ADAPTERS`.
        max_lora_rank: the largest rank of adapters' dense layers, for which memory is set aside.
        activation_bits: 16; or 8, faster and less exact, see `ktft.native.ExpertLayer.forward` and `HostDense`.
        routing: file with each expert's count of tokens, which chooses the experts that stay on a GPU from the start;
            None lets traffic choose them.
        speculative_tokens: how many tokens the model's own prediction layer drafts a step, on a CPU; 0 for none.
        deferral: how many of a token's experts, those with the least weight, decode may add one layer late.
        status_path: file in which the server says how far loading is, see `ktft.serve.runtime.progress`; None writes
            none.
        served_name: what requests call the base; None takes the checkpoint directory's name.
        swap_timeout: seconds that requests wait for a change of the adapter, and that a change waits for the requests
            in flight.
        hosts, origins: as those of `ktft.serve.front.door.Door`.
        parent: number of the process with which the server ends; None lets it outlive any.

    Raises:
        ValueError: a value is not among those accepted.
    """

    checkpoint: str
    expert_checkpoint: str | None = None
    expert_format: str | None = None
    threads: int | None = None
    numa_nodes: int | None = None
    isa: str | None = None
    verify_checksums: bool = True
    gpu_expert_memory: int | str = 0
    dense_format: str | None = None
    adapters: tuple[tuple[str, str], ...] = ()
    adapter_swap: bool = False
    max_adapters: int | None = None
    max_lora_rank: int = 64
    activation_bits: int = 16
    routing: str | None = None
    speculative_tokens: int = 0
    deferral: int = 0
    status_path: str | None = None
    served_name: str | None = None
    swap_timeout: float = 60.0
    hosts: tuple[str, ...] = ()
    origins: tuple[str, ...] = ()
    parent: int | None = None

    def __post_init__(self) -> None:
        for name in ("hosts", "origins"):  # lists if they come from JSON
            object.__setattr__(self, name, tuple(getattr(self, name)))
        object.__setattr__(self, "adapters", tuple((name, path) for name, path in self.adapters))
        object.__setattr__(self, "gpu_expert_memory", self.experts.gpu_expert_memory)
        if self.activation_bits not in ACTIVATION_BITS:
            raise ValueError(f"activation_bits is {self.activation_bits!r}; supported: 16 and 8")
        if self.dense_format not in (None, *SERVED_DENSE_FORMATS):
            raise ValueError(
                f"dense_format is {self.dense_format!r}; a server takes {' or '.join(SERVED_DENSE_FORMATS)}, or none "
                "for bf16. FP8 as released is decoded to the same values in bf16"
            )
        if type(self.max_lora_rank) is not int or not 1 <= self.max_lora_rank <= MAX_RANK:
            raise ValueError(f"max_lora_rank is {self.max_lora_rank!r}; give a whole number from 1 to {MAX_RANK}")
        drafts = self.speculative_tokens
        if type(drafts) is not int or not 0 <= drafts <= MOST_DRAFTS:
            raise ValueError(
                f"speculative_tokens is {drafts!r}; give a whole number from 0, for none, to {MOST_DRAFTS}"
            )
        if type(self.deferral) is not int or self.deferral < 0:
            raise ValueError(f"deferral is {self.deferral!r}; give a whole number of experts, 0 for none")
        if not 0 < self.swap_timeout < float("inf"):
            raise ValueError(f"swap_timeout is {self.swap_timeout!r}; give seconds, more than 0")
        self._check_adapters()
        paths = [("checkpoint", self.checkpoint, "directory"), ("routing", self.routing, "file")]
        for name, path, kind in (*paths, *(("adapter", path, "directory") for _, path in self.adapters)):
            if path is not None and not (Path(path).is_dir() if kind == "directory" else Path(path).is_file()):
                raise ValueError(f"{name} is {str(path)!r}, which is not a {kind}")

    def _check_adapters(self) -> None:
        asked, count = self.max_adapters, len(self.adapters)
        if asked is not None and (type(asked) is not int or asked < 1):
            raise ValueError(f"max_adapters is {asked!r}; give a whole number, 1 or more")
        if count > self.most_adapters:
            raise ValueError(f"there are {count} adapters, --max-adapters is {self.most_adapters}; give {count}")
        names = [self.base_name, *(name for name, _ in self.adapters)]
        if twice := [name for name in names if names.count(name) > 1]:
            raise ValueError(
                f"{names.count(twice[0])} models are called {twice[0]!r}, so that no request could tell them apart; "
                "give --adapter NAME=DIRECTORY or --served-model-name"
            )

    @property
    def base_name(self) -> str:
        """The name by which requests ask for the base model."""
        return self.served_name or Path(self.checkpoint).resolve().name

    @property
    def most_adapters(self) -> int:
        """How many adapters are served at once."""
        return self.max_adapters or MAX_ADAPTERS

    @property
    def adapter_places(self) -> int:
        """For how many adapters a GPU has memory: one more, so that a new one can take the place of another."""
        return self.most_adapters + self.adapter_swap

    @property
    def adapter_file(self) -> Path | None:
        """The file that names the adapters that are served; see `ktft.serve.front.adapter_record`."""
        return None if self.status_path is None else Path(self.status_path).with_name("adapter.json")

    @property
    def adapter_slots(self) -> bool:
        """Whether the model has room for adapters."""
        return self.adapter_swap or bool(self.adapters)

    @property
    def experts(self) -> Settings:
        """The settings that training has too, checked as there."""
        return Settings(
            expert_format=self.expert_format,
            threads=self.threads,
            numa_nodes=self.numa_nodes,
            expert_checkpoint=self.expert_checkpoint,
            verify_checksums=self.verify_checksums,
            isa=self.isa,
            gpu_expert_memory=self.gpu_expert_memory,
        )

    def to_env(self) -> dict[str, str]:
        """The environment variable that carries these settings to the server's processes."""
        return {SERVE_ENV: json.dumps(asdict(self))}

    @classmethod
    def from_env(cls, environment: Mapping[str, str] | None = None) -> ServeSettings:
        """The settings in this process's environment, or in the one given. Raises ValueError if absent or damaged."""
        text = serve_settings(os.environ if environment is None else environment)
        if text is None:
            raise ValueError(f"{SERVE_ENV} is not set; start the server with ktft serve, which sets it")
        try:
            values = json.loads(text)
        except ValueError as error:
            raise ValueError(f"{SERVE_ENV} is not JSON: {error}") from None
        if not isinstance(values, dict) or "checkpoint" not in values:
            raise ValueError(f"{SERVE_ENV} is {text!r}; it must be a JSON object with at least checkpoint")
        known = tuple(field.name for field in fields(cls))
        for key in values:
            if key not in known:
                raise unknown_key(key, known, f"{SERVE_ENV}.{key}")
        return cls(**values)
