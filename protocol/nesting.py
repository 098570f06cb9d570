"""How deep a header is nested: what one receiver reads, all must read, and a decoder that recurses has to end somewhere.

A decoder skips what it does not know, however deep that is. So depth is looked at apart. Most headers have fewer bytes that
could begin a container than the bound, and need no further look. That look goes from value to value: values are bounded, too.
"""

import msgspec

Buffer = bytes | memoryview

#: bytes with which a map or an array begins; they also occur inside numbers and texts
_CONTAINERS = bytes([*range(0x80, 0xA0), 0xDC, 0xDD, 0xDE, 0xDF])
#: fields of messages that are arrays of integers, which their decoder has checked
_FLAT = frozenset({"labels", "ids"})
#: by the first byte: how many bytes hold the length of a text, bytes or an extension
_LENGTH_BYTES = {0xC4: 1, 0xC5: 2, 0xC6: 4, 0xC7: 1, 0xC8: 2, 0xC9: 4, 0xD9: 1, 0xDA: 2, 0xDB: 4}
#: by the first byte: how many bytes a value of fixed size has in all; 0: not such a value
_SIZES = bytes(
    [
        *[1] * 0x80,  # integers
        *[0] * 0x20,  # maps, arrays
        *[1 + n for n in range(0x20)],  # texts
        *[1, 1, 1, 1],  # nil, (never used), false, true
        *[0] * 6,  # bytes, extensions
        *[5, 9],  # floats
        *[2, 3, 5, 9] * 2,  # integers
        *[3, 4, 6, 10, 18],  # extensions of fixed size
        *[0] * 7,  # texts, arrays, maps
        *[1] * 0x20,  # negative integers
    ]
)  # fmt: skip
_fields = msgspec.msgpack.Decoder(dict[str, msgspec.Raw])


class TooManyValues(Exception):
    """A header holds more values than its receiver looks at."""


class Values:
    """How many values of one header a receiver still looks at, and how many steps of Python it took for those before: one for
    each value and for each field. They are counted also where the header is refused."""

    __slots__ = ("left", "steps")

    def __init__(self, left: int) -> None:
        self.left = left
        self.steps = 0


def deeper(header: Buffer, levels: int, values: Values) -> bool:
    """Whether containers in `header`, a whole msgpack map with keys of text, lie in each other for more than `levels`; the map
    itself is the first. Raises TooManyValues where more than `values.left` would have to be looked at."""
    if _openings(header) <= levels:
        return False
    if (count := _count(header)) > values.left:
        raise TooManyValues
    values.steps += count
    fields = _fields.decode(header)
    if len(fields) < count:
        # A key stands there twice: only its last value is among the fields.
        return _deeper(header, levels, values)
    for name, raw in fields.items():
        value = bytes(raw)
        if name not in _FLAT and _openings(value) >= levels and _deeper(value, levels - 1, values):
            return True
    return False


def _openings(value: Buffer) -> int:
    """Bytes that may begin a container: no fewer than containers."""
    return len(value) - len(bytes(value).translate(None, _CONTAINERS))


def _count(header: Buffer) -> int:
    """Entries of the map that begins here."""
    first = header[0]
    if first < 0xDE:
        return first & 0x0F
    return int.from_bytes(header[1 : 3 if first == 0xDE else 5], "big")


def _deeper(value: Buffer, levels: int, values: Values) -> bool:
    """Whether it is nested deeper than `levels`."""
    at, left, unseen = 0, 1, values.left
    #: values that are still to come in each container around
    around: list[int] = []
    try:
        while True:
            while not left:
                if not around:
                    return False
                left = around.pop()
            left -= 1
            unseen -= 1
            if unseen < 0:
                raise TooManyValues
            first = value[at]
            if size := _SIZES[first]:
                at += size
            elif first in _LENGTH_BYTES:
                length = _LENGTH_BYTES[first]
                at += 1 + length + int.from_bytes(value[at + 1 : at + 1 + length], "big") + (0xC7 <= first <= 0xC9)
            else:
                around.append(left)
                if len(around) > levels:
                    return True
                if first < 0xA0:
                    left, at = first & 0x0F, at + 1
                else:
                    length = 2 if first in (0xDC, 0xDE) else 4
                    left, at = int.from_bytes(value[at + 1 : at + 1 + length], "big"), at + 1 + length
                if first < 0x90 or first in (0xDE, 0xDF):
                    left *= 2
    finally:
        values.steps += values.left - unseen
        values.left = unseen
