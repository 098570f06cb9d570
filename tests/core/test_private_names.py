"""The table of SGLang's private names: complete, and an installed SGLang that differs from it is refused by name."""

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from enginepool.workers.sglang.host.settings import SettingsError
from enginepool.workers.sglang.patches.private_name import Private
from enginepool.workers.sglang.patches.signature_check import refuse_unknown, unknown
from enginepool.workers.sglang.patches.table import PRIVATE

FOLDER = Path(__file__).parents[2] / "workers" / "sglang"
#: Names of variables and attributes that hold an object, a class or a module of SGLang, in every file.
HOLDERS = {
    "tm",
    "_tm",
    "scheduler",
    "_scheduler",
    "loader",
    "stats",
    "updater",
    "model_updater",
    "message",
    "ports",
    "packed_module",
    "gatherer",
}
#: The same in these files alone.
HOLDERS_IN = {
    "attention.py": {"backend", "batch"},
    "build.py": {"module"},
    "capabilities.py": {"engine"},
    "engine.py": {"engine"},
    "host.py": {"engine"},
    "logit_processor.py": {"req"},
    "new_weights.py": {"media_cache"},
    "packed.py": {"types", "request"},
    "process.py": {"module"},
    "request_limits.py": {"backend", "batch"},
    "requests.py": {"types", "request"},
    "scheduler.py": {
        "module",
        "request",
        "times",
        "last",
        "running",
        "settings",
        "forward",
        "_receiver",
        "memory",
        "tp_worker",
    },
    "updates.py": {"_requests"},
}
#: Of torch and Python, on objects that such variables hold, too.
PUBLIC = {"query", "__module__"}


def uses(source: str, file: str) -> Iterator[tuple[int, str]]:
    """(line, name) of what a source takes from an object of SGLang: attributes, and names of its modules."""
    tree = ast.parse(source)
    holders = HOLDERS | HOLDERS_IN.get(file, set())
    own = {id(method) for node in ast.walk(tree) if isinstance(node, ast.ClassDef) for method in node.body}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and _holds(node.value, holders):
            yield node.lineno, node.attr
        elif (
            isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "getattr" and len(node.args) > 1
        ):
            name = node.args[1]
            if _holds(node.args[0], holders) and isinstance(name, ast.Constant):
                yield node.lineno, str(name.value)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and re.match(r"sglang\.[\w.]+$", node.value):
            yield node.lineno, node.value
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and id(node) not in own and _takes_self(node):
            # Outside of a class it becomes a method of SGLang.
            for inner in ast.walk(node):
                if isinstance(inner, ast.Attribute) and _holds(inner.value, {"self"}):
                    yield inner.lineno, inner.attr


def _takes_self(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    return any(argument.arg == "self" for argument in function.args.args)


def _holds(node: ast.expr, holders: set[str]) -> bool:
    return (isinstance(node, ast.Name) and node.id in holders) or (isinstance(node, ast.Attribute) and node.attr in holders)


def unlisted(source: str, file: str) -> list[str]:
    """Names of SGLang that a source uses and that are missing in the table, each with its line."""
    known = {part for one in PRIVATE for part in (one.module, *one.name.split("."))} | PUBLIC
    return sorted({f"{file}:{line}: {name}" for line, name in uses(source, file) if name not in known})


@pytest.mark.parametrize("path", sorted(FOLDER.rglob("*.py")), ids=lambda path: path.name)
def test_every_name_of_sglang_that_is_used_is_in_the_table(path: Path) -> None:
    if path.name not in ("modules.py", "table.py", "generation_table.py"):  # the table itself
        assert unlisted(path.read_text("utf-8"), path.name) == []


@pytest.mark.parametrize(
    ("source", "file", "found"),
    [
        ("def f(tm):\n    tm._new_queue.clear()", "engine.py", ["engine.py:2: _new_queue"]),
        ("class A:\n    def f(self):\n        return self._tm.secret()", "engine.py", ["engine.py:3: secret"]),
        ("class A:\n    def f(self):\n        return self.secret()", "engine.py", []),
        ("def patch(stats):\n    def g(self, x):\n        self.secret = x\n    stats.__getstate__ = g", "scheduler.py",
         ["scheduler.py:3: secret"]),
        ("x = getattr(scheduler, 'secret', None)", "scheduler.py", ["scheduler.py:1: secret"]),
        ("import importlib\nm = importlib.import_module('sglang.srt.new_place')", "end.py", ["end.py:2: sglang.srt.new_place"]),
        ("def f(tm):\n    return tm.is_generation", "scoring.py", []),
    ],
)  # fmt: skip
def test_a_name_that_is_missing_in_the_table_is_found(source: str, file: str, found: list[str]) -> None:
    assert unlisted(source, file) == found


def test_each_name_says_where_it_is_used_and_why() -> None:
    assert len(set(PRIVATE)) == len(PRIVATE)
    for one in PRIVATE:
        assert one.why and (FOLDER / one.file).is_file()
        word = one.name.rpartition(".")[2].removeprefix("run_scheduler_process").removeprefix("run_detokenizer_process")
        word = word.removeprefix("prefill").removeprefix("decode")  # put together where it is used
        assert word.strip("_") in (FOLDER / one.file).read_text("utf-8"), one


# --- an SGLang that differs --------------------------------------------------------------------------------------------


class Engine:
    declared: int = 0

    def __init__(self) -> None:
        self.queue: list[int] = []

    def run(self, batch: object, *rest: object) -> None: ...


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> Any:
    module: Any = ModuleType("sglang_stand_in")
    module.Engine = Engine
    monkeypatch.setitem(sys.modules, "sglang_stand_in", module)
    return module


def name(of: str, *signatures: str, optional: bool = False) -> Private:
    return Private("engine.py", "sglang_stand_in", of, "called", "a test", signatures, optional)


@pytest.mark.usefixtures("installed")
def test_what_is_as_it_was_tested_is_accepted() -> None:
    same = [
        name("Engine"),
        name("Engine.run", "self", "self, batch, *rest"),
        name("Engine.run", "self, batch, ..."),
        name("Engine.queue"),
        name("Engine.declared"),
        name("Engine.gone", optional=True),
    ]
    assert list(unknown(same)) == []
    refuse_unknown("1.0", same, flashinfer=False)


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(
    ("one", "said"),
    [
        (name("Engine.gone"), r"sglang_stand_in\.Engine\.gone does not exist"),
        (name("Engine.gone", "self"), r"sglang_stand_in\.Engine\.gone does not exist"),
        (name("Gone.run"), r"sglang_stand_in\.Gone\.run does not exist"),
        (name("Engine.run", "self, batch", "self"),
         r"sglang_stand_in\.Engine\.run\(self, batch, \*rest\) has another signature than \(self, batch or self\)"),
        (name("Engine.run", "self, bat, ..."), r".*Engine\.run\(self, batch, \*rest\) has another signature than .*"),
        (Private("engine.py", "gone.place", "f", "called", "a test"), r"gone\.place\.f \(No module .*\) does not exist"),
    ],
)  # fmt: skip
def test_what_is_gone_or_has_another_signature_is_refused_by_name(one: Private, said: str) -> None:
    with pytest.raises(SettingsError, match=rf"^SGLang 9\.9 is not supported: {said}; tested are 0\.5\.17 to 0\.5\.23$"):
        refuse_unknown("9.9", [one], flashinfer=False)
