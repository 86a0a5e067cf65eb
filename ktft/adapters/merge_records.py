"""Outcomes of finished files, kept beside them until the merge is complete, so a restart does not measure again."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

from ktft.adapters.merge_survival import Outcome
from ktft.checkpoint.files import read_json, to_json, write_whole

SUFFIX = ".merged.json"


class Records:
    """One JSON file for each safetensors file of a directory. A record is written before its file appears."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def write(self, file: str, outcomes: list[Outcome]) -> None:
        """Keep the outcomes of a file, whose name is relative to the directory."""
        write_whole(self.directory / (file + SUFFIX), to_json([asdict(outcome) for outcome in outcomes]))

    def has(self, file: str) -> bool:
        """Whether a file's record is there and can be read."""
        try:
            self._read(self.directory / (file + SUFFIX))
        except (OSError, ValueError, KeyError, TypeError, IndexError):
            return False
        return True

    def all(self) -> list[Outcome]:
        """The outcomes of all files, in the order of the files' names."""
        return [outcome for path in self._paths() for outcome in self._read(path)]

    def remove(self) -> None:
        """Delete the records once the merge is complete."""
        for path in self._paths():
            path.unlink()

    def _paths(self) -> list[Path]:
        return sorted(self.directory.rglob(f"*{SUFFIX}"))

    @staticmethod
    def _read(path: Path) -> list[Outcome]:
        return [Outcome.from_dict(values) for values in read_json(path)]
