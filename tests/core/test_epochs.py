"""A coordinator of a lower epoch than its peers have heard (journal lost, clock set back) goes above it, within bounds."""

import pytest

from enginepool.coordinator.core import effects as ef
from enginepool.coordinator.core import events as ev
from enginepool.coordinator.core.epochs import RAISES_BY_CLIENTS, RAISES_BY_WORKERS, STEP
from enginepool.coordinator.shell.decode import client_event
from enginepool.protocol.errors import WireError
from enginepool.protocol.frames import encode_header
from enginepool.protocol.messages import MAX_EPOCH, MAX_ID, Hello, Welcome
from tests.core.machines import EPOCH, Pool, accepts, codes, config, failures


class Raised(Pool):
    """A pool that notes to what its epoch is to be raised."""

    def __init__(self, raises: int = 0) -> None:
        self.raised: list[ef.RaiseEpoch] = []
        super().__init__(config())
        self.machine.core.raises = raises

    def other(self, effect: ef.Effect) -> None:
        assert isinstance(effect, ef.RaiseEpoch), effect
        self.raised.append(effect)

    def register(self, epoch: int) -> list[str]:
        sent = self.do(ev.WorkerRegistered(0, b"w", "g", "w", 1, "host", epoch))
        assert not (accepts(sent) and self.raised)
        return codes(sent)

    def hello(self, epoch: int) -> list[str]:
        sent = self.do(ev.ClientHello(0, b"c", b"c" * 16, b"t" * 16, 3, epoch=epoch))
        assert not (self.raised and [s for s in sent if isinstance(s.message, Welcome)])
        if sent and codes(sent):
            assert failures(sent)[None].incarnation == 3
        return codes(sent)


@pytest.mark.parametrize("kind", ["register", "hello"])
def test_a_peer_that_has_heard_a_higher_epoch_raises_it(kind: str) -> None:
    pool = Raised()
    assert getattr(pool, kind)(EPOCH + 5) == []
    (effect,) = pool.raised
    assert EPOCH + 5 + STEP <= effect.epoch < EPOCH + 5 + 2 * STEP
    assert not pool.machine.core.groups["g"].workers and not pool.machine.core.clients


def test_a_journal_that_is_lost_twice_gives_no_epoch_twice() -> None:
    """Peers that were away heard only the first of these coordinators; others wait for a higher epoch than the second one's."""
    first, second = Raised(), Raised()
    second.machine.core.epoch += 1  # it started later
    for pool in (first, second):
        pool.register(EPOCH + 5)
    assert first.raised[0].epoch != second.raised[0].epoch


@pytest.mark.parametrize("kind", ["register", "hello"])
@pytest.mark.parametrize("epoch", [0, EPOCH - 1, EPOCH])
def test_a_peer_that_has_heard_no_higher_epoch_is_let_in(kind: str, epoch: int) -> None:
    pool = Raised()
    assert getattr(pool, kind)(epoch) == []
    assert not pool.raised
    assert pool.machine.core.groups["g"].workers or pool.machine.core.clients


def test_clients_raise_the_epoch_a_few_times_in_the_life_of_a_journal_and_workers_more_often() -> None:
    pool = Raised(RAISES_BY_CLIENTS)
    assert pool.hello(EPOCH + 5) == ["bad_request"]
    assert not pool.raised
    assert pool.register(EPOCH + 5) == [] and len(pool.raised) == 1
    pool = Raised(RAISES_BY_WORKERS)
    assert pool.register(EPOCH + 5) == ["superseded"]
    assert not pool.raised


def test_an_epoch_that_leaves_no_room_above_it_is_not_followed() -> None:
    pool = Raised()
    assert pool.register(MAX_EPOCH + 1) == ["superseded"]
    assert pool.hello(MAX_EPOCH + 1) == ["bad_request"]
    assert not pool.raised
    assert pool.register(MAX_EPOCH) == []
    assert MAX_EPOCH + STEP <= pool.raised[0].epoch < MAX_EPOCH + 2 * STEP


@pytest.mark.parametrize("kind", ["register", "hello"])
def test_all_peers_come_back_after_one_has_raised_the_epoch_as_high_as_it_can(kind: str) -> None:
    pool = Raised()
    pool.hello(MAX_EPOCH)
    pool.machine.core.epoch = pool.raised.pop().epoch + 1
    for epoch in (pool.machine.core.epoch, pool.machine.core.epoch - 1):
        client_event(0.0, b"c", [encode_header(Hello(b"c" * 16, b"t" * 16, epoch=epoch))], 1 << 20)
        assert getattr(pool, kind)(epoch) == []
        assert not pool.raised


@pytest.mark.parametrize("epoch", [-1, MAX_ID + 1])
def test_a_hello_with_an_impossible_epoch_is_refused(epoch: int) -> None:
    frame = encode_header(Hello(b"c" * 16, b"t" * 16, epoch=epoch))
    with pytest.raises(WireError, match=f"epoch: {epoch} is outside 0..{MAX_ID}") as refused:
        client_event(0.0, b"link", [frame], 1 << 20)
    assert (refused.value.code, refused.value.field) == ("bad_request", "epoch")


def test_the_token_of_a_known_client_is_checked_before_its_epoch() -> None:
    pool = Raised()
    pool.client(b"own", client=b"c" * 16)
    sent = pool.do(ev.ClientHello(0, b"thief", b"c" * 16, b"x" * 16, 3, epoch=EPOCH + 5))
    assert codes(sent) == ["unauthorized"] and not pool.raised
