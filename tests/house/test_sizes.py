"""The product is easy to read: short files, short functions, and each class name once."""

import ast
import statistics
from collections import Counter
from functools import cache
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
LONGEST_FILE, MEDIAN_FILE, LONGEST_FUNCTION = 350, 120, 60

FILES = {
    path.relative_to(ROOT).as_posix(): path.read_text("utf-8")
    for room in ("enginepool", "protocol", "workers")
    for path in sorted((ROOT / room).rglob("*.py"))
    # `enginepool/protocol` and `enginepool/workers` are links to the other rooms.
    if not any(parent.is_symlink() for parent in path.parents)
}


class Definition(NamedTuple):
    """A class or a function, and where it is."""

    name: str
    place: str
    lines: int
    is_class: bool


@cache
def definitions() -> list[Definition]:
    """Those of all files. Trees are not kept: to have them all in memory takes longer than to parse them."""
    return [
        Definition(
            node.name, f"{name}:{node.lineno}", (node.end_lineno or node.lineno) - node.lineno + 1, type(node) is ast.ClassDef
        )
        for name, text in FILES.items()
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
    ]


def test_files_are_short() -> None:
    sizes = {name: text.count("\n") for name, text in FILES.items()}
    assert {name: size for name, size in sizes.items() if size > LONGEST_FILE} == {}
    assert statistics.median(sizes.values()) <= MEDIAN_FILE


def test_functions_are_short() -> None:
    long = [
        f"{one.place} {one.name}: {one.lines} lines"
        for one in definitions()
        if not one.is_class and one.lines > LONGEST_FUNCTION
    ]
    assert long == []


def test_a_class_name_is_used_once() -> None:
    names = Counter(one.name for one in definitions() if one.is_class)
    assert [name for name, times in names.items() if times > 1] == []
