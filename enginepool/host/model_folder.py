"""What every folder with a model holds, so that another one is refused before an engine starts. Pool and workers share it."""

from pathlib import Path

#: the one or the other
_CONFIGS = ("config.json", "params.json")


def holds_model(folder: Path) -> bool:
    """Whether there is a model's configuration in `folder`, which exists."""
    return any((folder / name).is_file() for name in _CONFIGS)
