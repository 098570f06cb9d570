"""Who may import whom: the rules that keep the core pure, the rooms apart, each library in one file, and no circles.

Every import counts, also one inside a function, under TYPE_CHECKING, or by `importlib.import_module("name")`. `violations` is a
function of sources, so the tests feed it bad ones and expect the complaint.
"""

import ast
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path, PurePosixPath
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = ("enginepool", "protocol", "workers", "bench", "examples", "tests")
COORDINATOR = "enginepool/coordinator/"

#: Folders whose files decide without sockets, clocks, files or processes: of the coordinator, and of the client.
PURE_FOLDERS = (
    *(f"{COORDINATOR}{name}/" for name in ("core", "operations", "scheduling", "requests", "fleet", "weights")),
    "enginepool/client/session/",
)
#: Pure files elsewhere.
_PURE_OF_WORKERS = (
    "adapter_state",
    "machine",
    "engine",
    "engine_weights",
    "events",
    "draining",
    "ledger",
    "memory_state",
    "prefix_report",
    "silence",
    "texts",
)
PURE = {f"{COORDINATOR}shell/{name}.py" for name in ("adaptive_poll", "decode", "outbox", "peers", "worker_texts")} | {
    f"workers/{name}.py" for name in (*_PURE_OF_WORKERS, "weights/invariants", "weights/machine", "weights/worker_update")
}

#: What would let time, chance, other threads or the outside world into a decision.
CLOCKS = {"datetime", "random", "sched", "secrets", "time", "uuid"}
THREADS = {"asyncio", "concurrent", "multiprocessing", "signal", "subprocess", "threading", "uvloop"}
OUTSIDE = {
    "ctypes",
    "http",
    "importlib",
    "io",
    "logging",
    "os",
    "pathlib",
    "psutil",
    "select",
    "selectors",
    "shutil",
    "socket",
    "sys",
}
IMPURE = CLOCKS | THREADS | OUTSIDE | {"tempfile", "torch", "urllib", "zmq"}
#: The libraries that a pure file may import.
PURE_LIBRARIES = {"msgspec", "numpy"}
NUMERIC = ("protocol/ragged.py", "protocol/columns.py")
#: The rooms that a pure file may import besides the pure files of its own.
PURE_ROOMS = ("enginepool.protocol", "enginepool.errors", "enginepool.config")

#: What workers may import besides their own room: the protocol, this host, the options of sockets, and the files that
#: publisher, stager and engine have in common.
SHARED = (
    "enginepool.protocol",
    "enginepool.conversion",
    "enginepool.errors",
    "enginepool.host",
    "enginepool.net",
    "enginepool.transfer",
)

#: Library -> the only files of the product that may import it.
ONLY = {
    "zmq": {
        "enginepool/client/link.py",
        "enginepool/net/dealer.py",
        "enginepool/net/keys.py",
        f"{COORDINATOR}shell/authentication.py",
        f"{COORDINATOR}shell/connections.py",
        f"{COORDINATOR}shell/link_ids.py",
        f"{COORDINATOR}shell/router.py",
        "workers/link.py",
        "workers/sglang/generate/kv_events.py",
    },
    "sglang": {
        "workers/sglang/host/build.py",
        "workers/sglang/generate/logit_processor.py",
        *(f"enginepool/http/{name}.py" for name in ("build", "manager", "sequence")),
    },
    "openai": {
        "enginepool/cli/chat.py",
        "enginepool/client/blocking.py",
        "enginepool/client/openai_calls.py",
        "enginepool/http/clients.py",
    },
    "httpx": {"enginepool/http/clients.py", "enginepool/http/transport.py"},
    "redis": {"workers/redis_model.py"},
    "transformers": {"enginepool/integrations/trl.py", "workers/sglang/host/process.py"},
    "skyrl": {"enginepool/integrations/skyrl.py"},
}


class Import(NamedTuple):
    """One imported name, as dotted as the source allows: `from a.b import c` is `a.b.c`."""

    name: str
    line: int
    up: int = 0

    def within(self, *packages: str) -> bool:
        """Whether the name is one of these packages or lies in one."""
        return any(self.name == package or self.name.startswith(f"{package}.") for package in packages)


def imports(path: str, tree: ast.Module) -> Iterator[Import]:
    """Every import of a file, relative ones resolved against the name it is imported by."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (Import(alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = [node.module] if node.module else []
            if node.level:
                base = [*package_of(path)[: 1 - node.level or None], *base]
            yield from (Import(".".join([*base, alias.name]), node.lineno, node.level) for alias in node.names)
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if called in ("import_module", "__import__") and isinstance(node.args[0].value, str):
                yield Import(node.args[0].value, node.lineno)


@cache
def imports_of(path: str, source: str) -> list[Import]:
    """Every import of a file, which is parsed once."""
    return list(imports(path, ast.parse(source, path)))


def package_of(path: str) -> list[str]:
    """The package that a file is in, by its import name."""
    parts = list(PurePosixPath(path).parent.parts)
    return ["enginepool", *parts] if parts and parts[0] in ("protocol", "workers") else parts


def module_of(path: str) -> str:
    """The name that a file is imported by."""
    return ".".join([*package_of(path), PurePosixPath(path).stem])


def is_pure(path: str) -> bool:
    """Whether a file must decide without sockets, clocks, chance or processes."""
    return path in PURE or path.startswith(PURE_FOLDERS)


def broken_rule(path: str, found: Import, pure_modules: set[str]) -> str | None:
    """The rule that this import breaks, or None."""
    room = PurePosixPath(path).parts[0]
    product = room in ("enginepool", "protocol", "workers")
    library = found.name.split(".")[0]
    if found.up > 1:
        return "imports across rooms are absolute"
    if found.within("protocol", "workers"):
        return "the bare names protocol and workers are other people's packages"
    libraries = {"msgspec", *sys.stdlib_module_names} | ({"numpy"} if path in NUMERIC else set[str]())
    if room == "protocol" and library not in libraries and not found.within("enginepool.protocol"):
        return "protocol imports msgspec and the standard library, and ragged.py and columns.py numpy, nothing else"
    if room == "workers" and library == "enginepool" and not found.within("enginepool.workers", *SHARED):
        return "workers import enginepool.protocol, the files that they share with others and their own room, nothing else"
    bridge = path == "enginepool/http/build.py" and found.within("enginepool.workers.cpu_bridge")
    allowed = room in ("workers", "tests") or path.startswith("bench/peers") or bridge
    if found.within("enginepool.workers") and not allowed:
        return "none imports workers: they are started as processes"
    if product and found.within("enginepool.integrations") and not path.startswith("enginepool/integrations/"):
        return "none imports the integrations: each needs a library of its own"
    if path.startswith(COORDINATOR) and found.within("enginepool.client", "enginepool.cli"):
        return "the coordinator knows no client"
    if path.startswith((COORDINATOR, "enginepool/client/")) and library in {"torch", "sglang", "transformers"}:
        return "a coordinator host and a client need no torch"
    if product and library in ONLY and path not in ONLY[library]:
        return f"{library} is imported only in {', '.join(sorted(ONLY[library]))}"
    if is_pure(path):
        if library in IMPURE:
            return f"a pure file never imports {library}"
        if library == "enginepool":
            if not found.within(*PURE_ROOMS, *pure_modules):
                return "a pure file imports protocol, errors, config and pure files of its own room"
        elif library not in PURE_LIBRARIES and library not in sys.stdlib_module_names:
            return "a pure file imports numpy, msgspec and the standard library"
    return None


def violations(sources: dict[str, str]) -> list[str]:
    """Every broken rule in these files (path -> text), as `path:line: name: rule`."""
    pure_modules = {module_of(path) for path in sources if is_pure(path)}
    broken: dict[tuple[str, int, str], str] = {}
    collectives: set[str] = set()
    for path, source in sorted(sources.items()):
        for found in imports_of(path, source):
            if rule := broken_rule(path, found, pure_modules):
                broken.setdefault((path, found.line, rule), found.name)
            if found.within("torch.distributed") and not path.startswith(("tests/", "bench/", "examples/")):
                collectives.add(path)
    lines = [f"{path}:{line}: {name}: {rule}" for (path, line, rule), name in broken.items()]
    if len(collectives) > 1:
        lines.append(f"{', '.join(sorted(collectives))}: one file imports torch.distributed")
    return lines


#: The coordinator's entities refer to each other: a request to its group, a group to its requests.
ENTITIES = tuple(f"{COORDINATOR}core/{name}.py" for name in ("request", "worker", "worker_slot"))


def circle(sources: dict[str, str]) -> list[str]:
    """The modules of one circle of imports, each imported by the next, or nothing.

    What these name under TYPE_CHECKING does not count: a package's `__init__`, which is the face of what is loaded when asked
    for, and the files of ENTITIES.
    """
    names = {path: module_of(path).removesuffix(".__init__") for path in sources}
    known = set(names.values())
    graph: dict[str, set[str]] = {}
    for path, source in sources.items():
        every = imports_of(path, source)
        if path.endswith("__init__.py") or path in ENTITIES:
            tree = ast.parse(source, path)
            tree.body = [n for n in tree.body if not (isinstance(n, ast.If) and ast.unparse(n.test) == "TYPE_CHECKING")]
            every = imports(path, tree)
        graph[names[path]] = needed = set[str]()
        for found in every:
            name = found.name if found.name in known else found.name.rpartition(".")[0]
            if name in known and name != names[path]:
                needed.add(name)
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return error.args[1]
    return []


def sources_of_the_house() -> dict[str, str]:
    """Every Python file of the repository once, by its real place: the links in enginepool/ are not followed."""
    found: dict[str, str] = {}
    for top in SOURCES:
        for file in sorted((ROOT / top).rglob("*.py")):
            place = file.relative_to(ROOT).as_posix()
            if not place.startswith(("enginepool/protocol/", "enginepool/workers/")):
                found[place] = file.read_text("utf-8")
    return found


def test_every_file_keeps_the_import_rules() -> None:
    sources = sources_of_the_house()
    assert "protocol/messages/link.py" in sources
    assert "workers/engine.py" in sources
    assert violations(sources) == []


def test_no_modules_import_each_other() -> None:
    """Neither when they run nor for their types."""
    product = {path: source for path, source in sources_of_the_house().items() if not path.startswith(("tests", "bench"))}
    assert circle(product) == []


FACE = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from enginepool.a import A"
CIRCLES = [
    {"enginepool/a.py": "from enginepool import b", "enginepool/b.py": "import enginepool.a"},
    {"enginepool/a.py": "from enginepool.b import B", "enginepool/b.py": "def f():\n    from enginepool.a import A"},
    {"enginepool/a.py": "from .b import B", "enginepool/b.py": FACE},
    {"protocol/a.py": "from enginepool.b import B", "enginepool/b.py": "from enginepool.protocol.a import A"},
    {"enginepool/a.py": "from enginepool.b import c", "enginepool/b/c.py": "from enginepool import a"},
    {"enginepool/a.py": "from enginepool.b import C", "enginepool/b/__init__.py": "from enginepool.a import A"},
]


@pytest.mark.parametrize("sources", CIRCLES)
def test_a_circle_is_found(sources: dict[str, str]) -> None:
    assert {*circle(sources)} == {module_of(path).removesuffix(".__init__") for path in sources}
    assert all(circle({path: source}) == [] for path, source in sources.items())


def test_the_face_of_a_package_may_name_what_it_loads_when_asked() -> None:
    assert circle({"enginepool/__init__.py": FACE, "enginepool/a.py": "from enginepool import __version__"}) == []


def test_the_lists_of_files_name_files_that_exist() -> None:
    """A renamed file would slip out of its rule."""
    named = PURE | {path for paths in ONLY.values() for path in paths}
    assert sorted(path for path in named if not (ROOT / path).is_file()) == []


PURE_FILE = f"{COORDINATOR}core/machine.py"
BAD = [
    ("protocol/frames.py", "import numpy", "protocol imports msgspec"),
    ("protocol/frames.py", "from enginepool.config import Limits", "protocol imports msgspec"),
    ("workers/loop.py", "from enginepool.client import Pool", "workers import enginepool.protocol"),
    ("workers/loop.py", "from enginepool import config", "workers import enginepool.protocol"),
    ("workers/loop.py", "def f():\n    import enginepool.coordinator.core.group", "workers import enginepool.protocol"),
    ("workers/loop.py", "from ..coordinator import group", "across rooms are absolute"),
    ("workers/loop.py", "import zmq.asyncio", "zmq is imported only in"),
    ("workers/machine.py", "from time import monotonic", "never imports time"),
    ("workers/machine.py", "from enginepool.workers.loop import Loop", "pure files of its own room"),
    ("enginepool/client/pool.py", "import enginepool.workers.engine", "none imports workers"),
    ("enginepool/client/pool.py", "from enginepool import workers", "none imports workers"),
    ("enginepool/client/session/machine.py", "import asyncio", "never imports asyncio"),
    ("enginepool/cli/main.py", "import importlib\nimportlib.import_module('enginepool.workers.sim')", "none imports workers"),
    ("enginepool/cli/doctor.py", "def f():\n    import sglang", "sglang is imported only in"),
    ("enginepool/cli/doctor.py", "__import__('zmq')", "zmq is imported only in"),
    ("enginepool/http/build.py", "from enginepool.workers import engine", "none imports workers"),
    ("enginepool/http/manager.py", "from enginepool.workers import cpu_bridge", "none imports workers"),
    ("enginepool/client/openai_calls.py", "def f():\n    import sglang", "need no torch"),
    (f"{COORDINATOR}shell/daemon.py", "from enginepool.client.pool import Pool", "knows no client"),
    (f"{COORDINATOR}shell/daemon.py", "import torch", "need no torch"),
    ("bench/wire.py", "from enginepool.workers.engine import RowPart", "none imports workers"),
    ("enginepool/client/rollout.py", "from enginepool.integrations import trl", "none imports the integrations"),
    ("enginepool/integrations/skyrl.py", "import transformers", "transformers is imported only in"),
    ("tests/core/test_x.py", "import protocol.messages", "other people's packages"),
    (PURE_FILE, "from enginepool.coordinator.shell import daemon", "pure files of its own room"),
    (PURE_FILE, "from ..shell.daemon import Daemon", "across rooms are absolute"),
    (PURE_FILE, "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import random", "never imports random"),
    (PURE_FILE, "import scipy", "numpy, msgspec and the standard library"),
    *[(PURE_FILE, f"def f():\n    import {name}", f"never imports {name}") for name in sorted(IMPURE - {"zmq", "torch"})],
]


@pytest.mark.parametrize(("path", "source", "rule"), BAD)
def test_an_import_against_a_rule_is_found(path: str, source: str, rule: str) -> None:
    assert any(rule in line and line.startswith(f"{path}:") for line in violations({path: source}))


def test_a_second_file_with_collectives_is_found() -> None:
    lazy = "def join():\n    import torch.distributed as dist"
    other = "from torch import distributed"
    assert violations({"workers/stager/stager.py": lazy}) == []
    assert len(violations({"workers/stager/stager.py": lazy, "workers/loop.py": other})) == 1


GOOD = {
    "protocol/frames.py": "import struct\nimport msgspec\nfrom enginepool.protocol import messages",
    "workers/loop.py": "import asyncio\nfrom enginepool import protocol\nfrom enginepool.workers.machine import Machine",
    "workers/machine.py": "import heapq\nfrom enginepool.protocol.messages import Score",
    "workers/link.py": "import zmq",
    "workers/sglang/host/build.py": "def f():\n    import sglang\n    import torch",
    "enginepool/client/session/machine.py": "from enginepool.protocol.errors import CODES",
    "enginepool/http/build.py": "from enginepool.workers import cpu_bridge\nimport torch",
    "enginepool/integrations/trl.py": "import transformers\nfrom enginepool.trainer.publisher import WeightPublisher",
    PURE_FILE: "import bisect\nimport numpy as np\nfrom enginepool.coordinator.core.group import Group\nfrom . import group",
    f"{COORDINATOR}core/group.py": "from enginepool.config import GroupConfig\nfrom enginepool.errors import PoolError",
    f"{COORDINATOR}shell/daemon.py": "import asyncio\nfrom enginepool.coordinator.core.group import Group",
    "bench/peers/direct.py": "from enginepool.workers import engine",
    "tests/core/test_x.py": "import zmq\nimport enginepool.workers.engine",
}


def test_what_the_rules_allow_is_let_through() -> None:
    assert violations(GOOD) == []


def test_importing_the_client_loads_no_engine_and_no_zmq_asyncio() -> None:
    heavy = "{'torch', 'sglang', 'transformers', 'openai', 'zmq.asyncio'}"
    code = f"import sys, enginepool; print(*sorted({heavy} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=ROOT)
    assert (done.returncode, done.stdout.strip(), done.stderr) == (0, "", "")


@pytest.mark.parametrize("name", ["protocol", "workers"])
def test_a_room_refuses_its_bare_name(name: str) -> None:
    done = subprocess.run([sys.executable, "-c", f"import {name}"], capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 1
    assert f"import this package as enginepool.{name}" in done.stderr
