"""Weight updates: every step of the transaction, what ends it, and what is never allowed to happen on the way."""

from enginepool.coordinator.events import GroupWeights
from enginepool.protocol.updates import (
    Committed,
    HandOver,
    Join,
    Phase,
    Prepare,
    Published,
)
from tests.core.machines import results, work
from tests.core.publishers import DIGEST, Trainer, UpdatePool, of_type


def ready(workers: int = 2, **kwargs: object) -> tuple[UpdatePool, Trainer, list[bytes]]:
    """A pool of workers that dialled in, and somebody who trains."""
    pool = UpdatePool(**kwargs)
    return pool, Trainer(pool), [pool.worker(f"w{i}") for i in range(workers)]


def test_the_straight_path_of_a_staged_update() -> None:
    pool, trainer, links = ready()
    prepares = trainer.publish(1)
    assert [s.link for s in prepares if isinstance(s.message, Prepare)] == links
    joins = pool.answer(prepares)
    (mine, *theirs) = of_type(joins, Join)
    assert (mine.id, mine.rank, mine.world, mine.rendezvous) == (1, 0, 3, theirs[0].rendezvous)
    assert [join.rank for join in theirs] == [1, 2]
    assert of_type(pool.answer(joins), Phase)[-1].phase == "transfer"
    assert trainer.sent() == []
    assert of_type(pool.stage(links), Phase)[-1].phase == "staged"
    handed = trainer.commit()
    assert [s.link for s in handed if isinstance(s.message, HandOver)] == links
    assert of_type(pool.answer(handed), Published) == []
    assert pool.journal[-1].weights == GroupWeights(1, DIGEST, publisher=trainer.link.ljust(16, b".").hex())
    end = pool.written()
    assert [s.link for s in end if isinstance(s.message, Committed)] == links
    (published,) = of_type(end, Published)
    assert (published.version, published.record.outcome, published.record.committed) == (1, "committed", 2)
    pool.submit(trainer.link, 50, work())
    assert results(pool.finish(pool.batches[0], version=1))[50].version == 1
