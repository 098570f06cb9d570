"""Embedding with whole pools of sim workers: ids and text, through a worker's death, and by the command."""

import asyncio
import json
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from enginepool import EmbedResult, Pool
from enginepool.workers.sim.embeddings import expected_embeddings
from enginepool.workers.sim.engine import BYTE_OFFSET
from tests.process.commands import call, records
from tests.process.daemons import PATIENCE_S, sim_pool
from tests.process.forking import ForkedDaemon
from tests.process.processes import Processes

SIZE = 12
OPTIONS: dict[str, Any] = {"kind": "embedding", "embedding": SIZE, "forward_s": 0.02, "batch_rows": 4, "faults": []}


def check(inputs: list[list[int]], result: EmbedResult, dimensions: int = 0, *, normalize: bool = True) -> None:
    expected = expected_embeddings(inputs, SIZE, dimensions=dimensions, normalize=normalize)["embeddings"]
    np.testing.assert_allclose(result.embeddings, expected, rtol=1e-6)
    assert set(result.forwards) == {1} and result.usage == (len(inputs), sum(map(len, inputs)))


def test_ids_and_text_are_embedded_through_a_worker_s_death(processes: Processes, tmp_path: Path) -> None:
    crash = {"kind": "crash", "at_batch": 8}
    config = sim_pool(tmp_path, options={**OPTIONS, "faults": [crash]})
    # Workers die with any batch: a request that runs alone at that moment, also several times, is not the cause.
    restart = msgspec.structs.replace(config.restart, max_attempts=1000)
    daemon = ForkedDaemon(processes, msgspec.structs.replace(config, restart=restart))

    async def main() -> None:
        async with Pool.connect(daemon.address) as pool:
            asked = [[[i, 1, 2], [i], [i, 3]] * (1 + i % 3) for i in range(12)]
            wanted = [(0, True), (5, True), (SIZE, False)]
            work = [pool.embed(a, dimensions=d or None, normalize=n) for a in asked for d, n in wanted]
            results = await asyncio.wait_for(asyncio.gather(*work), PATIENCE_S)
            for i, result in enumerate(results):
                dimensions, normalize = wanted[i % 3]
                check(asked[i // 3], result, dimensions, normalize=normalize)
            result = await pool.embed(["ab", "zwölf"], dimensions=3)
            check([[byte + BYTE_OFFSET for byte in text.encode()] for text in ("ab", "zwölf")], result, 3)
            codes = [[byte + BYTE_OFFSET for byte in text.encode()] for text in ("ab", "zwölf")]
            assert await pool.decode([*codes, [], [codes[1][2]]]) == ["ab", "zwölf", "", "\ufffd"]
            found = await pool.tokenize(["ab", "zwölf"])
            assert [row.tolist() for row in found] == codes
            [group] = (await pool.status()).groups
            assert group.lost_batches > 0 and not group.split_batches

    asyncio.run(main())


def test_the_command_embeds_a_file_and_continues_it(processes: Processes, tmp_path: Path) -> None:
    daemon = ForkedDaemon(processes, sim_pool(tmp_path, options=OPTIONS))
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    lines = [{"inputs": [[i, 1], [2]], "id": i} for i in range(5)]
    lines += [{"inputs": [[1]], "dimensions": SIZE + 1}, {"texts": ["a"]}, {"inputs": [[7]], "normalize": False}]
    source.write_text("".join(json.dumps(line) + "\n" for line in lines))
    for _ in range(2):
        code, _, err = call("embed", source, target, "--connect", daemon.address, "--dimensions", 4)
        assert code == 1, err
    found = records(target)
    assert sorted(found) == list(range(1, 9))
    for i in range(5):
        expected = expected_embeddings([[i, 1], [2]], SIZE, dimensions=4)["embeddings"]
        np.testing.assert_allclose(found[i + 1]["embeddings"], expected, rtol=1e-6)
        assert (found[i + 1]["id"], found[i + 1]["version"], found[i + 1]["tokens"]) == (i, 0, 3)
    assert found[6]["error"]["field"] == "dimensions" and found[6]["error"]["limit"] == f"1..{SIZE}"
    assert found[7]["error"]["code"] == "bad_line" and "unknown key texts" in found[7]["error"]["message"]
    expected = expected_embeddings([[7]], SIZE, dimensions=4, normalize=False)["embeddings"]
    np.testing.assert_allclose(found[8]["embeddings"], expected, rtol=1e-6)
