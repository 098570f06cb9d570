"""Lines that come through a pipe: whole ones, in pieces of any size, and for several readers."""

import asyncio
import os
import random

import pytest

from enginepool.cli import input_stream
from enginepool.cli.input_stream import PipeLines


def through_a_pipe(pieces: list[bytes], readers: int) -> list[tuple[int, int, bytes]]:
    async def story() -> list[tuple[int, int, bytes]]:
        read, write = os.pipe()
        found: list[tuple[int, int, bytes]] = []
        lines = PipeLines(read)

        async def take() -> None:
            async for line in lines:
                found.append(line)

        takers = [asyncio.create_task(take()) for _ in range(readers)]
        for piece in pieces:
            os.write(write, piece)
            await asyncio.sleep(0)
        os.close(write)
        await asyncio.gather(*takers)
        os.close(read)
        return sorted(found)

    return asyncio.run(story())


@pytest.mark.parametrize("readers", [1, 3])
def test_lines_are_whole_in_pieces_of_any_size(readers: int) -> None:
    chance = random.Random(1)
    text = b"".join(bytes([97 + i % 26]) * (i % 17) + b"\n" for i in range(200)) + b"no end"
    cuts = sorted(chance.sample(range(len(text)), 60))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    lines = text.splitlines(keepends=True)
    offsets = [sum(map(len, lines[:i])) for i in range(len(lines))]
    assert through_a_pipe(pieces, readers) == list(zip(range(1, len(lines) + 1), offsets, lines, strict=True))


def test_an_empty_pipe_has_no_lines() -> None:
    assert through_a_pipe([], 2) == []


def test_a_byte_order_mark_is_skipped_before_the_first_line_alone() -> None:
    mark = b"\xef\xbb\xbf"
    assert through_a_pipe([mark[:1], mark[1:] + b"a\n" + mark + b"b\n"], 1) == [(1, 0, b"a\n"), (2, 5, mark + b"b\n")]


def test_of_a_line_that_is_too_long_only_so_much_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(input_stream, "MAX_LINE_BYTES", 10)
    monkeypatch.setattr(input_stream, "_CHUNK", 8)
    found = through_a_pipe([b"x" * 100, b"yz\nshort\n"], 1)
    assert [(number, text) for number, _, text in found] == [(1, b"x" * 11), (2, b"short\n")]
