"""Log-probabilities with whole pools of sim workers: through a worker's death, and by the command."""

import asyncio
import json
from pathlib import Path
from typing import Any

import numpy as np

from enginepool import LogprobsResult, Pool
from enginepool.workers.sim.logprobs import expected_logprobs
from tests.process.commands import call, records
from tests.process.daemons import PATIENCE_S, sim_pool
from tests.process.forking import ForkedDaemon
from tests.process.processes import Processes

OPTIONS: dict[str, Any] = {"forward_s": 0.02, "batch_rows": 4, "faults": []}
PROMPTS, RESPONSES, LABELS = [[1, 2], [3], [4, 5, 6]], [[7], [8, 9, 10], [11, 12]], [20, 21]


def check(
    prompts: list[list[int]], responses: list[list[int]], labels: list[int], result: LogprobsResult, top: int = 0
) -> None:
    expected = expected_logprobs(prompts, responses, labels=labels, top=top)
    for i, response in enumerate(responses):
        np.testing.assert_array_equal(result.logprobs[i], expected["logprobs"][i, : len(response)])
        if labels:
            assert result.labels is not None
            np.testing.assert_array_equal(result.labels[i].ravel(), expected["labels"][i, : len(response) * len(labels)])
        if top:
            assert result.top_ids is not None and result.top_logprobs is not None
            assert (result.top_ids[i].dtype, result.top_ids[i].shape) == (np.int32, (len(response), top))
            np.testing.assert_array_equal(result.top_ids[i].ravel(), expected["top_ids"][i, : len(response) * top])
            np.testing.assert_array_equal(result.top_logprobs[i].ravel(), expected["top_logprobs"][i, : len(response) * top])
    assert set(result.forwards) == {1} and result.usage.items == len(responses)


def test_logprobs_are_those_of_scores_and_survive_a_worker_s_death(processes: Processes, tmp_path: Path) -> None:
    crash = {"kind": "crash", "at_batch": 3}
    daemon = ForkedDaemon(processes, sim_pool(tmp_path, options={**OPTIONS, "faults": [crash]}))

    async def main() -> None:
        async with Pool.connect(daemon.address) as pool:
            asked = [([[i + 1], *PROMPTS] * (1 + i % 3), [[i + 2], *RESPONSES] * (1 + i % 3)) for i in range(12)]
            wanted: list[dict[str, Any]] = [
                {"label_token_ids": LABELS if i % 2 else None, "top_logprobs": i % 3} for i in range(12)
            ]
            work = [pool.logprobs(*rows, **options) for rows, options in zip(asked, wanted, strict=True)]
            results = await asyncio.wait_for(asyncio.gather(*work), PATIENCE_S)
            for i, result in enumerate(results):
                check(*asked[i], LABELS if i % 2 else [], result, i % 3)
            scored = await pool.score_pairs([[3], [3, 8]], [[], [9]], label_token_ids=[8, 10], logprobs=True)
            one = await pool.logprobs([3], [[8, 9, 10]])
            assert [one.logprobs[0][0], one.logprobs[0][2]] == [scored.scores[0, 0], scored.scores[1, 1]]
            [group] = (await pool.status()).groups
            assert group.lost_batches > 0 and not group.split_batches
            named = {name for result in (*results, scored, one) for name in result.workers}
            assert named and named <= {worker.name for worker in group.workers}

    asyncio.run(main())


def test_the_command_gives_logprobs_of_a_file_and_continues_it(processes: Processes, tmp_path: Path) -> None:
    daemon = ForkedDaemon(processes, sim_pool(tmp_path, options=OPTIONS))
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    lines: list[dict[str, Any]] = [{"prompts": PROMPTS, "responses": RESPONSES, "id": "a"}]
    lines += [{"prompts": [1, 2], "responses": [[3], [4, 5]], "label_token_ids": LABELS}]
    lines[1]["top_logprobs"] = 3
    lines += [{"prompts": [1], "responses": [[]]}, {"prompts": [1]}]
    source.write_text("".join(json.dumps(line) + "\n" for line in lines))
    for _ in range(2):
        code, _, err = call("logprobs", source, target, "--connect", daemon.address)
        assert code == 1, err
    found = records(target)
    assert sorted(found) == [1, 2, 3, 4]
    expected = expected_logprobs(PROMPTS, RESPONSES)["logprobs"]
    assert found[1]["id"] == "a" and [len(row) for row in found[1]["logprobs"]] == [1, 3, 2]
    np.testing.assert_allclose(found[1]["logprobs"][1], expected[1], rtol=1e-6)
    assert [np.shape(rows) for rows in found[2]["labels"]] == [(1, 2), (2, 2)]
    assert [np.shape(rows) for rows in found[2]["top_ids"]] == [(1, 3), (2, 3)] and "top_ids" not in found[1]
    assert found[2]["top_logprobs"][1][0][0] == found[2]["logprobs"][1][0]
    assert found[3]["error"]["field"] == "responses[0]" and "needs prompts and responses" in found[4]["error"]["message"]
