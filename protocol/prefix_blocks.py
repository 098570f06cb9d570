"""Blocks of tokens by number: how a worker tells which beginnings of prompts its engine holds. The same in every process."""

from collections.abc import Sequence
from hashlib import blake2b

#: tokens of a block, and blocks of a prompt that are looked at
BLOCK, MOST_BLOCKS = 64, 512
#: blocks that a group remembers, and that a worker reports at most
REMEMBERED = 1 << 16


def blocks_of(tokens: bytes | memoryview, known: Sequence[int] = (), adapter: str = "") -> list[int]:
    """A number for each whole block of a prompt (bytes of int32), which tells it and all blocks before it from others. `known`:
    those of its beginning. With another `adapter` the same tokens are other blocks."""
    found = list(known)
    last, step = found[-1] if found else first_parent(adapter), 4 * BLOCK
    for end in range((len(found) + 1) * step, min(len(tokens), MOST_BLOCKS * step) + 1, step):
        last = next_block(last, tokens[end - step : end])
        found.append(last)
    return found


def first_parent(adapter: str = "") -> int:
    """What stands for the block before the first one."""
    return int.from_bytes(blake2b(adapter.encode(), digest_size=8).digest(), "little") if adapter else 0


def next_block(parent: int, tokens: bytes | memoryview) -> int:
    """The number of the block of these tokens after the block `parent`: BLAKE2b of 8 bytes, with `parent` as the salt."""
    return int.from_bytes(blake2b(tokens, digest_size=8, salt=parent.to_bytes(8, "little")).digest(), "little")
