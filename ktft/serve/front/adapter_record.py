"""Which adapter a server serves, on disk, for one that is started again after a crash."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ktft.checkpoint.files import replacing, to_json

Named = tuple[str, str]
"""An adapter: what requests call it, and its directory."""


class NotRecorded(Exception):
    """The adapter has changed, but its record has not. The message is the system's."""


class AdapterRecord:
    """A JSON file: name and directory of an adapter, or null for the base model.

    Args:
        path: of the file; None keeps no record.
    """

    def __init__(self, path: Path | None) -> None:
        self.path = path

    @contextmanager
    def changing(self, adapter: Named | None) -> Iterator[None]:
        """Record `adapter` if the block, which changes it, ends without an exception.

        All that needs room on the disk is done before the block: after it, one name takes another's place.

        Raises:
            OSError: before the block. Nothing has changed.
            NotRecorded: after it. The record is the old one.
        """
        if self.path is None:
            yield
            return
        changed = False
        try:
            with replacing(self.path) as descriptor:
                with open(descriptor, "wb", closefd=False) as file:
                    file.write(to_json(adapter))
                os.fsync(descriptor)
                yield
                changed = True
        except OSError as error:
            if not changed:
                raise
            raise NotRecorded(error.strerror or str(error)) from None

    def read(self) -> Named | None:
        """The adapter that is recorded.

        Raises:
            ValueError: there is no record.
        """
        assert self.path is not None
        try:
            found = json.loads(self.path.read_bytes())
        except (OSError, ValueError) as error:
            raise ValueError(
                f"which adapter was loaded last stands in {self.path}, which cannot be read any more ({error}); start "
                "the server again with --adapter"
            ) from None
        return None if found is None else (str(found[0]), str(found[1]))
