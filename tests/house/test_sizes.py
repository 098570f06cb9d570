"""The product is easy to read: short files, short functions, and each class name once."""

import ast
import statistics
from collections import Counter
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
LONGEST_FILE, MEDIAN_FILE, LONGEST_FUNCTION = 350, 120, 60

FILES = {
    path.relative_to(ROOT).as_posix(): path.read_text("utf-8")
    for room in ("enginepool", "protocol", "workers")
    for path in sorted((ROOT / room).rglob("*.py"))
    # `enginepool/protocol` and `enginepool/workers` are links to the other rooms.
    if not any(parent.is_symlink() for parent in path.parents)
}


@cache
def trees() -> dict[str, ast.Module]:
    return {name: ast.parse(text) for name, text in FILES.items()}


def lines(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    return (node.end_lineno or node.lineno) - node.lineno + 1


def test_files_are_short() -> None:
    sizes = {name: text.count("\n") for name, text in FILES.items()}
    assert {name: size for name, size in sizes.items() if size > LONGEST_FILE} == {}
    assert statistics.median(sizes.values()) <= MEDIAN_FILE


def test_functions_are_short() -> None:
    long = [
        f"{name}:{node.lineno} {node.name}: {lines(node)} lines"
        for name, tree in trees().items()
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and lines(node) > LONGEST_FUNCTION
    ]
    assert long == []


def test_a_class_name_is_used_once() -> None:
    names = Counter(node.name for tree in trees().values() for node in ast.walk(tree) if isinstance(node, ast.ClassDef))
    assert [name for name, times in names.items() if times > 1] == []
