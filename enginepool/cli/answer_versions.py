"""The weight versions in an output file: answers of different weights cannot be compared."""

from collections import Counter
from pathlib import Path

from enginepool.cli.cli_errors import CommandFailed


class AnswerVersions:
    """How many answers of a file come from which weight version, for each group that lines name ("" for lines that name none).

    Args:
        path: what to call the file.
        mixed: several versions of one group are wanted.
    """

    def __init__(self, path: Path, *, mixed: bool) -> None:
        self._path = path
        self._mixed = mixed
        self._lines: Counter[tuple[str, int]] = Counter()

    def note(self, group: str | None, version: int) -> None:
        """An answer of this version is in the file."""
        self._lines[group or "", version] += 1

    def check(self, number: int, group: str | None, version: int) -> None:
        """Raise CommandFailed where the answer to line `number` would mix versions."""
        others = [known for named, known in self._lines if named == (group or "") and known != version]
        if others and not self._mixed:
            raise CommandFailed(
                f"stopped at line {number}: weight version {version} answered it, and {self._path} has answers of version"
                f" {max(others)}; name another output file, or add --mixed-versions (each line has its version)"
            )

    def __str__(self) -> str:
        """The versions with their numbers of lines, where a group has several; else ""."""
        if len(self._lines) == len({named for named, _ in self._lines}):
            return ""
        lines: Counter[int] = Counter()
        for (_, version), count in self._lines.items():
            lines[version] += count
        return ", ".join(f"{count:,} of weight version {version}" for version, count in sorted(lines.items()))
