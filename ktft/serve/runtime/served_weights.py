"""How a server reads a checkpoint: weights around the experts plain, experts packed, with all checks of training."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import chain
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoConfig, PreTrainedConfig

from ktft import native
from ktft.checkpoint.load import any_match
from ktft.checkpoint.reader import CheckpointReader
from ktft.model.dense_memory import PLAIN_ON_GPU, dense_memory, served_dense
from ktft.model.load_plan import LoadPlan, check_memory, has_gpu
from ktft.model.meta import meta_model
from ktft.model.prediction import patterns, prediction_layers, with_prediction
from ktft.model.shape import shape_of
from ktft.model.workload import BF16
from ktft.native import ExpertLayer
from ktft.serve.runtime.progress import Progress
from ktft.serve.runtime.served_model import ServedExperts, ServedModel
from ktft.serve.runtime.settings import ServeSettings


class ServedWeights:
    """A whole checkpoint. Its headers are compared with the model that transformers makes of its config.json.

    Attributes:
        layers: layer number -> its experts, without weights until `load_experts`.
        prediction: the numbers of the layers that draft tokens, if the settings ask for drafts.
        runtime: computes them.

    Raises:
        FileNotFoundError: a shard is missing.
        ValueError: a file is damaged; a tensor is missing, left over or of a wrong shape; ktft does not know the model;
            there is too little memory; or the experts cannot have activations of so many bits here.
    """

    def __init__(self, settings: ServeSettings) -> None:
        directory = Path(settings.checkpoint)
        config = AutoConfig.from_pretrained(directory)
        if settings.speculative_tokens:
            config = with_prediction(config)
        self.prediction = prediction_layers(config)
        model = meta_model(config)
        files = [str(path) for path in CheckpointReader.from_directory(directory).files]
        experts = settings.experts
        if experts.threads is None and has_gpu():
            # One thread gives the GPU its work, where training has several: a step of few tokens is one CUDA graph.
            experts = replace(experts, threads=max(native.topology()["cores"] - 1, 1))
        self._plan = LoadPlan(model, files, experts)
        self._settings = settings
        self.layers: dict[int, ExpertLayer] = self._plan.layers
        _check_bits(next(iter(self.layers.values())), settings.activation_bits)
        check_memory(model, self._plan, 0, None, self._saved(model.config))
        self.runtime = next(iter(self.layers.values())).runtime

    def _saved(self, config: PreTrainedConfig) -> int:
        """Bytes that the weights around the experts take less in `dense_format` than in bf16.

        For a GPU they are read into host memory first, all of them.
        """
        if self._settings.dense_format is None or has_gpu():
            return 0
        shape, _ = shape_of(config)
        choices = PLAIN_ON_GPU, served_dense(self._settings.dense_format)
        plain, packed = (dense_memory(shape, choice, BF16, recorded=False).gpu for choice in choices)
        return plain - packed

    def dense(self, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
        """The weights around the experts, by their names in a plain checkpoint. Quantized ones are decoded to `dtype`.

        Those of prediction layers are left to `dense_of_prediction`.

        Raises:
            ValueError: a weight holds NaN or Inf; the message names file and tensor.
        """
        return self._plan.backbone.read(dtype, lambda name: not any_match(patterns(self.prediction), name))

    def dense_of_prediction(self, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
        """The weights around the experts of prediction layers, otherwise as `dense`."""
        return self._plan.backbone.read(dtype, lambda name: any_match(patterns(self.prediction), name))

    def load_experts(self, report: Callable[[Progress], None]) -> ServedModel:
        """Read the experts, and pack them unless the checkpoint holds them packed. `report` gets how far this is.

        Raises:
            ValueError: a tensor is damaged; the message names file and tensor.
        """
        plan, done = self._plan, 0
        own = {number: layer for number, layer in self.layers.items() if number not in self.prediction}
        further = {number: self.layers[number] for number in self.prediction}
        parts = [(plan.experts, own)] + ([(plan.prediction, further)] if plan.prediction is not None else [])
        total = sum(part.nbytes() for part, _ in parts)
        report(Progress(plan.title, done, total))
        for nbytes in chain.from_iterable(part.load(layers) for part, layers in parts):
            done += nbytes
            report(Progress(plan.title, done, total))
        bits, dense = self._settings.activation_bits, self._settings.dense_format
        layers = {number: ServedExperts(layer, bits) for number, layer in self.layers.items()}
        return ServedModel(layers, self.runtime, dense)


def _check_bits(layer: ExpertLayer, activation_bits: int) -> None:
    """Raise ValueError now, and not in the first request, if this machine or the format has no such activations."""
    none = torch.zeros(0, 1)
    layer.forward(torch.zeros(0, layer.hidden_size), none.long(), none, None, "none", activation_bits)
