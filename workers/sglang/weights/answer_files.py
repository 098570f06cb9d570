"""Files in which the processes of an engine leave their answers to tickets. No SGLang here."""

import itertools
import tempfile
from pathlib import Path
from typing import Any

import msgspec

from enginepool.host import SHARED, SPARE_BYTES, check_room
from enginepool.host.folders import PrivateFolder
from enginepool.workers.engine import EngineError


class AnswerFiles:
    """They lie in memory, where the host has a place for that with some room. A process that cannot write its answer ends."""

    def __init__(self) -> None:
        self._numbers = itertools.count()
        #: by the folder in which each of them was made
        self._folders: dict[Path, PrivateFolder] = {}

    def name(self, kind: str, count: int) -> list[Path]:
        """Names for `count` answers, which no other ones have. Raises EngineError: there is no room for them."""
        folder = self.folder()
        return [folder / f"{kind}-{next(self._numbers)}" for _ in range(count)]

    def take(self, path: Path) -> dict[str, Any]:
        """What was answered there. The file is removed."""
        answer = msgspec.msgpack.decode(path.read_bytes())
        path.unlink()
        return answer

    def close(self) -> None:
        """Remove the folders."""
        for folder in self._folders.values():
            folder.remove()

    def folder(self) -> Path:
        """Where there is room for one. Raises EngineError."""
        places = SHARED, Path(tempfile.gettempdir())
        for place in places:
            try:
                check_room(place, 0)
                if place not in self._folders:
                    self._folders[place] = PrivateFolder(place, "enginepool-answers-")
                return self._folders[place].path
            except OSError:  # it is missing, or cannot be written
                continue
        needed = f"{SPARE_BYTES >> 20} MiB"
        raise EngineError(f"{places[0]}, {places[1]}: neither can be written and has {needed}, in which the engine answers")
