"""What a simulated engine answers: a pure function of a row's prompt, a column and the weight version, on bytes alone."""

import zlib
from array import array
from collections.abc import Iterable, Sequence

from enginepool.protocol.frames import Buffer
from enginepool.protocol.messages import Embed, Logprobs, Part, Score

#: columns of hidden states, of embeddings and of log-probabilities start here
HIDDEN, EMBEDDING, LOGPROBS = 1 << 20, 1 << 21, 1 << 22


def score_rows(prompts: Iterable[bytes], columns: Sequence[int], salt: int) -> bytes:
    """float32 [rows, columns], every value exact."""
    values: list[float] = []
    # Only the low 24 bits of a value count: small integers are quick.
    factors, salt = [2 * column + 1 for column in columns], (salt * 7919) & 0xFFFFFF
    for prompt in prompts:
        crc = (zlib.crc32(prompt) + 1) & 0xFFFFFF
        values += [((crc * factor + salt) & 0xFFFFFF) / 2**24 for factor in factors]
    return array("f", values).tobytes()


def salt_of(content: int, asked: Score | Embed | Logprobs | Part) -> int:
    """`content`: the number of the weights; `asked` says in which form scores, or embeddings, are wanted."""
    if isinstance(asked, Embed) or (isinstance(asked, Part) and asked.operation == "embed"):
        return 4 * content + asked.normalize
    if isinstance(asked, Logprobs):
        return 4 * content
    return 4 * content + 2 * asked.logprobs + asked.softmax


def prompts_of(part: Part, frames: Sequence[Buffer]) -> list[bytes]:
    """The rows of a part, query and item joined."""
    if len(frames) == 2:
        return rows_of(frames[0], frames[1])
    if len(frames) == 4:
        heads = rows_of(frames[0], frames[1])
        rows = rows_of(frames[2], frames[3])
    else:
        rows = rows_of(frames[1], frames[2])
        heads = [bytes(frames[0])] * len(rows)
    if part.item_first:
        return [row + head for head, row in zip(heads, rows, strict=True)]
    return [head + row for head, row in zip(heads, rows, strict=True)]


def rows_of(values: Buffer, lengths: Buffer, unit: int = 4) -> list[bytes]:
    """Ragged data as rows."""
    data = bytes(values)
    rows: list[bytes] = []
    at = 0
    for n in array("I", bytes(lengths)):
        rows.append(data[at : at + unit * n])
        at += unit * n
    assert at == len(data), "the lengths do not add up"
    return rows
