"""What a golden message is made of: msgpack and arrays written by hand, so that the vectors do not lean on our own codec.

A header is given as keys and values in the order in which they are sent; `Raw` puts bytes where a value would stand.
"""

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

Piece = str | dict[str, Any]


@dataclass(frozen=True)
class Raw:
    """Bytes that stand in a header as they are."""

    data: bytes


@dataclass(frozen=True)
class Array:
    """One payload frame and its entry in the header."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    values: "tuple[int | float, ...] | str"

    def spec(self) -> list[Any]:
        return [self.name, self.dtype, list(self.shape)]

    def payload(self) -> bytes:
        if isinstance(self.values, str):
            return self.values.encode()
        code = {"int32": "i", "uint32": "I", "uint64": "Q", "float32": "f", "uint8": "B", "int16": "h"}[self.dtype]
        return struct.pack(f"<{len(self.values)}{code}", *self.values)

    def described(self) -> dict[str, Any]:
        values = self.values if isinstance(self.values, str) else list(self.values)
        return {"name": self.name, "dtype": self.dtype, "shape": list(self.shape), "values": values}


def ids(name: str, *values: int) -> Array:
    return Array(name, "int32", (len(values),), values)


def lengths(name: str, *values: int) -> Array:
    return Array(name, "uint32", (len(values),), values)


def text(name: str, value: str) -> Array:
    return Array(name, "utf8", (len(value.encode()),), value)


def floats(name: str, shape: tuple[int, ...], *values: float) -> Array:
    return Array(name, "float32", shape, values)


@dataclass(frozen=True)
class Valid:
    """A message that must be understood.

    `sent`: the header as written, where that is not `header` in its shortest form. `exact`: our own encoder gives these bytes.
    """

    name: str
    direction: str
    about: str
    header: dict[str, Any]
    payload: tuple[Array, ...] = ()
    sent: "dict[str, Any] | Raw | None" = None
    exact: bool = True

    def entry(self) -> dict[str, Any]:
        header = pack(self.header if self.sent is None else self.sent)
        return {
            "name": self.name,
            "direction": self.direction,
            "about": self.about,
            "frames": [header.hex(), *(array.payload().hex() for array in self.payload)],
            "valid": {
                "header": jsonable(self.header),
                "payload": [array.described() for array in self.payload],
                "exact": self.exact and self.sent is None,
            },
        }


@dataclass(frozen=True)
class Invalid:
    """A message that must be refused with `code` and `field`. `stage` says how far a receiver reads it; `model`, on what."""

    name: str
    direction: str
    about: str
    code: str
    field: str
    stage: str
    frames: Sequence["str | list[Piece]"]
    model: str = ""

    def entry(self) -> dict[str, Any]:
        error = {"code": self.code, "field": self.field, "stage": self.stage}
        if self.model:
            error["model"] = self.model
        return {
            "name": self.name,
            "direction": self.direction,
            "about": self.about,
            "frames": list(self.frames),
            "invalid": error,
        }


def jsonable(value: Any) -> Any:
    """`value` as JSON holds it: bytes become {"bin": hex}."""
    if isinstance(value, bytes):
        return {"bin": value.hex()}
    if isinstance(value, dict):
        return {key: jsonable(inner) for key, inner in value.items()}  # pyright: ignore[reportUnknownVariableType]
    if isinstance(value, list):
        return [jsonable(inner) for inner in value]  # pyright: ignore[reportUnknownVariableType]
    return value


def unpieced(frame: "str | list[Piece]") -> bytes:
    """The bytes of a frame of `vectors.json`: hex, or pieces, some of them repeated."""
    if isinstance(frame, str):
        return bytes.fromhex(frame)
    return b"".join(
        bytes.fromhex(piece) if isinstance(piece, str) else bytes.fromhex(piece["hex"]) * piece["times"] for piece in frame
    )


def pack(value: Any) -> bytes:
    """msgpack, in the shortest form."""
    match value:
        case Raw(data):
            return data
        case None:
            return b"\xc0"
        case bool():
            return b"\xc3" if value else b"\xc2"
        case int():
            return _pack_int(value)
        case float():
            return b"\xcb" + struct.pack(">d", value)
        case str():
            raw = value.encode()
            if len(raw) < 32:
                return bytes([0xA0 | len(raw)]) + raw
            return _sized(len(raw), (0xD9, 0xDA, 0xDB)) + raw
        case bytes():
            return _sized(len(value), (0xC4, 0xC5, 0xC6)) + value
        case list():
            return _counted(len(value), 0x90, 0xDC) + b"".join(map(pack, value))  # pyright: ignore[reportUnknownArgumentType]
        case dict():
            body = b"".join(pack(key) + pack(inner) for key, inner in value.items())  # pyright: ignore[reportUnknownVariableType]
            return _counted(len(value), 0x80, 0xDE) + body  # pyright: ignore[reportUnknownArgumentType]
        case _:
            raise TypeError(f"no msgpack for {type(value)}")


def _pack_int(value: int) -> bytes:
    if 0 <= value < 128:
        return bytes([value])
    if -32 <= value < 0:
        return struct.pack(">b", value)
    formats = ((0xCC, ">B"), (0xCD, ">H"), (0xCE, ">I"), (0xCF, ">Q"))
    if value < 0:
        formats = ((0xD0, ">b"), (0xD1, ">h"), (0xD2, ">i"), (0xD3, ">q"))
    for lead, code in formats:
        try:
            return bytes([lead]) + struct.pack(code, value)
        except struct.error:
            continue
    raise ValueError(f"{value} does not fit into msgpack")


def _sized(n: int, leads: tuple[int, int, int]) -> bytes:
    if n < 1 << 8:
        return bytes([leads[0], n])
    if n < 1 << 16:
        return bytes([leads[1]]) + struct.pack(">H", n)
    return bytes([leads[2]]) + struct.pack(">I", n)


def _counted(n: int, fix: int, lead: int) -> bytes:
    if n < 16:
        return bytes([fix | n])
    if n < 1 << 16:
        return bytes([lead]) + struct.pack(">H", n)
    return bytes([lead + 1]) + struct.pack(">I", n)
