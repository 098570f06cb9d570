"""Chats of the Python API to frames."""

from collections.abc import Mapping, Sequence
from typing import Any, cast

import msgspec
import numpy as np

from enginepool.client.arguments import bad, check_flag, kind, utf8
from enginepool.client.payload import Payload
from enginepool.protocol.chat import (
    MAX_CHAT_BYTES,
    MAX_OPTION_NAME,
    MAX_OPTION_TEXT,
    MAX_TEMPLATE_OPTIONS,
    ChatTemplate,
)
from enginepool.protocol.messages import FrameSpec

#: One message: its role and its content, both text.
ChatDict = Mapping[str, str]
_KEYS = ("role", "content")


def encode_chats(chats: Any) -> Payload:
    """Frames of chats, each a list of messages."""
    found = _sequence("messages", chats, "a list of chats, each a list of messages")
    if found and isinstance(found[0], Mapping):
        raise bad("messages", "messages: one chat; give a list of chats, one for each item: [messages]")
    items = [_encode(f"messages[{i}]", chat) for i, chat in enumerate(found)]
    if not items:
        raise bad("messages", "messages: empty; a request has at least one chat", "1")
    body = b"".join(items)
    if len(body) > MAX_CHAT_BYTES:
        raise bad("messages", f"messages: {len(body)} bytes as JSON; at most {MAX_CHAT_BYTES}", str(MAX_CHAT_BYTES))
    lengths = np.fromiter(map(len, items), np.uint32, len(items))
    specs = [FrameSpec("items", "utf8", (len(body),)), FrameSpec("item_lengths", "uint32", (len(items),))]
    return specs, (body, lengths.tobytes())


def _encode(at: str, chat: Any) -> bytes:
    messages = _sequence(at, chat, "a list of messages, each with role and content")
    if not messages:
        raise bad(at, f"{at}: empty; a chat has at least one message", "1")
    for i, message in enumerate(messages):
        here = f"{at}[{i}]"
        if not isinstance(message, Mapping):
            raise bad(here, f"{here}: {kind(message)}; a message is a mapping with role and content")
        keys = cast("Mapping[str, object]", message)
        if unknown := [key for key in keys if key not in _KEYS]:
            raise bad(here, f"{here}: has {unknown[0]!r}; a message has role and content, and nothing else")
        for key in _KEYS:
            value = keys.get(key)
            if not isinstance(value, str) or (key == "role" and not 0 < len(value) <= 64):
                shown = f"{len(value)} characters; 1 to 64" if isinstance(value, str) else f"{kind(value)}; a text"
                raise bad(f"{here}.{key}", f"{here}.{key}: {shown}")
            utf8(f"{here}.{key}", value)
    return msgspec.json.encode([{key: cast("ChatDict", message)[key] for key in _KEYS} for message in messages])


def check_template(add_generation_prompt: Any, kwargs: Any) -> ChatTemplate:
    """`add_generation_prompt` and `chat_template_kwargs` as the wire wants them."""
    name = "chat_template_kwargs"
    if kwargs is None:
        kwargs = {}
    if not isinstance(kwargs, Mapping):
        raise bad(name, f"{name}: {kind(cast('object', kwargs))}; a mapping of names to plain values")
    options = cast("Mapping[object, object]", kwargs)
    if len(options) > MAX_TEMPLATE_OPTIONS:
        raise bad(name, f"{name}: {len(options)} names; at most {MAX_TEMPLATE_OPTIONS}", str(MAX_TEMPLATE_OPTIONS))
    for key, value in options.items():
        at = f"{name}[{key!r}]"
        if not isinstance(key, str) or not 0 < len(key) <= MAX_OPTION_NAME:
            raise bad(name, f"{at}: a name is a text of 1 to {MAX_OPTION_NAME} characters", str(MAX_OPTION_NAME))
        if not isinstance(value, bool | int | float | str | None):
            raise bad(name, f"{at}: {kind(value)}; True, False, None, a number or a text")
        if isinstance(value, str) and len(value) > MAX_OPTION_TEXT:
            raise bad(name, f"{at}: {len(value)} characters; at most {MAX_OPTION_TEXT}", str(MAX_OPTION_TEXT))
        if isinstance(value, int) and not -(2**63) <= value < 2**63:
            raise bad(name, f"{at}: {value} does not fit in 64 bits", str(2**63 - 1))
        for text in (key, value):
            utf8(name, text) if isinstance(text, str) else None
    return ChatTemplate(check_flag("add_generation_prompt", add_generation_prompt), cast("Any", {**options}))


def _sequence(at: str, value: Any, wanted: str) -> Sequence[object]:
    if isinstance(value, str | bytes | Mapping) or not isinstance(value, Sequence):
        raise bad(at, f"{at}: {kind(cast('object', value))}; {wanted}")
    return cast("Sequence[object]", value)
