"""Within a priority, clients that generate share slots by the tokens that they use, and not by those that they ask for."""

from collections import Counter

import msgspec
import pytest

from enginepool.coordinator.core import events as ev
from enginepool.coordinator.core import machine
from enginepool.coordinator.core.context import Context
from enginepool.coordinator.core.group import Group
from enginepool.protocol.messages import StartGeneration
from tests.core.generations import CAN, GeneratingPool, generate
from tests.core.machines import Sent

ROOM = msgspec.structs.replace(CAN, batch_tokens=100_000, inflight_tokens=100_000, context=10_000)
PROMPT = 10


class Shared:
    """Two clients with more sequences than there are slots. `most`: their `max_new_tokens`; `made`: the tokens that come."""

    def __init__(self, most: tuple[int, int], made: tuple[int, int], *, cancels: bool = False) -> None:
        self.pool = GeneratingPool()
        self.pool.check_every = 50
        self.clients = self.pool.client(), self.pool.client()
        self.made, self.cancels = made, cancels
        self._first = dict[int, int]()
        for number in range(400):
            for i, client in enumerate(self.clients):
                self.pool.submit(client, number, generate(PROMPT, max_new_tokens=most[i], sampling_seed=i * 1000 + number))

    def counts(self, ends: int) -> tuple[int, int]:
        """Sequences of both among the first ones that ended."""
        self.pool.worker(can=ROOM)
        waiting, found = self.pool.tasks(), Counter[int]()
        for _ in range(ends):
            task = waiting.pop(0)
            whose, number = self._asked(task)
            found[whose] += 1
            reason = "" if self.cancels and not whose else "stop"
            sent = self.pool.step(task.link, (task, 0, 0, [7] * self.made[whose], reason))
            if not reason:
                sent += self.pool.do(ev.CancelAsked(0, self.clients[whose], number))
            waiting += self.pool.tasks(sent)
        return found[0], found[1]

    @staticmethod
    def _asked(task: Sent) -> tuple[int, int]:
        assert isinstance(task.message, StartGeneration) and task.message.sampling.sampling_seed is not None
        return divmod(task.message.sampling.sampling_seed, 1000)


def test_a_client_that_asks_for_more_than_comes_has_as_many_slots_as_one_that_does_not() -> None:
    first, second = Shared((4000, 40), (30, 30)).counts(300)
    assert abs(first - second) <= 10, (first, second)


def test_a_client_whose_sequences_are_long_has_fewer_of_them() -> None:
    first, second = Shared((100, 100), (90, 10)).counts(300)
    assert 4 * first <= second <= 6 * first, (first, second)


def test_a_client_whose_sequences_do_not_end_leaves_slots_to_others() -> None:
    """Its tokens count while they come, and not at the end alone."""
    pool = GeneratingPool()
    long, short = pool.client(), pool.client()
    for number in range(100):
        pool.submit(long, number, generate(PROMPT, max_new_tokens=4000))
        pool.submit(short, number, generate(PROMPT, max_new_tokens=10, sampling_seed=number))
    link = pool.worker(can=ROOM)
    running = [(task, 0) for task in pool.tasks()]
    for _ in range(300):
        steps = [(task, 0, at, [7], "length" if at == 9 and is_short(task) else "") for task, at in running]
        sent = pool.step(link, *steps)
        running = [(task, at + 1) for (task, at), step in zip(running, steps, strict=True) if not step[-1]]
        running += [(task, 0) for task in pool.tasks(sent)]
        assert len(running) == ROOM.inflight_rows
    assert 2 <= sum(is_short(task) for task, _ in running) <= 6


def is_short(task: Sent) -> bool:
    assert isinstance(task.message, StartGeneration)
    return task.message.sampling.sampling_seed is not None


def test_what_was_generated_counts_also_where_it_is_cancelled() -> None:
    first, second = Shared((100, 100), (90, 10), cancels=True).counts(300)
    assert 4 * first <= second <= 6 * first, (first, second)


def test_a_stream_of_new_clients_does_not_keep_one_that_has_generated_much() -> None:
    """Each of them begins at the present, which moves by what is generated as well."""
    pool = GeneratingPool()
    pool.check_every = 50
    heavy = pool.client(b"heavy")
    for number in range(200):
        pool.submit(heavy, number, generate(PROMPT, max_new_tokens=500))
    pool.worker(can=ROOM)
    running, new, waiting, served = pool.tasks(), 0, 0, 0
    for _ in range(400):
        while waiting < 2:
            new, waiting = new + 1, waiting + 1
            pool.submit(pool.client(b"new%d" % new), 1, generate(PROMPT, max_new_tokens=500, sampling_seed=new))
        task = running.pop(0)
        for started in pool.tasks(pool.step(task.link, (task, 0, 0, [7] * 500, "length"))):
            running.append(started)
            waiting -= is_short(started)
            served += not is_short(started)
    assert served >= 20, served


def test_tokens_of_the_only_client_that_waits_are_no_reason_to_look_for_room(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = GeneratingPool()
    client = pool.client()
    for number in range(20):
        pool.submit(client, number, generate(PROMPT, max_new_tokens=100))
    link = pool.worker(can=ROOM)
    looks, real = list[Group](), machine.pump

    def pump(core: Context, group: Group) -> bool:
        looks.append(group)
        return real(core, group)

    monkeypatch.setattr(machine, "pump", pump)
    tasks = pool.tasks()
    for at in range(10):
        pool.step(link, *((task, 0, at, [7], "") for task in tasks))
    assert not looks
    pool.step(link, (tasks[0], 0, 10, [7], "stop"))
    assert looks
