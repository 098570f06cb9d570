"""Lines of the files that `enginepool score` and the like read and write: JSON, one object on each line."""

import codecs
import contextlib
import re
import zlib
from collections.abc import Awaitable, Callable, Container, Iterator
from typing import TYPE_CHECKING, Any, BinaryIO, TypeAlias, TypeVar

import msgspec

from enginepool.conversion import JSON, wrong_type
from enginepool.protocol.errors import located

if TYPE_CHECKING:
    from enginepool.client.embed import EmbedResult
    from enginepool.client.logprobs import LogprobsResult
    from enginepool.client.score import ScoreResult
    from enginepool.errors import EnginepoolError

#: Every output line begins so. A last line that was cut off in writing is told from foreign text by it.
PREFIX = b'{"line":'
#: No coordinator accepts a longer request. At most so much of an input line is read into memory.
MAX_LINE_BYTES = 512 << 20

#: why a text is not JSON: also one that is nested too deep
_NOT_JSON = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
_UNKNOWN = re.compile(r"Object contains unknown field `(.*)`", re.DOTALL)
#: what to write instead of an object, by the key
_OF_OBJECTS = {
    **dict.fromkeys(
        ("query", "items", "prompts", "responses", "inputs", "prompt"), " (of chat messages: apply the chat template first)"
    ),
    **dict.fromkeys(("json_schema", "structural_tag"), " (write the object as a string of JSON)"),
}


class _Named(msgspec.Struct):
    """As much of a line as its answer has, too."""

    id: str | int | None = None
    group: str | None = None


class BadLine(Exception):
    """An input line that is not a request. The message says why, without the number of the line. `line`: what could be read of
    it."""

    def __init__(self, why: str, text: bytes = b"") -> None:
        super().__init__(why)
        self.line: _Named | None = None
        with contextlib.suppress(*_NOT_JSON):
            self.line = msgspec.json.decode(text, type=_Named)


class InputLine(msgspec.Struct, forbid_unknown_fields=True):
    """What a line of any operation may have. None: the options of the command apply. `__post_init__` of a subclass raises
    ValueError if a key is missing or contradicts another one."""

    id: str | int | None = None
    group: str | None = None
    priority: int | None = None
    timeout: float | None = None
    min_version: int | None = None
    version: int | None = None

    def settings(self, options: dict[str, Any]) -> dict[str, Any]:
        """`options` of the command, replaced by what the line says itself."""
        said = {name: value for name in options if (value := getattr(self, name)) is not None}
        return dict.fromkeys(options) | self.inherited(said, options) | said

    @classmethod
    def inherited(cls, said: Container[str], options: dict[str, Any]) -> dict[str, Any]:
        """The `options` of the command that apply to a line that has the keys `said`."""
        return {name: value for name, value in options.items() if name not in said}


L = TypeVar("L", bound=InputLine)
#: Asks the pool for the answer to a line, with these settings. Returns what the output line has of it; `version` is among it.
#: Raises EnginepoolError.
Ask: TypeAlias = Callable[[Any, L, dict[str, Any]], Awaitable[dict[str, Any]]]


def without_mark(text: bytes) -> bytes:
    """The first line of an input, without the byte order mark that some programs begin a UTF-8 file with."""
    return text.removeprefix(codecs.BOM_UTF8)


def input_lines(source: BinaryIO) -> Iterator[tuple[int, int, bytes]]:
    """Lines of the input: (number, offset, text).

    Of a line over MAX_LINE_BYTES the text is its first MAX_LINE_BYTES + 1 bytes, which `read_line` refuses.
    """
    number, offset = 1, 0
    while text := source.readline(MAX_LINE_BYTES + 1):
        yield number, offset, without_mark(text) if number == 1 else text
        rest = text
        while len(rest) > MAX_LINE_BYTES and not rest.endswith(b"\n"):
            rest = source.readline(MAX_LINE_BYTES + 1)
        number += 1
        offset = source.tell()


def checksum(line: bytes, form: type[InputLine], options: dict[str, Any]) -> int:
    """32 bits that tell this input line, asked with the options that apply to it, from another."""
    keys: dict[str, msgspec.Raw] = {}
    used: dict[str, Any] = {}
    with contextlib.suppress(*_NOT_JSON):  # no option changes what is wrong with such a line
        keys = msgspec.json.decode(line, type=dict[str, msgspec.Raw])
        used = form.inherited({name for name, value in keys.items() if bytes(value) != b"null"}, options)
    return zlib.crc32(msgspec.json.encode(used), zlib.crc32(line.rstrip(b"\r\n")))


def read_line(text: bytes, form: type[L]) -> L:
    """The request on an input line of this form. Raises BadLine."""
    if len(text) > MAX_LINE_BYTES:
        raise BadLine(f"over {MAX_LINE_BYTES} bytes long")
    try:
        return msgspec.json.decode(text, type=form)
    except msgspec.ValidationError as error:
        raise BadLine(_wrong(*located(str(error)), form), text) from None
    except _NOT_JSON as error:
        raise BadLine(f"not JSON: {error}") from None


def _wrong(field: str, what: str, form: type[InputLine]) -> str:
    """What is wrong with a line, with the field first."""
    unknown = _UNKNOWN.fullmatch(what)
    if unknown:
        from enginepool.client.arguments import meant

        return f"unknown key {unknown.group(1)}{meant(unknown.group(1), form.__struct_fields__)}"
    allowed, received = wrong_type(what, JSON)
    what = f"{received}; must be {allowed}" if allowed else what
    if received == JSON["object"]:
        what += _OF_OBJECTS.get(field.partition("[")[0], "")
    return f"{field}: {what}" if field else what


def output_line(number: int, crc: int, line: InputLine | _Named | None, columns: dict[str, Any]) -> bytes:
    """The output line for input line `number`; `line` is None where that could not be read."""
    record: dict[str, Any] = {"line": number, "input_crc": crc}
    if line is not None:
        record |= {name: value for name, value in (("id", line.id), ("group", line.group)) if value is not None}
    return msgspec.json.encode(record | columns) + b"\n"


def answered(result: "ScoreResult | EmbedResult | LogprobsResult") -> dict[str, Any]:
    """What the output line says of how rows were computed."""
    return {"version": result.version, "tokens": result.usage.tokens, "workers": result.workers}


def error_columns(number: int, error: "EnginepoolError | BadLine") -> dict[str, Any]:
    """What the output line says of a line that was refused or failed."""
    said: dict[str, Any] = {"code": getattr(error, "code", "bad_line"), "message": f"line {number}: {error.args[0]}"}
    for name in ("field", "limit", "evidence"):
        if value := getattr(error, name, None):
            said[name] = value
    return {"error": said}
