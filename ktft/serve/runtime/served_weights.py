"""How a server reads a checkpoint: weights around the experts plain, experts packed, with all checks of training."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoConfig

from ktft.checkpoint.reader import CheckpointReader
from ktft.model.load_plan import LoadPlan, check_memory
from ktft.model.meta import meta_model
from ktft.native import ExpertLayer
from ktft.serve.runtime.progress import Progress
from ktft.serve.runtime.served_model import ServedExperts, ServedModel
from ktft.serve.runtime.settings import ServeSettings


class ServedWeights:
    """A whole checkpoint. Its headers are compared with the model that transformers makes of its config.json.

    Attributes:
        layers: layer number -> its experts, without weights until `load_experts`.
        runtime: computes them.

    Raises:
        FileNotFoundError: a shard is missing.
        ValueError: a file is damaged; a tensor is missing, left over or of a wrong shape; ktft does not know the model;
            there is too little memory.
    """

    def __init__(self, settings: ServeSettings) -> None:
        directory = Path(settings.checkpoint)
        model = meta_model(AutoConfig.from_pretrained(directory))
        files = [str(path) for path in CheckpointReader.from_directory(directory).files]
        self._plan = LoadPlan(model, files, settings.experts)
        self._settings = settings
        check_memory(model, self._plan, 0, None)
        self.layers: dict[int, ExpertLayer] = self._plan.layers
        self.runtime = next(iter(self.layers.values())).runtime

    def dense(self, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
        """The weights around the experts, by their names in a plain checkpoint. Quantized ones are decoded to `dtype`.

        Raises:
            ValueError: a weight holds NaN or Inf; the message names file and tensor.
        """
        return self._plan.backbone.read(dtype)

    def load_experts(self, report: Callable[[Progress], None]) -> ServedModel:
        """Read the experts, and pack them unless the checkpoint holds them packed. `report` gets how far this is.

        Raises:
            ValueError: a tensor is damaged; the message names file and tensor.
        """
        title, done, total = self._plan.title, 0, self._plan.experts.nbytes()
        report(Progress(title, done, total))
        for nbytes in self._plan.experts.load(self.layers):
            done += nbytes
            report(Progress(title, done, total))
        bits, dense = self._settings.activation_bits, self._settings.dense_format
        layers = {number: ServedExperts(layer, bits) for number, layer in self.layers.items()}
        return ServedModel(layers, self.runtime, dense)
