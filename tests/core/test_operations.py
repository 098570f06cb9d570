"""What the coordinator does with operations, whichever they are."""

import msgspec

from enginepool.coordinator.operations.base import Work
from enginepool.coordinator.operations.score import ScoreOperation
from enginepool.coordinator.operations.table import OPERATIONS
from enginepool.coordinator.requests.fitting import refusal as refusal_of
from enginepool.protocol.messages import Batch
from tests.core.machines import CAN, Pool, failures, results, work


class Twin(ScoreOperation):
    """Another operation, with the rows of `score`."""

    name = "twin"


def twin(rows: int = 1) -> Work:
    content = work(rows)
    part = msgspec.structs.replace(content.part, operation="twin")
    return msgspec.structs.replace(content, operation=Twin(), signature=1 << 10, part=part)


BOTH = msgspec.structs.replace(CAN, operations=("score", "twin"))


def test_operations_have_names_and_signatures_of_their_own() -> None:
    assert len({operation.name for operation in OPERATIONS.values()}) == len(OPERATIONS)


def test_a_group_refuses_an_operation_that_its_workers_do_not_have() -> None:
    pool = Pool()
    client = pool.client()
    pool.worker()
    pool.submit(client, 1, twin())
    failure = failures(pool.sent)[1]
    assert (failure.code, failure.field, failure.limit) == ("bad_request", "type", "score")
    assert failure.message == "type: twin is not an operation of this group; its workers have: score"


def test_what_waited_for_a_worker_that_does_not_have_its_operation_is_refused_when_it_is_ready() -> None:
    pool = Pool()
    client = pool.client()
    pool.submit(client, 1, twin())
    assert not failures(pool.sent)
    pool.worker()
    assert failures(pool.sent)[1].field == "type"


def test_a_batch_never_mixes_operations() -> None:
    pool = Pool()
    client = pool.client()
    for i in range(3):
        pool.submit(client, 2 * i, work(1))
        pool.submit(client, 2 * i + 1, twin())
    pool.worker(can=BOTH)
    pool.finish_all()
    batches = [sent.message for sent in pool.sent if isinstance(sent.message, Batch)]
    assert [{part.operation for part in batch.parts} for batch in batches] == [{"score"}, {"twin"}]
    assert len(results(pool.sent)) == 6


def test_an_operation_that_the_workers_do_not_have_is_refused() -> None:
    assert refusal_of(twin(), BOTH) is None and refusal_of(twin(), None) is None
    found = refusal_of(twin(), CAN)
    assert found is not None and found.field == "type"


def test_workers_of_a_group_have_the_same_operations() -> None:
    pool = Pool()
    pool.worker("a")
    pool.worker("b", can=BOTH)
    assert pool.machine.core.groups["g"].workers.keys() == {"a"}
