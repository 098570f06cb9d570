"""A program that asks a real engine by OpenAI's clients. Its argument is the folder of a model. It prints what it found."""

import asyncio
import json
import sys
from typing import Any

from enginepool import BlockingPool, Pool

START_S = 300.0
MESSAGES: Any = [{"role": "user", "content": "What is the capital of France?"}]
#: as lm-eval asks for them
PROMPTS: Any = [[5, 17, 300], [*range(40, 60)]]
TOP = 3
GREEDY: dict[str, Any] = {"model": "", "messages": MESSAGES, "temperature": 0, "max_tokens": 40}
#: as whole objects, in which a model that knows nothing cannot go on with spaces
CITY: dict[str, Any] = {"enum": [{"city": "Rome"}, {"city": "Paris"}]}
TOOL: dict[str, Any] = {"type": "function", "function": {"name": "weather", "parameters": CITY, "strict": True}}
SETTINGS: dict[str, Any] = {"tool_call_parser": "qwen25"}
OPTIONS: dict[str, Any] = {"max_running_requests": 8, "constrained_json_disable_any_whitespace": True}


async def ask(folder: str) -> dict[str, Any]:
    async with Pool.start(folder, device="cpu", operations=["generate"], options=OPTIONS) as pool, asyncio.timeout(START_S):
        client = pool.openai(**SETTINGS)
        create: Any = client.chat.completions.create
        ignore = {"ignore_eos": True}
        top: dict[str, Any] = {"logprobs": True, "top_logprobs": TOP, "extra_body": ignore}
        whole = await create(**GREEDY, n=2, **top)
        chunks = [chunk async for chunk in await create(**GREEDY, stream=True, **top)]
        named = {"type": "function", "function": {"name": "weather"}}
        tools = await create(**{**GREEDY, "max_tokens": 120}, tools=[TOOL], tool_choice=named)
        assert tools.choices[0].message.tool_calls, tools
        long = await create(**{**GREEDY, "max_tokens": 3000}, stream=True, extra_body=ignore)
        async with long:
            async for _ in long:
                break
        while (status := await pool.status()).groups[0].running:  # what was left ends
            await asyncio.sleep(0.01)
        evaluate: dict[str, Any] = {"model": "", "prompt": PROMPTS, "logprobs": 1, "echo": True, "max_tokens": 1}
        complete: Any = client.completions.create
        echoed = await complete(**evaluate, temperature=0, seed=1234, extra_body=ignore)
        text = await client.completions.create(model="", prompt="Paris is", temperature=0, max_tokens=8, extra_body=ignore)
        streamed = [one for chunk in chunks if (found := chunk.choices[0].logprobs) for one in found.content]
        return {
            "echoed": [choice.logprobs.model_dump() for choice in echoed.choices],
            "tops": [
                [[one.logprob for one in token.top_logprobs] for token in found]
                for found in (whole.choices[0].logprobs.content, whole.choices[1].logprobs.content, streamed)
            ],
            "whole": [choice.message.content for choice in whole.choices],
            "logprobs": [one.logprob for one in whole.choices[0].logprobs.content],
            "usage": whole.usage.model_dump(),
            "streamed": "".join(chunk.choices[0].delta.content or "" for chunk in chunks),
            "streamed_logprobs": [one.logprob for one in streamed],
            "tool": [
                tools.choices[0].message.tool_calls[0].function.name,
                json.loads(tools.choices[0].message.tool_calls[0].function.arguments),
            ],
            "completion": text.choices[0].text,
            "failed": status.groups[0].failed,
            "blocking": await asyncio.to_thread(ask_blocking, pool.address),
        }


def ask_blocking(address: str) -> list[str]:
    with BlockingPool.connect(address) as pool:
        create: Any = pool.openai(**SETTINGS).chat.completions.create
        whole = create(**GREEDY, extra_body={"ignore_eos": True}).choices[0].message.content
        pieces = [chunk.choices[0].delta.content for chunk in create(**GREEDY, stream=True, extra_body={"ignore_eos": True})]
        with create(**{**GREEDY, "max_tokens": 3000}, stream=True) as left:
            next(iter(left))
        return [whole, "".join(piece or "" for piece in pieces)]


if __name__ == "__main__":
    print(json.dumps(asyncio.run(ask(sys.argv[-1]))))  # noqa: T201
