"""Rerank passages with a cross-encoder: python examples/rerank.py MODEL

MODEL is a folder or a name on the model hub, such as BAAI/bge-reranker-v2-m3 or cross-encoder/ms-marco-MiniLM-L6-v2. Without
MODEL a simulated engine answers: the steps are the same, and the scores mean nothing.

The scores are those of `CrossEncoder.predict` of sentence-transformers: the worker joins query and passage as the model's
tokenizer joins a pair, truncates the pair to what the model takes, and applies sigmoid where the model has one output and its
configuration does not say otherwise.
"""

import asyncio
import sys

from enginepool import Pool
from enginepool.errors import BadRequest

QUERY = "What is the capital of France?"
PASSAGES = [
    "Rome has been the capital of Italy since 1871.",
    "Paris is the capital of France.",
    "A capital letter begins a name.",
]
#: the separator of the simulated engine; the tokenizer of a real model has its own, `sep_token_id`
SEPARATOR = 2


async def main(model: str) -> None:
    simulated = Pool.start("any-name", engine="sim", options={"kind": "classifier", "separator": SEPARATOR})
    async with Pool.start(model) if model else simulated as pool:
        await pool.ready()
        answer = await pool.score(QUERY, PASSAGES)  # float32 [3 passages, 1 output]
        for i in answer.scores[:, 0].argsort()[::-1]:
            print(f"{answer.scores[i, 0]:.4f}  {PASSAGES[i]}")

        # A query of its own for each passage, as CrossEncoder.predict takes pairs.
        pairs = await pool.score_pairs([QUERY, "What is the capital of Italy?"], PASSAGES[:2])
        print(pairs.scores[:, 0])

        if not model:
            # Token ids are not changed: put the separator between query and item yourself, as the model's tokenizer does.
            ids = await pool.score([11, 12, 13, SEPARATOR], [[21, 22, SEPARATOR], [23, SEPARATOR]])
            print(ids.scores[:, 0])
            try:
                await pool.score([11, 12, 13], [[21, 22], [23]])
            except BadRequest as error:
                print(error)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1] if len(sys.argv) > 1 else ""))
