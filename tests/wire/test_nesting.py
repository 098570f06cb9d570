"""The depth of a header is found exactly, and what nests no deeper than the bound is never refused."""

from collections.abc import Mapping
from contextlib import suppress
from random import Random
from typing import Any

import msgspec
import pytest

from enginepool.protocol import messages as m
from enginepool.protocol.errors import WireError
from enginepool.protocol.frames import decode_header
from enginepool.protocol.nesting import Values, deeper
from tests.core.counting import cost_of

DECODER = msgspec.msgpack.Decoder(m.FromClient)


def scalar(chance: Random) -> Any:
    """Of any kind and of any width. Texts, bytes and extensions hold what could begin a container."""
    sign, bits = chance.choice((1, -1)), chance.randrange(64)
    kinds = (None, True, chance.uniform(-1e9, 1e9), sign * chance.getrandbits(bits), 2**64 - 1, -(2**63))
    size = chance.choice((0, 3, 15, 31, 32, 300, 70_000 if chance.random() < 0.05 else 255))
    data = chance.randbytes(size)
    return chance.choice((*kinds, "\u0511" * (size // 2), data, msgspec.msgpack.Ext(5, data)))


def value(chance: Random, levels: int) -> Any:
    """Nested `levels` deep at most: a list or a map of few values, or of more than their first byte can count."""
    if not levels or chance.random() < 0.2:
        return scalar(chance)
    inner = [value(chance, levels - 1) for _ in range(chance.choice((0, 1, 1, 2, 2, 3)))]
    inner += [scalar(chance) for _ in range(chance.choice((0, 0, 0, 14, 17)))]
    chance.shuffle(inner)
    return inner if chance.random() < 0.5 else {f"{chance.choice(('', 'key'))}{i}": one for i, one in enumerate(inner)}


def depth(value: Any) -> int:
    if isinstance(value, Mapping):
        return 1 + max((depth(inner) for inner in value.values()), default=0)  # type: ignore[arg-type]
    if isinstance(value, list):
        return 1 + max((depth(inner) for inner in value), default=0)  # type: ignore[arg-type]
    return 0


def test_depth_is_found_exactly() -> None:
    found = [0, 0]
    for seed in range(500):
        chance = Random(seed)
        header = {f"{i}": value(chance, chance.randrange(9)) for i in range(chance.randrange(20))}
        levels = chance.randint(1, 8)
        is_deeper = depth(header) > levels
        assert deeper(msgspec.msgpack.encode(header), levels, Values(1 << 20)) == is_deeper, seed
        found[is_deeper] += 1
    assert min(found) > 100, found


def nested(levels: int) -> Any:
    value: Any = 1
    for level in range(levels):
        value = [value] if level % 2 else {"in": value}
    return value


@pytest.mark.parametrize("more", [0, 1])
def test_a_header_is_read_up_to_the_bound_and_refused_above_it(more: int) -> None:
    header = msgspec.msgpack.encode({"type": "cancel", "id": 1, "later": nested(m.MAX_NESTING - 1 + more)})
    if not more:
        assert decode_header(DECODER, header) == m.Cancel(1)
        return
    with pytest.raises(WireError, match="nested") as caught:
        decode_header(DECODER, header)
    assert (caught.value.code, caught.value.field, caught.value.limit) == ("malformed", "frame 0", str(m.MAX_NESTING))


def test_a_value_is_seen_although_its_key_comes_again() -> None:
    pair = msgspec.msgpack.encode("later")
    deep = pair + msgspec.msgpack.encode(nested(m.MAX_NESTING)) + pair + b"\x01"
    header = b"\x84" + msgspec.msgpack.encode({"type": "cancel", "id": 1})[1:] + deep
    with pytest.raises(WireError, match="nested"):
        decode_header(DECODER, header)


def test_extensions_are_passed_over() -> None:
    for data in (b"", b"\x91", b"\x91" * 16, b"\x91" * 40, b"\x91" * 300, b"\x91" * 70_000):
        value = msgspec.msgpack.encode({"a": msgspec.msgpack.Ext(5, data), "b": [[1]]})
        assert not deeper(value, 3, Values(1 << 20))
        assert deeper(value, 2, Values(1 << 20))


def test_a_request_with_many_labels_is_not_read_value_by_value() -> None:
    score = m.Score(1, [], labels=[0x9191 + i for i in range(m.MAX_LABELS)])
    header = msgspec.msgpack.encode(score)
    assert cost_of(lambda: decode_header(DECODER, header)).steps < 1000


def test_tokens_of_many_streams_are_not_read_value_by_value() -> None:
    decoder = msgspec.msgpack.Decoder(m.FromWorker)
    steps = [m.Step(0x9191 + i, 0, 0x91, 1) for i in range(1000)]
    progress = m.GenerationProgress(1, 0, steps, [m.FrameSpec("tokens", "int32", (1000,))])
    header = msgspec.msgpack.encode(progress)
    assert cost_of(lambda: decode_header(decoder, header)).steps < 1000
    for deep in (nested(m.MAX_NESTING), nested(m.MAX_NESTING - 3)):
        # Behind the fields that a step has, and next to those of the message.
        longer = msgspec.msgpack.decode(header)
        longer["steps"][7].append(deep)
        other = {**msgspec.msgpack.decode(header), "later": deep}
        for changed in map(msgspec.msgpack.encode, (longer, other)):
            if depth(msgspec.msgpack.decode(changed)) > m.MAX_NESTING:
                with pytest.raises(WireError, match="nested"):
                    decode_header(decoder, changed)
            else:
                assert decode_header(decoder, changed) == progress


EMPTY = b"\x90"
MANY = 900_000


UNKNOWN: list[Mapping[str, Any]] = [
    {"later": msgspec.Raw(b"\xdd" + MANY.to_bytes(4, "big") + EMPTY * MANY)},
    {"later": [1] * MANY, "more": [[]] * 40},
    {"later": [[1] * MANY, [[]] * 40]},
    {"later": msgspec.Raw(b"\xdd" + (MANY // 2).to_bytes(4, "big") + b"\xcc\x90" * (MANY // 2))},
    {f"later{i}": [[]] * 40 for i in range(18_000)},
    {f"later{i}": None for i in range(60_000)} | {"more": [[]] * 40},
]


@pytest.mark.parametrize(
    "unknown",
    UNKNOWN,
    ids=["empty arrays", "integers", "integers next to arrays", "integers like arrays", "fields", "empty fields"],
)
def test_a_header_of_a_client_is_not_read_value_by_value_without_end(unknown: Mapping[str, Any]) -> None:
    """In any message, under keys that the receiver does not know. And what it costs is counted, also where it is refused."""
    header = msgspec.msgpack.encode({"type": "ping", "at": 1, **unknown})
    assert len(header) <= m.MAX_HEADER_BYTES
    values = Values(m.MAX_VALUES)

    def read() -> None:
        with suppress(WireError):
            decode_header(DECODER, header, values)

    steps = cost_of(read).steps
    assert steps < 100 * m.MAX_VALUES and steps < 1000 + 100 * values.steps


def test_the_steps_to_find_a_depth_are_its_fields_and_values() -> None:
    def steps(**later: Any) -> int:
        values = Values(m.MAX_VALUES)
        with suppress(WireError):
            decode_header(DECODER, msgspec.msgpack.encode({"type": "cancel", "id": 1, **later}), values)
        return values.steps

    assert steps(later=[[]] * (m.MAX_NESTING - 2)) == 0, "too few to be nested deeper"
    assert steps(later=[[]] * 1000) == 3 + 1001
    assert steps(later=[[]] * 1000, more=[1] * 1000) == 4 + 1001, "a field with few arrays is passed over"
    deep: list[Any] = []
    for _ in range(100):
        deep = [deep]
    assert steps(later=deep) == 3 + m.MAX_NESTING, "it ends where the header is too deep"
    assert steps(later=[[]] * m.MAX_VALUES) == 3 + m.MAX_VALUES + 1


def test_a_header_with_too_many_values_is_malformed_and_one_with_as_many_is_read() -> None:
    def header(count: int) -> bytes:
        return msgspec.msgpack.encode({"type": "cancel", "id": 1, "later": [[]] * count})

    assert decode_header(DECODER, header(m.MAX_VALUES - 1), Values(m.MAX_VALUES)) == m.Cancel(1)
    with pytest.raises(WireError, match="values") as caught:
        decode_header(DECODER, header(m.MAX_VALUES), Values(m.MAX_VALUES))
    assert (caught.value.code, caught.value.field, caught.value.limit) == ("malformed", "frame 0", str(m.MAX_VALUES))
