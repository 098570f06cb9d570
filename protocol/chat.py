"""Chats as items: each item is a JSON array of messages, which the chat template of the model makes one text of."""

from typing import Annotated

import msgspec

from enginepool.protocol.errors import WireError

#: Bytes of all chats of a request, and their messages.
MAX_CHAT_BYTES, MAX_MESSAGES = 4 << 20, 16_384
#: Tokens that a template may add to a chat, besides one for each byte of its JSON.
MAX_TEMPLATE_TOKENS = 1024
#: Options of a template, characters of the name of one, and of its value where that is text.
MAX_TEMPLATE_OPTIONS, MAX_OPTION_NAME, MAX_OPTION_TEXT = 16, 64, 1024

_OptionName = Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_OPTION_NAME)]
_Option = bool | int | float | Annotated[str, msgspec.Meta(max_length=MAX_OPTION_TEXT)] | None


class ChatTemplate(msgspec.Struct, omit_defaults=True, frozen=True, forbid_unknown_fields=True, gc=False):
    """How the chat template of the model makes a text of messages.

    `add_generation_prompt`: the text ends where the answer of the model would begin. `kwargs`: further names of the template.
    """

    add_generation_prompt: bool = True
    kwargs: Annotated[dict[_OptionName, _Option], msgspec.Meta(max_length=MAX_TEMPLATE_OPTIONS)] = {}


class ChatMessage(msgspec.Struct, frozen=True, forbid_unknown_fields=True, gc=False):
    """One message of a chat."""

    role: Annotated[str, msgspec.Meta(min_length=1, max_length=64)]
    content: str


_chat = msgspec.json.Decoder(list[ChatMessage])


def read_chats(items: list[str]) -> list[list[dict[str, str]]]:
    """The messages of each item, as templates take them.

    Raises:
        WireError: `bad_request`: an item is no array of messages, or there are too many of them.
    """
    count, chats = 0, list[list[dict[str, str]]]()
    for i, item in enumerate(items):
        at = f"items[{i}]"
        try:
            messages = _chat.decode(item)
        except (msgspec.DecodeError, RecursionError) as error:  # a ValidationError is one, too
            raise WireError("bad_request", f"{at}: no messages of a chat: {error}", field=at) from None
        if not messages:
            raise WireError("bad_request", f"{at}: empty; a chat has at least one message", field=at, limit="1")
        count += len(messages)
        if count > MAX_MESSAGES:
            text = f"items: more than {MAX_MESSAGES} messages in all chats"
            raise WireError("bad_request", text, field="items", limit=str(MAX_MESSAGES))
        chats.append([{"role": message.role, "content": message.content} for message in messages])
    return chats
