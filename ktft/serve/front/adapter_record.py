"""A record on disk of the adapters that a server serves, for the server that is started after a crash."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from ktft.checkpoint.files import replacing, to_json

Named = tuple[str, str]
"""An adapter: its name in requests, and its directory."""


class NotRecorded(Exception):
    """The adapters have changed, but their record has not. The message is the operating system's."""


class AdapterRecord:
    """A JSON file with the name and directory of each adapter; there is none without `path`."""

    def __init__(self, path: Path | None) -> None:
        self.path = path

    @contextmanager
    def changing(self, adapters: Iterable[Named]) -> Iterator[None]:
        """Record `adapters` if the block, which changes them, ends without an exception.

        Everything that needs room on the disk happens before the block. After the block one file is renamed.

        Raises:
            OSError: before the block; nothing has changed.
            NotRecorded: after the block; the record is the old one.
        """
        if self.path is None:
            yield
            return
        changed = False
        try:
            with replacing(self.path) as descriptor:
                with open(descriptor, "wb", closefd=False) as file:
                    file.write(to_json(list(adapters)))
                os.fsync(descriptor)
                yield
                changed = True
        except OSError as error:
            if not changed:
                raise
            raise NotRecorded(error.strerror or str(error)) from None

    def read(self) -> tuple[Named, ...]:
        """The adapters that are recorded. Raises ValueError if the record cannot be read."""
        assert self.path is not None
        try:
            return tuple((str(name), str(path)) for name, path in json.loads(self.path.read_bytes()))
        except (OSError, TypeError, ValueError) as error:
            raise ValueError(
                f"{self.path}, which names the adapters that were served, cannot be read any more ({error}); start "
                "the server again with --adapter"
            ) from None
