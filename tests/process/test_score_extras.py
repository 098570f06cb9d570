"""What a score may have besides rows, by a whole pool of sim workers: chats, texts of labels, truncation, temperature."""

import asyncio
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from enginepool import Pool
from enginepool.errors import BadRequest
from enginepool.workers.sim.engine import BYTE_OFFSET
from enginepool.workers.sim.scores import expected_scores
from tests.process.commands import call, records
from tests.process.daemons import PATIENCE_S, sim_pool
from tests.process.forking import ForkedDaemon
from tests.process.processes import Processes

CONTEXT = 40
OPTIONS: dict[str, Any] = {"context": CONTEXT, "faults": []}
CHATS = [[{"role": "user", "content": "Hi"}], [{"role": "user", "content": "x" * CONTEXT}]]
RENDERED = ["user: Hi\nassistant: ", f"user: {'x' * CONTEXT}\nassistant: "]


def ids(text: str) -> list[int]:
    return [byte + BYTE_OFFSET for byte in text.encode()]


def scores(query: str, items: list[str], labels: str, **settings: Any) -> Any:
    return expected_scores(ids(query), [ids(item) for item in items], labels=ids(labels), **settings)["scores"]


def test_a_pool_scores_chats_texts_and_ids_by_labels_that_are_texts(processes: Processes, tmp_path: Path) -> None:
    daemon = ForkedDaemon(processes, sim_pool(tmp_path, options=OPTIONS))

    async def main() -> None:
        async with Pool.connect(daemon.address) as pool:
            result = await pool.score(messages=CHATS, labels=["y", "n"], truncation="left")
            np.testing.assert_allclose(result.scores, scores("", [RENDERED[0], RENDERED[1][-CONTEXT:]], "yn"), rtol=1e-6)
            assert (result.truncated, result.forwards, result.usage.items) == (1, (1,), 2)
            soft: dict[str, Any] = {"apply_softmax": True, "temperature": 0.25}
            again = await pool.score(ids("q"), [ids("a"), ids("b")], labels=["n", "y"], **soft)
            np.testing.assert_allclose(again.scores, scores("q", ["a", "b"], "ny", softmax=True, temperature=0.25), rtol=1e-5)
            for query, item in (("q", "x" * CONTEXT), (ids("q"), ids("x" * CONTEXT))):
                cut: Any = await pool.score(query, [item], labels=["y"], truncation="right")  # type: ignore[list-item]
                np.testing.assert_allclose(cut.scores, scores("q", ["x" * (CONTEXT - 1)], "y"), rtol=1e-6)
                assert cut.truncated == 1
            own = await pool.score(ids("q"), [ids("a"), ids("b")], label_token_ids=[ids("yn"), ids("ny")])
            rows = [scores("q", ["a"], "yn")[0], scores("q", ["b"], "ny")[0]]
            np.testing.assert_allclose(own.scores, rows, rtol=1e-6)
            refusals: list[tuple[dict[str, Any], str]] = [
                ({"messages": CHATS[:1], "labels": ["y", "no"]}, "labels[1]"),
                ({"messages": CHATS, "labels": ["y"]}, "items[1]"),
                ({"query": "q", "items": ["x" * CONTEXT], "labels": ["y"], "truncation": "error"}, "items[0]"),
                ({"query": "x" * CONTEXT, "items": ["y"], "labels": ["y"], "truncation": "left"}, "items[0]"),
            ]
            for arguments, field in refusals:
                with pytest.raises(BadRequest) as wrong:
                    await pool.score(**arguments)
                assert wrong.value.field.replace("messages", "items") == field

    asyncio.run(asyncio.wait_for(main(), PATIENCE_S))
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    lines: list[dict[str, Any]] = [
        {"messages": CHATS[:1]},
        {"messages": CHATS[:1], "add_generation_prompt": False},
        {"query": "q", "items": ["a"]},
    ]
    lines.append({"query": "q", "items": ["a"], "label_token_ids": [ids("ny")]})
    source.write_text("".join(json.dumps(line) + "\n" for line in lines))
    code, _, err = call("score", source, target, "--connect", daemon.address, "--labels", "y,n", "--truncation", "left")
    assert code == 0, err
    found = records(target)
    prompts = [("", RENDERED[0]), ("", RENDERED[0].removesuffix("assistant: ")), ("q", "a")]
    for line, (query, item) in enumerate(prompts, 1):
        np.testing.assert_allclose(found[line]["scores"], scores(query, [item], "yn"), rtol=1e-6)
    np.testing.assert_allclose(found[4]["scores"], scores("q", ["a"], "ny"), rtol=1e-6)
