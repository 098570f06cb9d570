"""The values that a field of a message may have, where these are a few texts: for the error about another one."""

import re
from functools import lru_cache
from typing import Any

import msgspec
from msgspec import inspect

_STEP = re.compile(r"[^.\[\]]+")


class _Tag(msgspec.Struct):
    type: str


_tag = msgspec.msgpack.Decoder(_Tag)


def choices(union: Any, frame: bytes | memoryview, path: str) -> list[str]:
    """What the value at `path`, as msgspec writes paths, of the message in `frame` may be; `union`: the messages of which it is
    one; not "", the default of some. Empty: other values than a few texts, or the rest of `frame` is broken, too."""
    try:
        found: list[Any] = [_messages(union).get(_tag.decode(frame).type)]
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return []
    for step in _STEP.findall(path):
        found = [below for one in found for below in _below(one, step)]
    return [str(value) for one in found if isinstance(one, inspect.LiteralType) for value in one.values if value != ""]


@lru_cache(maxsize=8)
def _messages(union: Any) -> dict[Any, inspect.StructType]:
    info = inspect.type_info(union)
    all_ = info.types if isinstance(info, inspect.UnionType) else (info,)
    return {one.tag: one for one in all_ if isinstance(one, inspect.StructType)}


def _below(info: Any, step: str) -> list[Any]:
    """The types that the part `step` of a value of this type may have."""
    below: Any = None
    if isinstance(info, inspect.StructType):
        fields = info.fields
        below = next((field.type for i, field in enumerate(fields) if step in (field.encode_name, str(i))), None)
    elif isinstance(info, inspect.ListType | inspect.VarTupleType):
        below = info.item_type
    parts = below.types if isinstance(below, inspect.UnionType) else [below]
    return [part.type if isinstance(part, inspect.Metadata) else part for part in parts]
