"""A weight is put together from chunks, all of the same weights."""

from collections.abc import Sequence

import numpy as np
import pytest

from enginepool.client.results import RESTARTS, WeightReader
from enginepool.errors import EngineFailed, Malformed
from enginepool.protocol.messages import FrameSpec
from enginepool.protocol.messages.weight_reports import WeightsReport, WorkerWeights

WHOLE = np.arange(12, dtype=np.float32)


def chunk(offset: int, count: int, *, version: int = 1, shape: Sequence[int] = (4, 3)) -> tuple[WeightsReport, list[bytes]]:
    values = WHOLE[offset : offset + count]
    report = WeightsReport(1, "g", version, frames=[FrameSpec("tensor", "float32", (values.size,))], shape=list(shape))
    return report, [values.tobytes()]


def test_chunks_become_the_weight_in_its_shape() -> None:
    reader = WeightReader()
    for size in (5, 5, 2):
        assert reader.weight is None
        reader.take(*chunk(reader.offset, size))
    np.testing.assert_array_equal(reader.weight, WHOLE.reshape(4, 3))


@pytest.mark.parametrize("shape", [(), (0,), (3, 0)])
def test_a_scalar_and_an_empty_weight_are_read_too(shape: Sequence[int]) -> None:
    reader = WeightReader()
    reader.take(*chunk(0, 0 if 0 in shape else 1, shape=shape))
    assert reader.weight is not None and reader.weight.shape == tuple(shape)


def test_weights_that_change_meanwhile_are_read_again_from_the_start_but_not_without_end() -> None:
    reader = WeightReader()
    reader.take(*chunk(0, 5))
    reader.take(*chunk(5, 5, version=2))
    assert (reader.weight, reader.offset) == (None, 0)
    for _ in range(2):
        reader.take(*chunk(reader.offset, 6, version=2))
    np.testing.assert_array_equal(reader.weight, WHOLE.reshape(4, 3))
    restless = WeightReader()
    for version in range(2 * RESTARTS + 1):
        restless.take(*chunk(restless.offset, 5, version=version))
    with pytest.raises(EngineFailed, match="changed"):
        restless.take(*chunk(restless.offset, 5, version=100))


def test_what_is_no_chunk_is_refused() -> None:
    reader = WeightReader()
    reader.take(*chunk(0, 10))
    with pytest.raises(Malformed, match="10 elements where 2 are left"):
        reader.take(*chunk(0, 10))
    with pytest.raises(Malformed, match="0 elements where 2 are left"):
        reader.take(*chunk(12, 1))
    with pytest.raises(EngineFailed, match="no such"):
        reader.take(WeightsReport(1, "g", workers=[WorkerWeights("w", message="no such weight")]), [])
    with pytest.raises(EngineFailed, match="is ready"):
        reader.take(WeightsReport(1, "g"), [])
