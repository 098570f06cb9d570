"""The history of updates, in a file of the state directory: `enginepool weights history` shows it after a restart, too.

It is no part of the journal. No group waits until it is written, and a pool starts without it where it is damaged.
"""

import contextlib
import os
from collections.abc import Mapping
from pathlib import Path

import msgspec

from enginepool.host import write_file
from enginepool.protocol.messages.weight_reports import UpdateRecord


class UpdateHistory:
    """The file `updates.json` in `directory`: the latest updates of each group, oldest first."""

    def __init__(self, directory: Path) -> None:
        self.path = directory / "updates.json"

    def read(self) -> dict[str, list[UpdateRecord]]:
        """The updates by group; none where there is no file.

        Raises:
            OSError: it cannot be read. The error names the file.
            ValueError: it is damaged.
        """
        try:
            return msgspec.json.decode(self.path.read_bytes(), type=dict[str, list[UpdateRecord]])
        except FileNotFoundError:
            return {}
        except msgspec.MsgspecError as error:
            raise ValueError(f"{self.path}: not a history of updates, or damaged: {error}") from None

    def write(self, updates: Mapping[str, msgspec.Raw]) -> None:
        """Replace the content by these lists of records, which are JSON. The old content stays where this fails.

        Raises:
            OSError: it could not be written. The error names the file.
        """
        fresh = self.path.with_suffix(".new")
        try:
            write_file(fresh, msgspec.json.encode(updates))
            os.replace(fresh, self.path)
        except OSError:
            with contextlib.suppress(OSError):  # part of it may be there, and take up the room that is left
                fresh.unlink(missing_ok=True)
            raise
