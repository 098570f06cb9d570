"""Long frames of ids are looked at once, without a copy, and a wrong id in them is found where it is."""

import tracemalloc

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from enginepool.protocol.errors import WireError
from enginepool.protocol.messages import FrameSpec
from enginepool.protocol.ragged import read_rows

ROWS, LENGTH = 1000, 1000
LAYOUTS = (("query", "items", "item_lengths"),)


def rows(query: list[int], wrong: dict[int, int]) -> tuple[list[FrameSpec], list[bytes]]:
    """A query and ROWS items of LENGTH ids, of which some are `wrong`, by their place among all."""
    items = np.full(ROWS * LENGTH, 7, np.int32)
    for at, id_ in wrong.items():
        items[at] = id_
    frames = [np.array(query, np.int32), items, np.full(ROWS, LENGTH, np.uint32)]
    specs = [
        FrameSpec("query", "int32", (len(query),)),
        FrameSpec("items", "int32", (len(items),)),
        FrameSpec("item_lengths", "uint32", (ROWS,)),
    ]
    return specs, [frame.tobytes() for frame in frames]


@pytest.mark.parametrize("at", [0, 999, 262_143, 262_144, 500_500, ROWS * LENGTH - 1])
def test_the_first_negative_id_is_named_by_its_row_and_its_place(at: int) -> None:
    specs, frames = rows([1, 2], {at: -3, ROWS * LENGTH - 1: -4} if at != ROWS * LENGTH - 1 else {at: -3})
    with pytest.raises(WireError) as refused:
        read_rows(specs, frames, LAYOUTS, "a request")
    assert refused.value.message == f"items[{at // LENGTH}][{at % LENGTH}]: token id -3 is negative"
    specs, frames = rows([1, -2], {at: -3})
    with pytest.raises(WireError, match=r"query\[1\]: token id -2 is negative"):
        read_rows(specs, frames, LAYOUTS, "a request")


@pytest.mark.parametrize(("query", "most"), [([1, 2], 7), ([9, 2], 9), ([], 7)])
def test_the_largest_id_of_query_and_items_is_found_without_a_copy(query: list[int], most: int) -> None:
    specs, frames = rows(query, {})
    tracemalloc.start()
    try:
        found = read_rows(specs, frames, LAYOUTS, "a request")
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert found == (ROWS, ROWS * (LENGTH + len(query)), LENGTH + len(query), most, len(query), False)
    assert peak < len(frames[1]) / 10


def refused_text(text: bytes, lengths: list[int]) -> str:
    """Why items of these lengths are refused, "" if they are not."""
    specs = [
        FrameSpec("query", "utf8", (2,)),
        FrameSpec("items", "utf8", (len(text),)),
        FrameSpec("item_lengths", "uint32", (len(lengths),)),
    ]
    try:
        read_rows(specs, [b"qu", text, np.array(lengths, np.uint32).tobytes()], LAYOUTS, "a request")
    except WireError as error:
        return error.message
    return ""


@given(st.sampled_from([70_000, 262_140, 600_000]), st.integers(0, 599_999), st.sampled_from(["é", "€", "😀"]), st.booleans())
def test_in_a_long_text_the_first_byte_that_is_not_utf8_is_named(size: int, at: int, character: str, ascii_: bool) -> None:
    at %= size
    text = bytearray(b"a" * size if ascii_ else (character * size).encode()[:size])
    text[at:] = b"a" * (size - at)
    while text and not _is_utf8(bytes(text[:at])):  # the last character before it may be cut
        at -= 1
        text[at:] = b"a" * (size - at)
    assert refused_text(bytes(text), [size]) == ""
    text[at] = 0xFF
    assert refused_text(bytes(text), [size]) == f"items[0]: not UTF-8 at byte {at}"
    text[at : at + 4] = "😀".encode()
    if len(text) == size:
        assert refused_text(bytes(text), [size]) == ""
        assert refused_text(bytes(text), [at + 2, size - at - 2]) == f"items[0]: not UTF-8 at byte {at}"


def _is_utf8(text: bytes) -> bool:
    try:
        text.decode()
    except UnicodeDecodeError:
        return False
    return True
