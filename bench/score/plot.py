"""The picture of the scoring benchmark: latency against load, a curve for each contestant."""

import importlib
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple


class Point(NamedTuple):
    """Latencies at one load."""

    rate: float
    p50_ms: float
    p99_ms: float


def missing() -> str:
    """What is lacking to draw."""
    return "" if find_spec("matplotlib") else "matplotlib is not installed"


def draw(path: Path, title: str, curves: Mapping[str, Sequence[Point]]) -> None:
    """Write the picture; the ending of the path names its format. Solid is p50, dashed p99."""
    matplotlib: Any = importlib.import_module("matplotlib")
    matplotlib.use("Agg")
    pyplot: Any = importlib.import_module("matplotlib.pyplot")
    figure, axes = pyplot.subplots(figsize=(8, 5))
    for number, (who, points) in enumerate(curves.items()):
        rates = [point.rate for point in points]
        axes.plot(rates, [point.p50_ms for point in points], f"C{number}o-", label=f"{who}, p50")
        axes.plot(rates, [point.p99_ms for point in points], f"C{number}o--", label=f"{who}, p99")
    axes.set_yscale("log")
    axes.set_xlabel("requests/s")
    axes.set_ylabel("latency in ms")
    axes.set_title(title, fontsize="medium")
    axes.grid(True, which="both", alpha=0.3)
    axes.legend(fontsize="small")
    figure.savefig(path, bbox_inches="tight", dpi=120)
    pyplot.close(figure)
