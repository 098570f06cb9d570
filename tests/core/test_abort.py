"""Ending the requests of a client, or one of them: whose they are, in which groups, and who says which client is meant."""

import asyncio
import re
from typing import Any
from unittest.mock import Mock

import pytest

from enginepool.cli.status import tables
from enginepool.client.control import ControlCalls
from enginepool.coordinator.core import events as ev
from enginepool.coordinator.core import status as reports
from enginepool.coordinator.fleet.fan_out import OPEN
from enginepool.protocol.messages import ErrorReply, StatusReport
from enginepool.protocol.messages.control import Control, ControlReport
from tests.core.generations import CAN, GeneratingPool, generate, outputs
from tests.core.machines import Pool, Sent, config, failures, work
from tests.core.publishers import of_type

ME, OTHER = b"client-of-mine..", b"client-of-others"


def abort(pool: Pool, **fields: Any) -> list[Sent]:
    return pool.do(ev.ControlAsked(0, b"c", Control(1, "abort", **fields)))


def aborted(sent: list[Sent]) -> int:
    return of_type(sent, ControlReport)[0].aborted


def status(pool: Pool) -> StatusReport:
    return reports.report(pool.machine.core, ev.StatusAsked(pool.now, b"", 0))


def two_clients() -> tuple[GeneratingPool, bytes, bytes]:
    """A pool whose worker generates for both; the last request of `mine` waits for a later version."""
    pool = GeneratingPool()
    pool.worker("w", can=CAN)
    mine, other = pool.client(b"m", client=ME), pool.client(b"o", client=OTHER[::-1])
    for id_ in (5, 6):
        pool.submit(mine, id_, generate(3))
        pool.submit(other, id_, generate(3))
    for task in pool.tasks():
        pool.step(task.link, (task, 0, 0, [7], ""))
    pool.do(ev.Submit(0, mine, 7, generate(3), 0, None, 9))
    return pool, mine, other


def test_the_requests_of_one_client_end_and_no_other_ones() -> None:
    pool, mine, other = two_clients()
    ended = abort(pool, client=ME.hex())
    assert aborted(ended) == 3 and {one.link for one in ended} == {b"c", mine, b"w"}
    assert {id_: rows for id_, (_, rows) in outputs(ended).items()} == {5: [[7]], 6: [[7]]}
    assert failures(ended)[7].message == "all requests of this client were aborted by an operator"
    assert pool.logged[-1] == "requests ended by an operator: 3: all requests of this client were aborted by an operator"
    assert len(pool.machine.core.links[other].live) == 2
    assert aborted(abort(pool, client=ME.hex())) == aborted(abort(pool, client="0" * 8)) == 0


def test_one_request_of_a_client_ends() -> None:
    pool, mine, _ = two_clients()
    assert [*outputs(abort(pool, client=ME.hex()[:8], request=6))] == [6]
    assert failures(abort(pool, client=ME.hex()[:8], request=7))[7].message == "this request was aborted by an operator"
    assert [*pool.machine.core.links[mine].live] == [5] and aborted(abort(pool, client=ME.hex()[:8], request=99)) == 0


def test_a_request_may_have_the_id_0_as_the_wire_says() -> None:
    class Asked(ControlCalls):
        async def _command(self, question: Control, timeout: float | None) -> ControlReport:  # noqa: ASYNC109
            assert (question.client, question.request) == (ME.hex(), 0)
            return ControlReport(1, "", "abort", aborted=1)

    assert asyncio.run(Asked().abort(client=ME.hex(), request=0)) == 1


def test_a_group_is_named_where_the_requests_of_other_groups_are_to_go_on() -> None:
    pool = Pool(config(groups=("a", "b")))
    mine = pool.client(b"m", client=ME)
    for id_, group in ((1, "a"), (2, "b"), (3, "b")):
        pool.submit(mine, id_, work(group=group))
    assert [*failures(abort(pool, client=ME.hex(), group="a"))] == [1]
    assert failures(abort(pool, client=ME.hex(), group="c"))[1].code == "unknown_group"
    assert [*failures(abort(pool, client=ME.hex()))] == [2, 3]


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        (
            {"client": ME.hex()[:7]},
            "client: expected the first 8 or more of the 32 hex digits of its id, or its id in the status, got '636c696'",
        ),
        (
            {"client": "CLIENT00"},
            "client: expected the first 8 or more of the 32 hex digits of its id, or its id in the status, got 'CLIENT00'",
        ),
        ({"client": ME.hex()[:8]}, "client: expected .*, got '636c6965', with which 2 ids begin"),
        ({"request": 5}, "request: goes with a client, whose id it is, got abort"),
    ],
)
def test_what_names_no_client_is_refused(fields: dict[str, Any], said: str) -> None:
    pool = Pool()
    for link, client in ((b"m", ME), (b"o", OTHER)):
        pool.client(link, client=client)
    [refused] = of_type(abort(pool, **fields), ErrorReply)
    assert refused.code == "bad_request" and refused.field == said.partition(":")[0]
    assert re.fullmatch(said, refused.message), refused.message


def test_a_client_whose_id_begins_as_another_s_can_be_aborted_by_what_the_status_shows() -> None:
    pool = Pool()
    links = [pool.client(link, client=client) for link, client in ((b"m", ME), (b"o", OTHER), (b"x", b"x" * 16))]
    for link, requests in zip(links, (3, 2, 1), strict=True):
        for number in range(requests):
            pool.submit(link, number + 1, generate(3))
    shown = [one.id for one in status(pool).busiest]
    assert shown == [f"{ME.hex()[:8]}-1", f"{OTHER.hex()[:8]}-2", (b"x" * 4).hex()], (
        "no more of an id, with which one could say hello"
    )
    assert [aborted(abort(pool, client=id_)) for id_ in shown] == [3, 2, 1]


def test_questions_to_workers_that_are_open_keep_no_request_from_its_end() -> None:
    pool, _, _ = two_clients()
    for number in range(OPEN):
        pool.do(ev.ControlAsked(0, b"flusher%d" % number, Control(1, "flush")))
    assert failures(pool.do(ev.ControlAsked(0, b"c", Control(1, "flush"))))[1].code == "busy"
    assert aborted(abort(pool, client=ME.hex(), group="g")) == 3 and aborted(abort(pool)) == 2


def test_a_client_goes_with_abort_alone() -> None:
    [refused] = of_type(Pool().do(ev.ControlAsked(0, b"c", Control(1, "flush", client=ME.hex()))), ErrorReply)
    assert (refused.code, refused.message) == ("bad_request", "client: goes with abort, got flush")


def test_the_status_lists_the_busiest_clients_with_their_oldest_requests() -> None:
    pool, _, _ = two_clients()
    pool.wait(2.0)
    first, second = status(pool).busiest
    assert (first.id, first.requests, first.items, first.oldest, first.oldest_s) == (ME.hex()[:8], 3, 3, 5, 2.0)
    assert (second.id, second.requests) == (OTHER[::-1].hex()[:8], 2)
    lines = [line for line in tables(status(pool)).renderables if isinstance(line, str)]
    assert f"client {first.id}: 3 requests, the oldest (5) for 2.0 s" in lines
    abort(pool, client=first.id)
    assert [one.id for one in status(pool).busiest] == [second.id], "those without requests are not listed"
    for number in range(40):
        pool.submit(pool.client(client=b"%016d" % number), 1, generate(3))
    assert len(status(pool).busiest) == 32


def test_the_busiest_clients_are_found_once_for_all_who_ask_in_one_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """A question has a few bytes, and the coordinator may remember thousands of clients."""
    pool, mine, other = two_clients()
    found = Mock(wraps=reports._busiest)  # pyright: ignore[reportPrivateUsage]
    monkeypatch.setattr(reports, "_busiest", found)

    def asked(*links: bytes) -> list[list[tuple[str, int]]]:
        sent = of_type(pool.do(*[ev.StatusAsked(0, link, 1) for link in links]), StatusReport)
        return [[(one.id, one.requests) for one in report.busiest] for report in sent]

    first = (ME.hex()[:8], 3), (OTHER[::-1].hex()[:8], 2)
    assert asked(mine, other, *[b"x%d" % i for i in range(62)]) == [[*first]] * 64
    assert found.call_count == 1
    abort(pool, client=ME.hex())
    assert asked(b"x", b"y") == [[first[1]]] * 2, "each turn finds them again"
    assert found.call_count == 2
