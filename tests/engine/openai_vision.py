"""A program that asks with images by OpenAI's client; it prints what the pool was asked. Its argument is a model's folder."""

import asyncio
import json
import sys
from typing import Any

#: no images: nothing in this process may look
IMAGES = ["data:image/png;base64,AAAA", "https://images.example.com/a.png"]


def message(*urls: str) -> list[dict[str, Any]]:
    parts: list[dict[str, Any]] = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    return [{"role": "user", "content": [*parts, {"type": "text", "text": "Which is larger?"}]}]


async def ask(folder: str) -> list[Any]:
    import openai

    from enginepool.http.clients import async_client
    from enginepool.http.endpoints import Endpoints
    from tests.engine.chosen_pool import ChosenPool

    pool = ChosenPool(folder)
    create: Any = async_client(Endpoints(pool, "policy", None, {})).chat.completions.create
    await create(model="", messages=message(*IMAGES), max_tokens=4)
    async for _ in await create(model="", messages=message(*IMAGES), max_tokens=4, stream=True):
        continue
    try:
        await create(model="", messages=message("/etc/passwd"), max_tokens=4)
    except openai.APIStatusError as error:
        refused = [error.param, error.status_code]
        return [*({"prompts": one["prompts"], "images": one["images"]} for one in pool.asked), refused]
    raise AssertionError("a path was taken for an image")


if __name__ == "__main__":
    print(json.dumps(asyncio.run(ask(sys.argv[-1]))), flush=True)  # noqa: T201
