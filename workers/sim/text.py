"""The tokenizer of the sim engine: one token for each byte of UTF-8, and a cross-encoder's separators. It decodes, too."""

from enginepool.protocol.chat import read_chats
from enginepool.protocol.errors import WireError
from enginepool.workers.texts import TextIds, TextTask
from enginepool.workers.truncated_rows import drop, refuse_nothing_left, too_long

#: token id of the byte 0; ids below are special
BYTE_OFFSET = 3
#: bytes of text of a token: of a byte that is no UTF-8, and of a special token
TOKEN_BYTES = 3


def text_ids(task: TextTask, separator: int | None) -> TextIds:
    """The ids of each row; without a named truncation nothing is cut. Raises WireError `bad_request`."""
    asked = task.asked
    if asked.raw:
        separator = None
    texts = task.pairs
    if asked.chat is not None:
        texts = [("", _rendered(chat, asked.chat.add_generation_prompt)) for chat in read_chats([item for _, item in texts])]
    rows = [_joined(*pair, separator) for pair in texts]
    longer = too_long(rows, asked)
    for i in longer:
        first, second = (len(text.encode()) for text in texts[i])
        behind = 0 if asked.item_first else first + (separator is not None and first > 0)
        of_item = range(behind, behind + (first if asked.item_first else second))
        refuse_nothing_left(len(rows[i]) - len(of_item), asked, i)
        rows[i] = drop(rows[i], of_item, asked)
    return TextIds(rows, len(longer), [_label_id(i, label) for i, label in enumerate(asked.labels)])


def decoded(row: list[int], *, skip_special_tokens: bool) -> str:
    """The text of token ids: each special one has a name, and ids above those of bytes have no text."""
    data = bytearray()
    for token in row:
        if token >= BYTE_OFFSET:
            data += bytes([token - BYTE_OFFSET]) if token < BYTE_OFFSET + 256 else b""
        elif not skip_special_tokens:
            data += f"<{token}>".encode()
    return data.decode(errors="replace")


def _rendered(chat: list[dict[str, str]], add_generation_prompt: bool) -> str:
    """The chat template of the sim engine: a line for each message."""
    text = "".join(f"{message['role']}: {message['content']}\n" for message in chat)
    return text + "assistant: " if add_generation_prompt else text


def _label_id(i: int, label: str) -> int:
    data = label.encode()
    if len(data) != 1:
        at = f"label_texts[{i}]"
        text = f"{at}: {label!r} is {len(data)} tokens of this model; a label is one token"
        raise WireError("bad_request", text, field=at, limit="1")
    return data[0] + BYTE_OFFSET


def _joined(first: str, second: str, separator: int | None) -> list[int]:
    one, two = ([byte + BYTE_OFFSET for byte in text.encode()] for text in (first, second))
    if separator is None:
        return one + two
    return [*one, separator, *two, separator] if first else [*two, separator]
