"""A pool whose host has an unknown name: said when the time is over, and not in the way of anything else."""

import asyncio
import socket
from typing import Any

import pytest
import uvloop

from enginepool import Pool, errors
from enginepool.client import dns as names
from enginepool.client.dns import follow_name


@pytest.mark.parametrize("loop", [uvloop.new_event_loop, asyncio.new_event_loop], ids=["uvloop", "asyncio"])
def test_an_unknown_name_is_reported_when_no_coordinator_answers(loop: Any) -> None:
    async def main() -> None:
        with pytest.raises(errors.ConnectError) as caught:
            await Pool.connect("tcp://nowhere.invalid:5555", connect_timeout=0.5)
        said = str(caught.value)
        assert "tcp://nowhere.invalid:5555" in said and "within 0.5 s" in said
        # A resolver may take its time to find that out.
        assert "'nowhere.invalid' cannot be resolved" in said or "'nowhere.invalid' is not resolved yet" in said

    with asyncio.Runner(loop_factory=loop) as runner:
        runner.run(main())


def test_a_host_that_is_known_or_has_no_name_is_not_to_blame() -> None:
    async def main(address: str) -> None:
        with pytest.raises(errors.ConnectError) as caught:
            await Pool.connect(address, connect_timeout=0.5)
        assert "resolved" not in str(caught.value)

    for address in (
        "tcp://localhost:1",
        "tcp://127.0.0.1:1",
        "tcp://[::1]:1",
        "ipc:///none/pool.sock",
    ):
        asyncio.run(main(address))


def test_a_name_is_asked_for_again_until_it_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    asked: list[tuple[str, str]] = []

    async def getaddrinfo(host: str, port: str, **_: Any) -> None:
        asked.append((host, port))
        if len(asked) < 3:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    async def main() -> None:
        monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", getaddrinfo)
        await follow_name("tcp://late.invalid:5555", said.append)

    monkeypatch.setattr(names, "AGAIN_S", 0.0)
    asyncio.run(main())
    assert asked == [("late.invalid", "5555")] * 3
    unknown = "the name 'late.invalid' cannot be resolved: Name or service not known"
    assert said == ["the name 'late.invalid' is not resolved yet", unknown, unknown, ""]
