"""What the pages say is so: their programs run, their commands are known, their files parse, their links lead somewhere.

`markdown.py` says how a comment before a block changes what is done with it.
"""

import ast
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import get_type_hints

import pytest

from enginepool.config_loader import load_config
from enginepool.protocol.messages import GroupStatus, StatusReport, WorkerStatus
from tests.house import markdown
from tests.house.markdown import Block
from tests.process.forking import ForkedProcess, file_command
from tests.process.processes import Processes

ROOT = Path(__file__).parents[2]
#: Folders of the repository that hold no pages and no text of ours.
ELSEWHERE = {"build", "dist", "node_modules", "__pycache__", "enginepool.egg-info"}

#: A console command -> why this test does not run it. Every other command is run.
NOT_RUN_HERE = {
    "make": "needs an environment of its own; prints the list that the Makefile holds",
    "make demo": "takes minutes on a new machine; the demo has tests of its own",
    "make test": "it is what runs this test",
    'pip install "enginepool[sglang]"': "needs a CUDA GPU; test_packaging reads what the extra asks for",
    'pip install "enginepool[openai]"': "needs a CUDA GPU; test_packaging reads what the extra asks for",
    'pip install "enginepool[trl]"': "needs a package index; test_packaging reads what the extra asks for",
    'echo "Hello" | enginepool chat --max-tokens 20': "imports SGLang; tests/engine/test_openai.py runs it in less time",
    "pip install enginepool": "needs a package index; test_packaging builds and imports the wheel",
}

#: A console command -> how this test runs it: without GPUs, and where the page's pool listens.
RUN_AS = {
    "enginepool serve --model Qwen/Qwen3-0.6B --workers 2 &": (
        "enginepool serve --model Qwen/Qwen3-0.6B --workers 2 --engine sim --listen $ENGINEPOOL_ADDRESS --state-dir state &"
    ),
}


def files(*suffixes: str) -> list[Path]:
    """The repository's own files with one of these suffixes (all if none), each by its real place once."""
    found: list[Path] = []
    for folder, folders, names in os.walk(ROOT):
        folders[:] = sorted(f for f in folders if f not in ELSEWHERE and (f == ".ci" or not f.startswith(".")))
        folders[:] = [name for name in folders if not (Path(folder) / name).is_symlink()]
        found += [Path(folder) / name for name in sorted(names) if not suffixes or name.endswith(suffixes)]
    return [file for file in found if not file.is_symlink()]


PAGES = [file.relative_to(ROOT).as_posix() for file in files(".md")]


def page(name: str) -> str:
    return (ROOT / name).read_text("utf-8")


def blocks_in(language: str) -> list[tuple[str, Block]]:
    return [(name, block) for name in PAGES for block in markdown.blocks(page(name)) if block.language == language]


def named(cases: list[tuple[str, Block]]) -> list[object]:
    return [pytest.param(name, block, id=f"{name}:{block.line}") for name, block in cases]


def lay_out(name: str, folder: Path, listen: str = "") -> None:
    """Write the files that a page shows, so that its commands and programs find them. A pool that does not say where it listens
    does so at `listen`."""
    for block in markdown.blocks(page(name)):
        if block.key == "file":
            assert re.fullmatch(r"[\w.-]+", block.value), f"{name}:{block.line}: a plain file name, not {block.value!r}"
            open_pool = listen and block.value.startswith("pool") and "listen" not in tomllib.loads(block.text)
            (folder / block.value).write_text(f'listen = "{listen}"\n' * bool(open_pool) + block.text, "utf-8")


#: The page whose program is started as a reader starts it. The others run in processes that have imported what they need.
AS_USERS_RUN_IT = "docs/scoring.md"


#: Starts the ranks of a trainer by `fork`, and what a rank starts is forked, too.
FORKS_RANKS = """
import runpy, sys
import torch.multiprocessing
from tests.process import forking

def spawn(main, args, nprocs):
    def rank(number, *args):
        forking.fork_what_is_started()
        main(number, *args)

    torch.multiprocessing.start_processes(rank, args, nprocs, start_method="fork")

torch.multiprocessing.spawn = spawn
runpy.run_path(sys.argv[1], run_name="__main__")
"""


def run_forked(processes: Processes, command: list[str], folder: Path, preloaded: str = "tests.process.preloaded") -> None:
    """Run a command as `run` does."""
    output = folder / "output.txt"
    with output.open("wb") as file:
        process = ForkedProcess(command, preloaded, cwd=folder, stdout=file, stderr=file, start_new_session=True)
        status = processes.keep(process).wait(240)
    assert status == 0, f"{command[-1]}\n{output.read_text('utf-8', 'replace')}"


def run(processes: Processes, command: list[str], folder: Path, **variables: str) -> None:
    """Run in a folder and a process group of its own, with this environment's commands first on PATH."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, **variables}
    output = folder / "output.txt"
    with output.open("wb") as file:
        process = processes.start(command, cwd=folder, env=environment, stdout=file, stderr=file, start_new_session=True)
        try:
            status: int | str = process.wait(timeout=240)
        except subprocess.TimeoutExpired:
            status = "still running after 240 s"
    assert status == 0, f"{command[-1]}\n{output.read_text('utf-8', 'replace')}"


def programs(*, model: bool) -> list[object]:
    """The programs on pages, those that load a real model or the others."""
    return named([(name, block) for name, block in blocks_in("python") if (block.key == "model") == model])


@pytest.mark.parametrize(("name", "block"), programs(model=False))
def test_a_program_on_a_page_runs(processes: Processes, name: str, block: Block, tmp_path: Path) -> None:
    """One that needs a GPU or a pool that runs already is only parsed, and its page says why in a comment. Those that load a
    real model run in `tests/engine/test_examples.py`."""
    compile(block.text, f"{name}:{block.line}", "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    if block.key == "only parsed":
        assert block.value, f"{name}:{block.line}: only parsed, and no reason given"
        return
    lay_out(name, tmp_path)
    (tmp_path / "program.py").write_text(block.text, "utf-8")
    if name == AS_USERS_RUN_IT:
        run(processes, [sys.executable, "program.py"], tmp_path)
    else:
        run_forked(processes, file_command(tmp_path / "program.py"), tmp_path)


@pytest.mark.parametrize(("name", "block"), named(blocks_in("toml")))
def test_a_toml_file_on_a_page_is_what_the_loader_takes(name: str, block: Block, tmp_path: Path) -> None:
    tomllib.loads(block.text)
    if block.key == "file" and block.value.startswith("pool"):
        lay_out(name, tmp_path)
        load_config(tmp_path / block.value)


@pytest.mark.parametrize("example", [file.name for file in sorted((ROOT / "examples").glob("*.toml"))])
def test_an_example_configuration_is_what_the_loader_takes(example: str) -> None:
    load_config(ROOT / "examples" / example)


def test_the_example_of_a_trainer_of_several_ranks_runs(processes: Processes, tmp_path: Path) -> None:
    example = ROOT / "examples" / "trainer_ranks.py"
    run_forked(processes, [sys.executable, "-c", FORKS_RANKS, str(example)], tmp_path)
    # A worker that is not ready yet is no member of the update; it starts with the committed weights.
    assert re.search(r"^version 3 on [12] workers, 1024 bytes$", (tmp_path / "output.txt").read_text("utf-8"), re.MULTILINE)


def test_the_example_of_a_reranker_runs(processes: Processes, tmp_path: Path) -> None:
    run(processes, [sys.executable, str(ROOT / "examples" / "rerank.py")], tmp_path, PYTHONPATH=str(ROOT))
    said = (tmp_path / "output.txt").read_text("utf-8")
    assert "Paris is the capital of France." in said
    assert "items[0]: no separator token 2 between query and item" in said


@pytest.mark.parametrize("name", sorted({name for name, _ in blocks_in("console")}))
def test_the_commands_on_a_page_run_in_order(processes: Processes, name: str, tmp_path: Path) -> None:
    """All in one shell and one folder, as a reader would type them; what was left in the background ends with the shell.

    Their pool listens in that folder: where pools usually do, another one of this host may.
    """
    address = f"ipc://{tmp_path}/pool.sock"
    lay_out(name, tmp_path, address)
    typed = [command for page_, block in blocks_in("console") if page_ == name for command in markdown.commands(block)]
    assert typed, f"{name}: a console block without a line that begins with '$ '"
    script = ["set -euo pipefail", "trap 'kill $(jobs -p) 2>/dev/null || true; wait' EXIT"]
    script += [RUN_AS.get(command, command) for command in typed if command not in NOT_RUN_HERE]
    run(processes, ["bash", "-c", "\n".join(script)], tmp_path, ENGINEPOOL_ADDRESS=address, PYTHONPATH=str(ROOT))


def test_every_block_says_its_language() -> None:
    """A block without a language escapes these tests; `text` says that it is meant to."""
    known = {"console", "python", "toml", "text", "json", "jsonl", "mermaid"}
    unknown = [f"{n}:{b.line}: {b.language!r}" for n in PAGES for b in markdown.blocks(page(n)) if b.language not in known]
    assert unknown == []


def test_every_link_leads_to_a_file_and_a_heading_that_exist() -> None:
    broken: list[str] = []
    for name in PAGES:
        for target in markdown.links(page(name)):
            if re.match(r"[a-z]+:", target):
                continue
            place, _, anchor = target.partition("#")
            file = (ROOT / name).parent / place if place else ROOT / name
            if not file.exists() or (anchor and anchor not in markdown.anchors(file.read_text("utf-8"))):
                broken.append(f"{name}: {target}")
    assert broken == []


def test_every_path_that_a_page_maps_or_names_exists() -> None:
    rooms = tuple(f"{room}/" for room in ("enginepool", "protocol", "workers", "tests", "bench", "requirements", ".ci"))
    missing: list[str] = []
    for name in PAGES:
        text = page(name)
        paths = [path for block in markdown.blocks(text) if block.key == "map" for path in markdown.mapped_paths(block)]
        paths += [code for code in markdown.code_spans(text) if code.startswith(rooms) and re.fullmatch(r"[\w./-]+", code)]
        missing += [f"{name}: {path}" for path in paths if not (ROOT / path).exists()]
    assert missing == []


def rows_after(comment: str) -> list[list[str]]:
    """What is set as code in the first cell of each row of the table after a comment on the operators' page."""
    lines = page("docs/operations.md").partition(f"<!-- {comment} -->\n")[2].split("\n\n")[0].splitlines()
    assert len(lines) > 2, f"no table after {comment}"
    return [re.findall(r"`([^`]+)`", line.split("|")[1]) for line in lines[2:]]


@pytest.mark.parametrize("struct", [StatusReport, GroupStatus, WorkerStatus], ids=lambda struct: struct.__name__)
def test_the_page_of_operators_tells_the_meaning_of_every_field_of_the_status(struct: type) -> None:
    named = [name for row in rows_after(f"fields: {struct.__name__}") for name in row]
    assert sorted(named) == sorted(get_type_hints(struct))


def test_the_log_lines_that_the_page_of_operators_explains_are_in_the_code() -> None:
    sources = "".join(file.read_text("utf-8") for file in files(".py") if "coordinator" in file.parts)
    lines = [line for row in rows_after("log lines") for line in row]
    pieces = [piece.strip(" :;,") for line in lines for piece in line.split("…")]
    missing = [piece for piece in pieces if len(piece) > 3 and piece not in sources]
    assert missing == []


def methods_of(path: str, class_: str) -> set[str]:
    """The names of the methods of a class, without importing it."""
    tree = ast.parse((ROOT / path).read_text("utf-8"))
    classes = {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}
    assert class_ in classes, f"{path} has no class {class_}"
    return {node.name for node in classes[class_].body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}


def test_the_methods_that_the_map_names_are_in_the_files_that_it_names() -> None:
    block = next(block for block in markdown.blocks(page("README.md")) if block.key == "map")
    lines = [line for line in block.text.splitlines() if line.strip()]
    named = [
        (path, *method)
        for path, line in zip(markdown.mapped_paths(block), lines, strict=True)
        if path.endswith(".py")
        for method in re.findall(r"\b([A-Z]\w+)\.(\w+)", line)
    ]
    assert len(named) >= 2
    for path, class_, method in named:
        assert method in methods_of(path, class_), f"README.md: {path} has no {class_}.{method}"


@pytest.mark.parametrize(
    ("heading", "path", "class_"),
    [
        ("Add an operation", "enginepool/coordinator/operations/base.py", "Operation"),
        ("Add an operation", "workers/sglang/operations/base.py", "RowOperation"),
        ("Add an engine", "workers/engine.py", "Engine"),
        ("Add an engine", "workers/engine_weights.py", "EngineWeights"),
    ],
)
def test_the_interface_that_a_page_tells_to_implement_has_these_methods(heading: str, path: str, class_: str) -> None:
    section = page("docs/extending.md").partition(f"## {heading}\n")[2].partition("\n## ")[0]
    table = re.search(rf"`{class_}`.*?\n((?:\|[^\n]*\n)+)", section, flags=re.DOTALL)
    named = set(re.findall(r"^\| `(\w+)` \|", table[1], flags=re.MULTILINE)) if table else set[str]()
    assert named
    assert named <= methods_of(path, class_)


#: What holds on one machine alone. An address such as ipc:///tmp/pool is what a user types, and fine.
MACHINE = re.compile(r"(?<![\w.])/(?:work|root|home|Users|workspace|opt)/|(?<![\w.])(?<!ipc://)/tm[p]/")
REGISTRY = re.compile(
    r"pypi\.org|pythonhosted\.|download\.pytorch\.|npmjs\.|registry\.[a-z]|index-ur[l]|--find-link[s]|docker\.io|ghcr\.io"
)


def test_no_file_names_a_place_on_one_machine_or_a_registry() -> None:
    found: list[str] = []
    for file in files():
        try:
            lines = file.read_text("utf-8").splitlines()
        except UnicodeDecodeError:
            continue
        for number, line in enumerate(lines, 1):
            if MACHINE.search(line) or REGISTRY.search(line):
                found.append(f"{file.relative_to(ROOT)}:{number}: {line.strip()[:100]}")
    assert found == []
