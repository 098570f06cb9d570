"""The lines of `enginepool score`: an input line becomes a call, an answer or an error becomes an output line."""

import re
import zlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, BinaryIO, cast

import msgspec

from enginepool.conversion import JSON, located, wrong_type

if TYPE_CHECKING:
    from enginepool.client.pool import Pool
    from enginepool.client.results import ScoreResult
    from enginepool.errors import EnginepoolError

#: Every output line starts so; it is how a cut-off one is told from somebody else's text.
PREFIX = b'{"line":'
#: A longer input line cannot be a request that a coordinator accepts; only so much of it is read into memory.
MAX_LINE_BYTES = 512 << 20


class BadLine(Exception):
    """An input line that is no request. The message says why, without the line's number."""


class Options(msgspec.Struct, frozen=True):
    """What the command line says for every line that does not say it itself."""

    label_token_ids: list[int] | None = None
    apply_softmax: bool = False
    item_first: bool = False
    return_pooled_hidden_states: bool = False
    group: str = ""
    priority: int = 0
    timeout: float | None = None
    logprobs: bool = False
    raw: bool = False
    min_version: int = 0

    def seed(self) -> int:
        """A checksum of what changes the scores: answers made with other options are not this run's."""
        shaping = (self.label_token_ids, self.apply_softmax, self.item_first, self.return_pooled_hidden_states, self.group)
        return zlib.crc32(msgspec.json.encode((*shaping, self.logprobs, self.raw)))


class InputLine(msgspec.Struct, forbid_unknown_fields=True):
    """An input line. Either `query` and `items`, or `prompts` and `responses`."""

    id: str | int | None = None
    query: str | list[int] | None = None
    items: list[str | list[int]] | None = None
    prompts: list[str | list[int]] | None = None
    responses: list[str | list[int]] | None = None
    label_token_ids: list[int] | None = None
    apply_softmax: bool | None = None
    item_first: bool | None = None
    return_pooled_hidden_states: bool | None = None
    group: str | None = None
    priority: int | None = None
    timeout: float | None = None
    logprobs: bool | None = None
    raw: bool | None = None
    min_version: int | None = None

    async def ask(self, pool: "Pool", options: Options) -> "ScoreResult":
        """Have it scored. Raises EnginepoolError."""
        said: dict[str, Any] = {name: getattr(self, name) for name in Options.__struct_fields__}
        settings = {name: getattr(options, name) if value is None else value for name, value in said.items()}
        # Whether rows are all text or all ids is for the client to say, with the row at fault.
        if self.query is None:
            return await pool.score_pairs(cast("Any", self.prompts), cast("Any", self.responses), **settings)
        return await pool.score(self.query, cast("Any", self.items), **settings)


_UNKNOWN = re.compile(r"Object contains unknown field `(.*)`", re.DOTALL)
_decoder = msgspec.json.Decoder(InputLine)


def input_lines(source: BinaryIO, number: int = 1, offset: int = 0) -> Iterator[tuple[int, int, bytes]]:
    """Lines of the input from line `number`, which begins at `offset`: (number, offset, text).

    Of a line over MAX_LINE_BYTES the text is that much and one byte, which `read_request` refuses.
    """
    if offset:
        source.seek(offset)
    while text := source.readline(MAX_LINE_BYTES + 1):
        yield number, offset, text
        rest = text
        while len(rest) > MAX_LINE_BYTES and not rest.endswith(b"\n"):
            rest = source.readline(MAX_LINE_BYTES + 1)
        number += 1
        offset = source.tell()


def checksum(line: bytes, seed: int) -> int:
    """32 bits that tell this input line, asked with these options, from another."""
    return zlib.crc32(line.rstrip(b"\r\n"), seed)


def read_request(line: bytes) -> InputLine:
    """The request on an input line. Raises BadLine."""
    if len(line) > MAX_LINE_BYTES:
        raise BadLine(f"over {MAX_LINE_BYTES} bytes long")
    try:
        request = _decoder.decode(line)
    except msgspec.ValidationError as error:
        raise BadLine(_say(*located(str(error)))) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise BadLine(f"not JSON: {error}") from None
    by_items = request.query is not None and request.items is not None
    by_pairs = request.prompts is not None and request.responses is not None
    named = sum(value is not None for value in (request.query, request.items, request.prompts, request.responses))
    if named != 2 or not (by_items or by_pairs):
        raise BadLine("needs query and items, or prompts and responses")
    return request


def _say(field: str, what: str) -> str:
    """What is wrong with a line, with the field first."""
    unknown = _UNKNOWN.fullmatch(what)
    if unknown:
        from enginepool.client.arguments import meant

        return f"unknown key {unknown.group(1)}{meant(unknown.group(1), InputLine.__struct_fields__)}"
    if what.endswith("got `object`"):
        return f"{field}: an object; text or token ids (of chat messages: apply the chat template first)"
    allowed, received = wrong_type(what, JSON)
    what = f"{received}; must be {allowed}" if allowed else what
    return f"{field}: {what}" if field else what


def answer_line(number: int, crc: int, request: InputLine, result: "ScoreResult") -> bytes:
    """The output line of an answer."""
    record: dict[str, Any] = {"line": number, "input_crc": crc}
    if request.id is not None:
        record["id"] = request.id
    if request.group is not None:
        record["group"] = request.group
    record |= {"scores": result.scores.tolist(), "version": result.version, "tokens": result.usage.tokens}
    if result.hidden is not None:
        record["hidden"] = result.hidden.tolist()
    return msgspec.json.encode(record) + b"\n"


def bad_line(number: int, crc: int, error: BadLine) -> bytes:
    """The output line of an input line that is no request."""
    message = f"line {number}: {error}"
    return msgspec.json.encode({"line": number, "input_crc": crc, "error": {"code": "bad_line", "message": message}}) + b"\n"


def error_line(number: int, crc: int, request: InputLine, error: "EnginepoolError") -> bytes:
    """The output line of a request that was refused or failed."""
    said: dict[str, Any] = {"code": error.code, "message": f"line {number}: {error.args[0]}"}
    said |= {name: value for name, value in (("field", error.field), ("limit", error.limit)) if value}
    if error.evidence:
        said["evidence"] = list(error.evidence)
    record: dict[str, Any] = {"line": number, "input_crc": crc}
    if request.id is not None:
        record["id"] = request.id
    return msgspec.json.encode({**record, "error": said}) + b"\n"
