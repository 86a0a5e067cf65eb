"""`ktft merge`: writes a base model with an adapter added to it.

Everything is written into `OUT.merging`, which records the merge that it belongs to, so that the same command goes on
where it stopped and a different one starts over. When the merge is complete, the directory is renamed to OUT.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from transformers import AutoConfig

from ktft.adapters.below import REPORT, merged_into, require_merged
from ktft.adapters.files import CONFIG
from ktft.adapters.merge_packed import MergedConversion
from ktft.adapters.merge_records import Records
from ktft.adapters.merge_shards import ShardMerge
from ktft.adapters.merge_survival import DROWNED, WEAK, GroupOutcome, by_group
from ktft.adapters.merge_weights import BF16, SAME
from ktft.adapters.saved import SavedAdapter, require_untouched_base
from ktft.checkpoint.cache import sha256
from ktft.checkpoint.files import TEMPORARY, read_json, sync_directory, to_json, write_whole
from ktft.checkpoint.identity import identify
from ktft.checkpoint.lock import locked
from ktft.checkpoint.reader import CONFIG_NAME, CheckpointReader
from ktft.config import EXPERT_FORMATS, Settings
from ktft.model.load_plan import LoadPlan
from ktft.model.meta import meta_model

STATE = "merge.unfinished.json"
PACKED = tuple(name for name in EXPERT_FORMATS if name != BF16)
FORMATS = (SAME, BF16, *PACKED)


class Merge:
    """The merge of one base model and one adapter into one directory.

    Args:
        base: a checkpoint as released, not a converted one.
        out: the directory to write; it must be empty or not exist.
        storage: one of `FORMATS`.

    Raises:
        FileNotFoundError, ValueError: the checkpoint or the adapter is damaged or not supported; they do not belong
            together; a tensor is missing or left over; or the format cannot be written.
    """

    def __init__(self, base: Path, adapter: Path, out: Path, storage: str, settings: Settings) -> None:
        self.out, self.storage = out, storage
        self.staging = out.with_name(out.name + ".merging")
        config = AutoConfig.from_pretrained(base)
        self.adapter = SavedAdapter(adapter, config)
        _check_mergeable(self.adapter)
        self.before = merged_into(base)
        if self.adapter.below:
            require_merged(self.adapter.directory, self.adapter.below, base, f"ktft merge {{base}} {adapter} OUT")
        model = meta_model(config)
        files = CheckpointReader.from_directory(base).files
        plan = LoadPlan(model, [str(file) for file in files], settings)
        self.scheme = plan.backbone.checkpoint.scheme
        described = {CONFIG: {"sha256": sha256(self.adapter.directory / CONFIG)}} | identify(self.adapter.file.files)
        self.state = {
            "format": storage,
            "before": self.before,
            "base": identify(files) | {CONFIG_NAME: {"sha256": sha256(base / CONFIG_NAME)}},
            "adapter": described,
        }
        self.records = Records(self.staging)
        self.work: ShardMerge | MergedConversion
        if storage in PACKED:
            self.work = MergedConversion(plan, self.adapter, self.staging, described, self.records)
        else:
            self.work = ShardMerge(plan, self.adapter, self.staging, storage, self.records)

    @contextmanager
    def opened(self) -> Iterator[None]:
        """Lock the directory beside OUT for this merge, and clear it if it belongs to a different merge.

        Raises ValueError if another process works in it or has finished OUT, or if it holds a file that no merge wrote.
        """
        # The lock lies beside the directory, because the directory itself becomes OUT
        with locked(self.staging, "merging", self.staging.with_name(f"{self.staging.name}.ktft-lock")):
            if self.out.is_dir() and any(self.out.iterdir()):
                raise ValueError(f"{self.out} exists; give a new or empty directory, or remove it")
            state = self.staging / STATE
            found = sorted(path.name for path in self.staging.iterdir())
            if found and not state.is_file() and not _ours(self.staging):
                raise ValueError(f"{self.staging} holds {found[0]}, which no merge wrote; move it away")
            if not state.is_file() or state.read_bytes() != to_json(self.state):
                _clear(self.staging)
                write_whole(state, to_json(self.state))
            for path in self.staging.rglob(f"*{TEMPORARY}"):
                path.unlink()
            yield

    def total_bytes(self) -> int:
        """The sum of the bytes that `run` will yield. Call it inside `opened`."""
        return self.adapter.nbytes + self.work.total_bytes

    def run(self) -> Iterator[tuple[str, int]]:
        """Write what is missing. Yields (what was worked on, bytes that are finished).

        Raises ValueError if adapter or base hold NaN, a file is damaged, or the disk is full. Finished files stay.
        """
        for nbytes in self.adapter.check_values():
            yield "checking the adapter", nbytes
        yield from self.work.run()

    def outcomes(self) -> list[GroupOutcome]:
        """How much of the deltas survived, the worst group first."""
        return by_group(self.records.all())

    def publish(self, check: dict[str, Any] | None) -> None:
        """Move everything into place, with a report that has `check`: the merged model beside base and adapter."""
        report = {
            "format": self.storage,
            "adapters": [*self.before, self.state["adapter"]],
            "limits_of_lost": {"weak": WEAK, "drowned": DROWNED},
            "check": check,
            "groups": [group.to_dict() for group in self.outcomes()],
            "weights": {
                outcome.name: {"rounding": outcome.rounding, **outcome.survival.to_dict()}
                for outcome in self.records.all()
            },
        }
        write_whole(self.staging / REPORT, to_json(report))
        self.records.remove()
        (self.staging / STATE).unlink()
        for directory in {path.parent for path in self.staging.rglob("*")}:
            sync_directory(directory)
        os.rename(self.staging, self.out)  # this replaces an empty directory too
        sync_directory(self.out.parent)


def _check_mergeable(adapter: SavedAdapter) -> None:
    """Raise ValueError if the sum of an adapter and the base model's weights is not what was trained."""
    require_untouched_base(adapter)
    tied: Any = adapter.model.all_tied_weights_keys
    for name in (*adapter.whole, *(f"{place.name}.weight" for place in adapter.linears)):
        if name in tied or name in tied.values():
            raise ValueError(
                f"{adapter.file.files[0]} changes {name}, which is tied to another weight (tie_word_embeddings); untie "
                "them in BASE first"
            )


def _clear(directory: Path) -> None:
    """Remove everything except the state. The report, which marks the directory as a merge's, goes last."""
    for path in sorted(directory.iterdir(), key=lambda path: path.name == REPORT):
        if path.is_dir():
            shutil.rmtree(path)
        elif path.name != STATE:
            path.unlink()


def _ours(directory: Path) -> bool:
    """Whether a merge left this directory, killed before it wrote its state or between removing that and the rename."""
    report = directory / REPORT
    if not report.is_file():
        return all(path.name.endswith(TEMPORARY) for path in directory.iterdir())
    try:
        return "limits_of_lost" in read_json(report)
    except (ValueError, TypeError):
        return False
