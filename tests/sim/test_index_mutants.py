"""Would the simulator notice an index that no longer says what it indexes? Each of these bugs leaves one stale."""

from collections.abc import Callable
from random import Random
from typing import Any

import pytest

from enginepool.coordinator.core.group import Group
from enginepool.coordinator.core.request import Request
from enginepool.coordinator.requests.lifecycle import RequestLifecycle
from enginepool.coordinator.scheduling.queue import Queue
from enginepool.coordinator.scheduling.version_queue import VersionQueue
from tests.sim.planted import Mutate, find
from tests.sim.simulation import simulate

SEEDS = range(1, 401)


class Forgets(dict[Any, None]):
    """An index into which nothing is written."""

    def __setitem__(self, key: Any, value: None) -> None:
        """Nothing."""


def _with_group(patch: pytest.MonkeyPatch, name: str, index: Callable[[], Any]) -> None:
    real = Group.__init__

    def init(self: Group, *args: Any) -> None:
        real(self, *args)
        setattr(self, name, index())

    patch.setattr(Group, "__init__", init)


def requests_that_were_cut_are_not_listed(patch: pytest.MonkeyPatch) -> None:
    _with_group(patch, "cut", Forgets)


def answered_requests_stay_listed(patch: pytest.MonkeyPatch) -> None:
    real = RequestLifecycle._finish  # pyright: ignore[reportPrivateUsage]

    def finish(self: RequestLifecycle, request: Request, *args: Any) -> None:
        real(self, request, *args)
        if request.pieces:
            request.group.live[request] = None

    patch.setattr(RequestLifecycle, "_finish", finish)


def answered_requests_are_still_awaited(patch: pytest.MonkeyPatch) -> None:
    def forget(self: VersionQueue[Any]) -> None:
        """Nothing."""

    patch.setattr(VersionQueue, "forget", forget)


def lanes_are_not_built_anew_where_more_can_be_packed(patch: pytest.MonkeyPatch) -> None:
    def sort(self: Queue[Any]) -> None:
        """Nothing."""

    patch.setattr(Queue, "sort", sort)


@pytest.mark.parametrize(
    "mutate",
    [
        requests_that_were_cut_are_not_listed,
        answered_requests_stay_listed,
        answered_requests_are_still_awaited,
        lanes_are_not_built_anew_where_more_can_be_packed,
    ],
    ids=lambda mutate: mutate.__name__,
)
def test_an_index_that_is_stale_is_found(mutate: Mutate, monkeypatch: pytest.MonkeyPatch) -> None:
    order = Random(0).sample(SEEDS, len(SEEDS))
    find(mutate, monkeypatch, order, lambda seed: simulate(seed, 1 + seed % 8, packed=seed % 2 == 0, updates=True))
