"""The picture of the weights benchmark: how fast each way moves the bytes, and of what the hold consists."""

import importlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple


class Bar(NamedTuple):
    """One way of transfer. `hold`: ms by phase, in their order; empty where they are not known."""

    who: str
    speed: float
    hold: Mapping[str, float]


def draw(path: Path, title: str, bars: Mapping[str, Sequence[Bar]]) -> None:
    """Write the picture: for each setting its bars. The ending of the path names its format."""
    matplotlib: Any = importlib.import_module("matplotlib")
    matplotlib.use("Agg")
    pyplot: Any = importlib.import_module("matplotlib.pyplot")
    figure, places = pyplot.subplots(len(bars), 2, figsize=(12, 1.5 + 2.6 * len(bars)), squeeze=False)
    for (setting, some), (left, right) in zip(bars.items(), places, strict=True):
        left.barh([bar.who for bar in some], [bar.speed for bar in some])
        left.set_xlabel("GB/s")
        left.set_title(f"{setting}: transfer", fontsize="medium")
        held = [bar for bar in some if bar.hold]
        ends = [0.0] * len(held)
        for phase in dict.fromkeys(phase for bar in held for phase in bar.hold):
            parts = [bar.hold.get(phase, 0.0) for bar in held]
            right.barh([bar.who for bar in held], parts, left=ends, label=phase)
            ends = [end + part for end, part in zip(ends, parts, strict=True)]
        right.set_xlabel("ms")
        right.set_title(f"{setting}: hold", fontsize="medium")
        if held:
            right.legend(fontsize="small")
        for axes in (left, right):
            axes.invert_yaxis()
    figure.suptitle(title, fontsize="medium")
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
