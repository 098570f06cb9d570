"""The status says of each worker what its engine is, and engines of one group may lie on GPUs in different ways."""

from typing import Any

import msgspec
import pytest

from enginepool.coordinator.core import events as ev
from enginepool.protocol.messages import StatusReport, WorkerStatus
from tests.core.machines import CAN, Pool


def status(pool: Pool) -> list[WorkerStatus]:
    [sent] = pool.do(ev.StatusAsked(0, b"c", 1))
    assert isinstance(sent.message, StatusReport)
    return sent.message.groups[0].workers


def test_the_status_says_what_the_engine_of_a_worker_is_once_it_is_loaded() -> None:
    pool = Pool()
    said: dict[str, Any] = {"engine": "sglang 0.5.23", "device": "cuda", "dtype": "bfloat16"}
    pool.worker("w1", can=msgspec.structs.replace(CAN, **said, parallel=(2, 1, 1, 1)))
    pool.worker("w2", can=msgspec.structs.replace(CAN, **said, parallel=(1, 1, 1, 1)))
    pool.worker("w3", ready=False)
    first, second, third = status(pool)
    assert {key: getattr(first, key) for key in said} == said
    assert (first.parallel, second.parallel) == ((2, 1, 1, 1), (1, 1, 1, 1))
    assert (third.engine, third.dtype, third.parallel) == ("", "", (1, 1, 1, 1))


@pytest.mark.parametrize("wrong", [{"parallel": (0, 1, 1, 1)}, {"parallel": (1, 1, 1, 1 << 17)}, {"dtype": "b" * 2000}])
def test_what_no_engine_is_loses_the_worker(wrong: dict[str, Any]) -> None:
    pool = Pool()
    pool.worker("w", can=msgspec.structs.replace(CAN, **wrong))
    assert not pool.machine.core.groups["g"].workers
