"""Frames: reading frame 0 of a message, and comparing payload frames with what their header says.

For any bytes, the functions here raise `WireError` with a code of `errors.CODES`, and no other exception.
"""

import re
from collections.abc import Sequence
from typing import Any, cast

import msgspec

from enginepool.protocol.choices import choices
from enginepool.protocol.errors import WireError, brief, located
from enginepool.protocol.messages import MAX_HEADER_BYTES, MAX_NESTING, MAX_TEXT, FrameSpec, GenerationProgress, Message, Tokens
from enginepool.protocol.nesting import TooManyValues, Values, deeper

Buffer = bytes | memoryview

ITEM_BYTES = {"int32": 4, "uint32": 4, "uint64": 8, "float32": 4, "utf8": 1, "uint8": 1, "int16": 2}

#: fields, also of structures, whose text is for people alone
_TEXTS = frozenset({"message", "detail", "reason", "field", "limit", "evidence", "down", "needs_weights"})

#: messages with hundreds of structures in each, none of which holds what is nested further; to write them again costs less than
#: to look at each value
_FLAT = frozenset({GenerationProgress, Tokens})

_encoder = msgspec.msgpack.Encoder()
_TOO_MANY = re.compile(r"Expected `array` of (?:at most )?length (?:<= )?([0-9]+)")
_MISSING = re.compile(r"missing required field `(\w+)`")


def encode_header(message: Message) -> bytes:
    """Frame 0 of `message`. Where it would be longer than a receiver reads, its texts for people are cut off.

    They may repeat what a peer sent, or be what a library said; a peer that gets what it cannot read waits, or drops the link.
    Halves of surrogate pairs, which JSON in a file or in a request may have, are written as `\\ud800`.
    """
    whole: Any = message
    try:
        header = _encoder.encode(whole)
    except UnicodeEncodeError:
        whole = _without_surrogates(msgspec.to_builtins(message, builtin_types=(bytes,)))
        header = _encoder.encode(whole)
    most = MAX_TEXT
    while len(header) > MAX_HEADER_BYTES and most:
        header = _encoder.encode(_shortened(msgspec.to_builtins(whole, builtin_types=(bytes,)), most))
        # Thousands of parts may have an error each.
        most //= 8
    return header


def _without_surrogates(value: Any) -> Any:
    if isinstance(value, str):
        return value.encode(errors="backslashreplace").decode()
    if isinstance(value, dict):
        items = cast("dict[str, Any]", value).items()
        return {_without_surrogates(key): _without_surrogates(entry) for key, entry in items}
    if isinstance(value, list | tuple):
        return [_without_surrogates(entry) for entry in cast("Sequence[Any]", value)]
    return value


def _shortened(value: Any, most: int, name: str = "") -> Any:
    if isinstance(value, str) and name in _TEXTS:
        return brief(value, most)
    if isinstance(value, dict):
        fields = cast("dict[str, Any]", value)
        return {key: _shortened(entry, most, key) for key, entry in fields.items()}
    if isinstance(value, list | tuple):
        entries = cast("Sequence[Any]", value)
        return [_shortened(entry, most, name) for entry in entries]
    return value


def decode_header(decoder: "msgspec.msgpack.Decoder[Any]", frame: Buffer, values: Values | None = None) -> Any:
    """The message in frame 0, with at most so many `values`; without a bound if there is none.

    Raises:
        WireError: `too_large` over MAX_HEADER_BYTES, `malformed` for bytes that are no msgpack map, are nested over
            MAX_NESTING or hold too many values, `unsupported` for an unknown `type`, `bad_request` with the field's name for a
            value of the wrong kind.
    """
    if len(frame) > MAX_HEADER_BYTES:
        raise WireError(
            "too_large",
            f"frame 0 has {len(frame)} bytes; at most {MAX_HEADER_BYTES} are read",
            field="frame 0",
            limit=str(MAX_HEADER_BYTES),
        )
    values = values or Values(MAX_HEADER_BYTES)
    most = values.left
    try:
        message = decoder.decode(frame)
        if type(message) in _FLAT and frame == _encoder.encode(message):
            return message  # nothing in it was skipped
        # A key that is unknown is looked at here only: it may still be no UTF-8.
        nested = deeper(frame, MAX_NESTING, values)
    except msgspec.ValidationError as error:
        raise _invalid(str(error), decoder.type, frame) from None
    except RecursionError:
        raise _nested() from None
    except TooManyValues:
        text = f"frame 0 has more than {most} values in its maps and arrays"
        raise WireError("malformed", text, field="frame 0", limit=str(most)) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise WireError("malformed", f"frame 0 is not msgpack: {error}", field="frame 0") from None
    if nested:
        raise _nested()
    return message


def _nested() -> WireError:
    text = f"frame 0 has maps and arrays nested more than {MAX_NESTING} deep"
    return WireError("malformed", text, field="frame 0", limit=str(MAX_NESTING))


def _invalid(text: str, union: Any, frame: Buffer) -> WireError:
    field, said = located(text)
    what = "".join(letter if letter.isprintable() else repr(letter)[1:-1] for letter in brief(said))
    missing = _MISSING.search(what)
    if missing:
        field = f"{field}.{missing.group(1)}" if field else missing.group(1)
    if field == "type" and not missing:
        return WireError("unsupported", f"type: {what}: no such message here", field="type")
    if too_many := _TOO_MANY.fullmatch(what):
        # The entries are not decoded, so that a long array costs nothing.
        most = too_many[1]
        return WireError("bad_request", f"{field}: expected at most {most} entries, got more", field=field, limit=most)
    if not field:
        return WireError("malformed", f"frame 0 is no message: {what}", field="frame 0")
    if what.startswith("Invalid enum value") and (allowed := ", ".join(choices(union, frame, field))):
        return WireError("bad_request", f"{field}: {what}; one of {allowed}", field=field, limit=allowed)
    return WireError("bad_request", f"{field}: {what}", field=field)


def payload_bytes(spec: FrameSpec) -> int:
    """How many bytes the frame that `spec` describes has."""
    if len(spec.shape) not in (1, 2):
        raise WireError("malformed", f"frame {spec.name!r} has {len(spec.shape)} dimensions; 1 or 2", field=spec.name)
    n = ITEM_BYTES[spec.dtype]
    for side in spec.shape:
        if side < 0:
            raise WireError("malformed", f"frame {spec.name!r} has a negative shape {list(spec.shape)}", field=spec.name)
        n *= side
    return n


def check_frames(specs: Sequence[FrameSpec], frames: Sequence[Buffer]) -> None:
    """Hold payload `frames` to the header's `specs`: as many, and each of the length that dtype and shape give.

    Raises:
        WireError: `malformed`, naming the frame and both lengths.
    """
    if len(specs) != len(frames):
        raise WireError(
            "malformed",
            f"frames: the header lists {len(specs)} payload frames and {len(frames)} came",
            field="frames",
            limit=str(len(specs)),
        )
    for spec, frame in zip(specs, frames, strict=True):
        shape = spec.shape
        # What nearly every frame is, one side and as long as it says; the call for the rest would double the time of this loop.
        if len(shape) == 1 and ITEM_BYTES[spec.dtype] * shape[0] == len(frame):
            continue
        want = payload_bytes(spec)
        if want != len(frame):
            raise WireError(
                "malformed",
                f"frame {spec.name!r} has {len(frame)} bytes; {spec.dtype} {list(shape)} takes {want}",
                field=spec.name,
                limit=str(want),
            )
