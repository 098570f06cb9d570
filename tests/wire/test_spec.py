"""PROTOCOL.md, WEIGHTS.md and GENERATION.md say what the code does: every message, field, type, default, code and constant."""

import inspect
import json
import re
from pathlib import Path
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import msgspec
import pytest

from enginepool.protocol import frames, messages
from enginepool.protocol.errors import CODES
from enginepool.protocol.messages import FrameSpec, Message, TaskId
from enginepool.protocol.roles import FROM_CLIENT
from tests.wire.plain_client import PlainClient

FOLDER = Path(__file__).parents[2] / "protocol"
PAGE = (FOLDER / "PROTOCOL.md").read_text(encoding="utf-8")
WEIGHTS = (FOLDER / "WEIGHTS.md").read_text(encoding="utf-8")
GENERATION = (FOLDER / "GENERATION.md").read_text(encoding="utf-8")
VECTORS: dict[str, dict[str, Any]] = {
    vector["name"]: vector
    for vector in json.loads((FOLDER / "vectors" / "vectors.json").read_text(encoding="utf-8"))["vectors"]
}
WAYS = {
    "client to coordinator": messages.FromClient,
    "coordinator to client": messages.ToClient,
    "worker to coordinator": messages.FromWorker,
    "coordinator to worker": messages.ToWorker,
}
#: headings that name more than one way
SHORT = {
    "both ways": set(WAYS),
    "coordinator to client, both ways to worker": set(WAYS) - {"client to coordinator"},
    "coordinator to client and to worker": {"coordinator to client", "coordinator to worker"},
}


def structs() -> "list[type[msgspec.Struct]]":
    found = {
        value: None
        for module in (messages,)
        for _, value in inspect.getmembers(module, inspect.isclass)
        if issubclass(value, msgspec.Struct)
    }
    return [struct for struct in found if struct is not Message]


def heading_of(struct: type[msgspec.Struct]) -> str:
    """What stands before the bracket in the heading of a struct's section: the tag of a message, the name of a structure."""
    tag = struct.__struct_config__.tag
    return struct.__name__ if tag is None else str(tag)


def sections(page: str) -> dict[str, tuple[str, str]]:
    """Name -> (what stands in the bracket, text) of each section of a page that describes a message or a structure."""
    parts = re.split(r"^### `(\w+)` \((.+)\)$", page, flags=re.MULTILINE)
    names, brackets, texts = parts[1::3], parts[2::3], parts[3::3]
    assert len(set(names)) == len(names)
    return {
        name: (bracket, re.split(r"^##", text, flags=re.MULTILINE)[0])
        for name, bracket, text in zip(names, brackets, texts, strict=True)
    }


FOR_CLIENTS = sections(PAGE)
SECTIONS = {**sections(WEIGHTS), **sections(GENERATION), **FOR_CLIENTS}


def table(text: str, head: str) -> list[list[str]]:
    """Cells of the rows of the first table whose head begins with `head`."""
    lines = text.splitlines()
    starts = [i for i, line in enumerate(lines) if line.startswith(head)]
    if not starts:
        return []
    rows: list[list[str]] = []
    for line in lines[starts[0] + 2 :]:
        if not line.startswith("|"):
            break
        rows.append([cell.strip() for cell in line.strip("|").split("|")])
    return rows


def shown(name: str, hint: Any) -> str:
    """A field's type as the page writes it. TaskId is an alias, which the page uses for the ids of tasks."""
    if hint == TaskId:
        return "TaskId" if name in ("batch", "task", "update") else "[int, int]"
    origin, inner = get_origin(hint), get_args(hint)
    if origin is Literal:
        return "str"
    if origin in (list, tuple):
        return f"array of {shown(name, inner[0])}"
    if origin is dict:
        return f"map of {shown(name, inner[1])}"
    if origin in (Union, UnionType):
        return " or ".join("nil" if one is type(None) else shown(name, one) for one in inner)
    if hint is bytes:
        return "bin"
    return hint.__name__


def default_of(field: msgspec.structs.FieldInfo) -> str:
    """A field's default as the page writes it."""
    if field.required:
        return "required"
    value = field.default if field.default is not msgspec.NODEFAULT else field.default_factory()
    if value == b"":
        return "`bin 0`"
    if isinstance(value, msgspec.Struct):
        return "`{}`"
    return "`nil`" if value is None else f"`{json.dumps(value)}`"


@pytest.mark.parametrize("struct", structs(), ids=heading_of)
def test_the_table_of_a_message_has_its_fields_with_types_and_defaults_in_order(struct: type[msgspec.Struct]) -> None:
    _, text = SECTIONS[heading_of(struct)]
    hints = get_type_hints(struct)
    rows = table(text, "| field | type |")
    assert [row[:3] for row in rows] == [
        [f"`{field.name}`", f"`{shown(field.name, hints[field.name])}`", default_of(field)]
        for field in msgspec.structs.fields(struct)
    ]
    assert all(row[3] for row in rows), "every field has a meaning"


def test_every_section_of_a_message_or_structure_has_a_struct_and_the_other_way_round() -> None:
    assert set(SECTIONS) == {heading_of(struct) for struct in structs()}


def test_each_message_and_structure_is_described_on_one_page() -> None:
    names = [name for page in (PAGE, WEIGHTS, GENERATION) for name in sections(page)]
    assert len(set(names)) == len(names)


def test_a_client_of_rows_needs_the_first_page_alone_which_is_short() -> None:
    """What it sends, what answers it, and every structure in these. `status` is for operators, on the other page."""
    assert PAGE.count("\n") <= 700
    may = {name for name, role in FROM_CLIENT.items() if role == "client"} - {"status", *sections(GENERATION)}
    answers = {"welcome", "result", "error"}
    needed = {struct for struct in structs() if heading_of(struct) in may | answers}
    assert set(FOR_CLIENTS) == {heading_of(struct) for struct in needed | held_by(needed)}


def held_by(found: "set[type[msgspec.Struct]]") -> "set[type[msgspec.Struct]]":
    """The structures that messages hold, and those within these."""
    names = {struct.__name__: struct for struct in structs()}
    hints = {repr(hint) for struct in found for hint in get_type_hints(struct).values()}
    held = {names[word] for hint in hints for word in re.findall(r"\w+", hint) if word in names}
    return held if held <= found else held | held_by(found | held)


@pytest.mark.parametrize("struct", structs(), ids=heading_of)
def test_a_heading_says_which_way_a_message_goes_or_how_a_structure_is_encoded(struct: type[msgspec.Struct]) -> None:
    bracket, _ = SECTIONS[heading_of(struct)]
    if not issubclass(struct, Message):
        assert bracket == ("array" if struct.__struct_config__.array_like else "map")
        return
    ways = {way for way, union in WAYS.items() if struct in get_args(union)}
    assert SHORT.get(bracket, {bracket}) == ways


@pytest.mark.parametrize("struct", structs(), ids=heading_of)
def test_every_allowed_string_of_a_field_is_named(struct: type[msgspec.Struct]) -> None:
    meanings = {row[0].strip("`"): row[3] for row in table(SECTIONS[heading_of(struct)][1], "| field | type |")}
    for name, hint in get_type_hints(struct).items():
        if get_origin(hint) is Literal:
            for value in get_args(hint):
                assert (f"`{value}`" if value else "empty") in meanings[name]


def test_the_error_table_is_the_closed_set_of_codes() -> None:
    want = [
        [f"`{code}`", facts.fault, "yes" if facts.retry else "no", facts.final, facts.kept, facts.id, facts.meaning]
        for code, facts in CODES.items()
    ]
    assert table(PAGE, "| code | fault |") == want


def test_the_table_of_roles_has_every_message_of_a_client() -> None:
    need = {
        message: row[1].strip("`")
        for row in table(WEIGHTS, "| message | needs |")
        for message in re.findall(r"`(\w+)`", row[0])
    }
    assert need.pop("new_run") == "admin"
    assert need | {"publish": "publisher", "control": "publisher"} == FROM_CLIENT


def test_the_pseudo_code_of_a_client_names_what_the_plain_client_does() -> None:
    """Each heading of the pseudo-code, `greet:` or `on welcome:`, is a method of the plain client, and each method that takes a
    message is on the page or answers a question, which the page leaves out."""
    page = PAGE[PAGE.index("### A minimal client") : PAGE.index("### `hello`")]
    code = page[page.index("```text") : page.rindex("```")]
    names: list[tuple[str, ...]] = re.findall(r"^(?:(on \w+)|(\w+)\(.*\)|(\w+)(?:,.*)?):", code, flags=re.MULTILINE)
    said = {"".join(name).replace(" ", "_") for name in names} - {"once"}
    done = {name for name in vars(PlainClient) if not name.startswith("__")}
    assert said <= done
    assert {name for name in done if name.startswith("on_")} - said == {"on_status_report"}


def test_the_table_of_limits_has_the_constants() -> None:
    rows = [row for page in (PAGE, WEIGHTS, GENERATION) for row in table(page, "| name | value |")]
    said = {row[0].strip("`"): int(row[1]) for row in rows}
    assert len(said) == len(rows)
    # The pages say MAX_MS and MAX_REGIONS with the fields that they bound.
    limits = [
        name for name in dir(messages) if name.startswith(("MAX_", "PROTOCOL_")) and name not in ("MAX_MS", "MAX_REGIONS")
    ]
    assert said == {name: getattr(messages, name) for name in limits}


def test_the_table_of_dtypes_has_their_sizes() -> None:
    said = {row[0].strip("`"): int(row[1]) for row in table(PAGE, "| dtype | bytes")}
    assert said == frames.ITEM_BYTES
    assert set(said) == set(get_args(get_type_hints(FrameSpec)["dtype"]))


def test_every_code_that_the_page_names_exists() -> None:
    """Words in code that look like an error code: those before and after "answered", and those in the tables of refusals."""
    named = set(re.findall(r"(?:answered|refused with|with `error`) `(\w+)`", PAGE + WEIGHTS + GENERATION))
    assert named
    assert named <= {*CODES, *SECTIONS}


BYTES = re.findall(r"^```text vector=(\S+) frame=(\d)\n(.*?)^```$", PAGE + WEIGHTS, flags=re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize(("name", "frame", "dump"), BYTES, ids=[f"{name}-{frame}" for name, frame, _ in BYTES])
def test_the_bytes_on_the_page_are_those_of_the_golden_vectors(name: str, frame: str, dump: str) -> None:
    digits = "".join(line[:48] for line in dump.splitlines())
    assert bytes.fromhex(digits) == bytes.fromhex(VECTORS[name]["frames"][int(frame)])


def test_the_worked_example_shows_bytes_and_names_vectors_that_exist() -> None:
    assert len(BYTES) >= 6
    life = PAGE[PAGE.index("## Life of a score request") : PAGE.index("## Client and coordinator")]
    named = set(re.findall(r"\w+ \(([\w-]+)\)", life))
    assert {"hello", "welcome", "register", "accept", "score", "batch", "done", "result", "ack"} <= named
    assert named <= set(VECTORS)
