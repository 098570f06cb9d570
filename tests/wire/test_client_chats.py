"""`Pool.score(messages=...)` and labels by their texts on a real socket: what travels, and what is refused by name."""

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from enginepool import BlockingPool, Pool, errors
from enginepool.protocol.chat import ChatTemplate
from enginepool.protocol.messages import Score
from tests.wire.fake_coordinator import FakeCoordinator

CHATS = [[{"role": "user", "content": "Is it polite?"}], [{"role": "user", "content": "Is it?"}]]


@pytest.fixture
def coordinator(tmp_path: Path) -> Iterator[FakeCoordinator]:
    with FakeCoordinator(f"ipc://{tmp_path}/c.sock") as fake:
        yield fake


def asked(coordinator: FakeCoordinator, *arguments: Any, **options: Any) -> Score:
    with BlockingPool.connect(coordinator.address) as pool:
        pool.score(*arguments, **options)
    [sent] = coordinator.scores
    return sent


def test_chats_travel_with_the_options_of_their_template(coordinator: FakeCoordinator) -> None:
    kwargs: Any = {"enable_thinking": False}
    sent = asked(
        coordinator, messages=CHATS, labels=["yes", "no"], add_generation_prompt=False, chat_template_kwargs=kwargs,
        truncation="left",
    )  # fmt: skip
    assert (sent.chat, sent.labels, sent.label_texts, sent.truncation) == (
        ChatTemplate(False, kwargs),
        [],
        ["yes", "no"],
        "left",
    )
    body, _ = coordinator.payloads[0]
    assert body.decode() == "".join(json.dumps(chat, separators=(",", ":")) for chat in CHATS)


@pytest.mark.parametrize(
    ("arguments", "options", "field"),
    [
        ((), {}, "query"),
        (("q", ["a"]), {"messages": CHATS}, "query"),
        ((), {"items": ["a"], "messages": CHATS}, "items"),
        (("q", ["a"]), {"add_generation_prompt": True}, "add_generation_prompt"),
        (("q", ["a"]), {"chat_template_kwargs": {}}, "chat_template_kwargs"),
        ((), {"messages": CHATS, "add_generation_prompt": 1}, "add_generation_prompt"),
        ((), {"messages": CHATS, "truncation": "right"}, "truncation"),
        ((), {"messages": CHATS[0]}, "messages"),
    ],
)
def test_what_chats_do_not_go_with_is_refused_by_name(
    coordinator: FakeCoordinator, arguments: Any, options: dict[str, Any], field: str
) -> None:
    async def main() -> None:
        async with Pool.connect(coordinator.address) as pool:
            with pytest.raises(errors.BadRequest) as caught:
                await pool.score(*arguments, label_token_ids=[1], **options)
            assert caught.value.field == field and str(caught.value).startswith(field)

    asyncio.run(asyncio.wait_for(main(), 60))
    assert not coordinator.scores
