"""Merges shard by shard, in the base model's own layout and formats or with everything dequantized to bf16."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from ktft.adapters.merge_records import Records
from ktft.adapters.merge_weights import BF16, changes_of, write_changed
from ktft.adapters.saved import SavedAdapter
from ktft.checkpoint.cache import read_metadata
from ktft.checkpoint.convert import Output, check_space, copy_files, explained, is_whole
from ktft.checkpoint.files import CRC32, NewTensor, read_json, to_json, write_whole
from ktft.checkpoint.reader import CONFIG_NAME, INDEX_NAME
from ktft.checkpoint.schemes import IGNORED, PLAIN_SCHEME
from ktft.model.load_plan import LoadPlan


class ShardMerge:
    """One merge into plain safetensors, whose `storage` is `same` or `bf16`; each file has the name of its source.

    Raises ValueError if the checkpoint's scheme cannot be written.
    """

    def __init__(self, plan: LoadPlan, adapter: SavedAdapter, target: Path, storage: str, records: Records) -> None:
        self.reader, self.target, self.storage, self.records = plan.backbone.checkpoint, target, storage, records
        self.changes = changes_of(plan, adapter, storage)
        self.shards = [self._shard(file) for file in self.reader.files]

    def _shard(self, file: Path) -> Output:
        entries = sorted((e for e in self.reader.tensors.values() if e.file == file), key=lambda entry: entry.offset)
        new: dict[str, NewTensor | None] = {}
        for change in self.changes:
            if change.dequantized:
                new |= {entry.name: None for entry in change.matrix.parts.values()}
                new[change.matrix.codes.name] = change.tensors()["codes"]
        drop = self.storage == BF16 and self.reader.scheme is not PLAIN_SCHEME
        tensors = [
            new.get(entry.name, NewTensor(entry.name, entry.dtype, entry.shape, entry.nbytes))
            for entry in entries
            if not (drop and IGNORED.search(entry.name))
        ]
        metadata = {key: value for key, value in read_metadata(file).items() if key not in (CRC32, "format")}
        written = tuple(tensor for tensor in tensors if tensor is not None)
        return Output(file.name, written, metadata, sum(entry.nbytes for entry in entries), tuple(entries))

    @property
    def total_bytes(self) -> int:
        """The sum of the bytes that `run` will yield."""
        return sum(shard.source_bytes for shard in self._todo())

    def _todo(self) -> list[Output]:
        return [
            shard
            for shard in self.shards
            if not (self.records.has(shard.name) and is_whole(self.target / shard.name, shard.tensors, shard.metadata))
        ]

    def _left(self) -> int:
        return sum(shard.nbytes for shard in self._todo())

    def run(self) -> Iterator[tuple[str, int]]:
        """Write what is missing. Yields (what was worked on, bytes of the source that are finished).

        Raises ValueError if the source is damaged, or the disk is full. Files that were finished before are kept.
        """
        check_space(self.target, self._left())
        with explained(self.target, self._left):
            for shard in self._todo():
                yield from write_changed(self.target, shard, self.changes, self.reader, self.records)
            self._write_rest()

    def _write_rest(self) -> None:
        source = self.reader.directory
        copy_files(source, self.target)
        index, config = source / INDEX_NAME, source / CONFIG_NAME
        if self.storage != BF16 or self.reader.scheme is PLAIN_SCHEME:
            if index.is_file():
                write_whole(self.target / INDEX_NAME, index.read_bytes())
            return
        write_whole(self.target / CONFIG_NAME, to_json(dequantized_config(read_json(config))))
        if index.is_file():
            weight_map = {tensor.name: shard.name for shard in self.shards for tensor in shard.tensors}
            size = sum(tensor.nbytes for shard in self.shards for tensor in shard.tensors)
            write_whole(self.target / INDEX_NAME, to_json({"metadata": {"total_size": size}, "weight_map": weight_map}))


def dequantized_config(config: dict[str, object]) -> dict[str, object]:
    """The config.json of the same model in bf16."""
    plain = {key: value for key, value in config.items() if key != "quantization_config"}
    for key in ("dtype", "torch_dtype"):
        if key in plain:
            plain[key] = "bfloat16"
    if isinstance(text := plain.get("text_config"), dict):
        plain["text_config"] = dequantized_config(text)
    return plain
