"""New weights for a pool whose ranks copy each bucket out of the memory of the rank before: as by a broadcast, if one dies too.

On GPUs they do where they are on one host. Here memory of the host is what they copy out of.
"""

import signal
import time
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest

from enginepool.trainer import buffers
from enginepool.transfer.collective import Rendezvous
from enginepool.transfer.peer_copy import CopySource
from enginepool.transfer.process_group import ProcessGroup
from tests.open_files import lent_here
from tests.process.daemons import PATIENCE_S
from tests.process.scenes import Play, arena, play
from tests.process.weight_scenes import killed_trainer, loss, twenty_updates, wrong_weights

__all__ = ["arena", "play"]


@pytest.fixture(autouse=True)
def formed(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[ProcessGroup]]:
    """The publisher's sides of groups; those of the first and of the last update, which succeed, are of copies."""
    groups: list[ProcessGroup] = []
    join = Rendezvous.join

    def joined(rendezvous: Rendezvous, name: str, world: int, **options: Any) -> ProcessGroup:
        groups.append(join(rendezvous, name, world, **options))
        return groups[-1]

    monkeypatch.setattr(buffers, "COPYING", ("cuda", "cpu"))
    monkeypatch.setattr(Rendezvous, "join", joined)
    before = lent_here()
    yield groups
    assert isinstance(groups[0], CopySource) and groups[0].world == 4
    assert isinstance(groups[-1], CopySource)
    end = time.monotonic() + PATIENCE_S
    while not lent_here() <= before:  # threads that copied may have to notice first that the copy is not needed any more
        assert time.monotonic() < end, "a publisher that is closed has given its memory back"
        time.sleep(0.01)


def test_after_each_of_twenty_updates_under_load_every_answer_is_of_a_committed_version(
    play: Play, formed: list[ProcessGroup]
) -> None:
    play(twenty_updates)
    assert len(formed) == 1, "every update had the same group"


def test_weights_that_are_wrong_are_refused_by_name_and_right_ones_taken_after_each(play: Play) -> None:
    play(wrong_weights)


@pytest.mark.parametrize(
    ("who", "sign"),
    [("worker", signal.SIGKILL), ("stager", signal.SIGKILL), ("stager", signal.SIGSTOP)],
    ids=["worker-killed", "stager-killed", "stager-stopped"],
)
def test_a_loss_in_the_middle_of_the_chain_and_of_the_transfer_aborts_and_touches_no_engine(
    play: Play, who: str, sign: signal.Signals
) -> None:
    play(partial(loss, phase="transfer", who=who, sign=sign))


def test_a_trainer_that_is_killed_leaves_the_pool_to_serve_on(play: Play) -> None:
    play(partial(killed_trainer, where="transfer", copying="cpu"))
