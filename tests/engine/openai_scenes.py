"""What `test_openai.py` expects of OpenAI's clients over a pool, as a program for a process that has SGLang.

Its argument is the folder of a model. It prints a line of JSON for each scene: its name, and how it failed or "".
"""

import asyncio
import inspect
import json
import sys
import traceback
from collections.abc import AsyncGenerator
from contextlib import aclosing, asynccontextmanager
from typing import Any

import openai
import pytest
from starlette.requests import Request

from enginepool.errors import BadRequest, Busy, ConfigError, DeadlineExceeded, EngineFailed
from enginepool.http.build import build
from enginepool.http.clients import async_client
from enginepool.http.endpoints import Endpoints
from tests.engine.chosen_pool import CACHED, CONTEXT, ChosenPool

FOLDER = sys.argv[-1]
#: also those of the pools: a process serves one model with one set of settings
SETTINGS: dict[str, Any] = {"tool_call_parser": "qwen25", "reasoning_parser": "qwen3"}
ASK: dict[str, Any] = {"model": "", "messages": [{"role": "user", "content": "Hello"}]}
PROMPT = "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"
#: the token <|im_end|>
END = 2
TEXT = "Zürich, 日本 🙂 and so on"
CITIES: Any = {"type": "object", "properties": {"city": {"enum": ["Rome", "Paris"]}}, "required": ["city"]}
TOOLS: Any = [{"type": "function", "function": {"name": "weather", "parameters": CITIES}}]


class Scenes:
    """Each method is a scene, and its docstring the promise."""

    def __init__(self, pool: ChosenPool, endpoints: Endpoints, manager: Any) -> None:
        self.pool, self.endpoints, self.manager = pool, endpoints, manager
        self.client = async_client(endpoints)
        self.tokenizer = manager.tokenizer

    async def ask(self, thinking: bool = False, body: Any = None, **more: Any) -> Any:
        extra: dict[str, Any] = {"chat_template_kwargs": {"enable_thinking": thinking}} | (body or {})
        create: Any = self.client.chat.completions.create
        return await create(**{**ASK, **more}, extra_body=extra)

    async def streamed(self, **more: Any) -> list[Any]:
        return [chunk async for chunk in await self.ask(stream=True, **more)]

    async def until(self, what: Any) -> None:
        async with asyncio.timeout(60):
            while not what():
                await asyncio.sleep(0.001)

    async def a_streamed_text_is_the_whole_one_also_where_characters_are_cut(self) -> None:
        self.pool.reset(TEXT)
        whole = await self.ask()
        assert whole.choices[0].message.content == TEXT
        pieces = [chunk.choices[0].delta.content or "" for chunk in await self.streamed()]
        assert "".join(pieces) == TEXT
        assert len([piece for piece in pieces if piece]) > 5 and not any("\ufffd" in piece for piece in pieces)
        assert self.pool.asked[0]["prompts"] == [self.tokenizer.encode(PROMPT)]
        assert self.pool.asked[0]["max_new_tokens"] == CONTEXT - len(self.pool.asked[0]["prompts"][0])

    async def usage_versions_samples_and_log_probabilities_are_those_of_the_pool(self) -> None:
        self.pool.reset(TEXT, "No")
        found: Any = await self.ask(n=2, seed=5, logprobs=True, body={"priority": 7}, timeout=9)
        tokens = [self.tokenizer.encode(text) for text in (TEXT, "No")]
        assert [choice.message.content for choice in found.choices] == [TEXT, "No"]
        assert [choice.finish_reason for choice in found.choices] == ["length", "length"]
        assert found.usage.completion_tokens == sum(map(len, tokens))
        assert found.usage.prompt_tokens == len(self.tokenizer.encode(PROMPT))
        assert found.usage.prompt_tokens_details.cached_tokens == CACHED
        said = found.choices[0].logprobs.content
        assert [one.logprob for one in said] == [-1.0 - at for at in range(len(tokens[0]))]
        assert found.metadata["weight_version"] == "4"
        [asked] = self.pool.asked
        assert (asked["n"], asked["sampling_seed"], asked["priority"], 8 < asked["timeout"] <= 9) == (2, 5, 7, True)
        self.pool.reset(TEXT)
        last = (await self.streamed(stream_options={"include_usage": True}))[-1]
        assert (last.usage.completion_tokens, last.usage.prompt_tokens_details.cached_tokens) == (len(tokens[0]), CACHED)
        self.pool.reset(TEXT, "No")
        chunks = await self.streamed(n=2, stream_options={"include_usage": True})
        assert len(self.pool.asked) == 1 and chunks[-1].usage.completion_tokens == sum(map(len, tokens))
        for number, text in enumerate((TEXT, "No")):
            deltas = [chunk.choices[0].delta for chunk in chunks[:-1] if chunk.choices[0].index == number]
            assert "".join(delta.content or "" for delta in deltas) == text

    async def calls_of_tools_are_parsed_also_in_a_stream(self) -> None:
        call = '{"name": "weather", "arguments": {"city": "Rome"}}'
        self.pool.reset(f"I look.\n<tool_call>\n{call}\n</tool_call><|im_end|>", matched=END)
        choice = (await self.ask(tools=TOOLS)).choices[0]
        assert choice.finish_reason == "tool_calls", choice
        assert (choice.message.content or "").strip() == "I look.", choice
        tool = choice.message.tool_calls[0]
        assert tool.function.name == "weather" and json.loads(tool.function.arguments) == {"city": "Rome"}
        chunks = await self.streamed(tools=TOOLS)
        calls: list[Any] = []
        for chunk in chunks:
            calls += [call.function for call in chunk.choices[0].delta.tool_calls or ()]
        assert [call.name for call in calls if call.name] == ["weather"]
        assert json.loads("".join(call.arguments or "" for call in calls)) == {"city": "Rome"}
        assert chunks[-1].choices[0].finish_reason == "tool_calls"

    async def thoughts_are_told_from_the_answer_also_in_a_stream(self) -> None:
        self.pool.reset("<think>One and one.</think>Two")
        found = await self.ask(thinking=True)
        message: Any = found.choices[0].message
        assert (message.reasoning_content, message.content) == ("One and one.", "Two")
        assert found.usage.reasoning_tokens == len(self.tokenizer.encode("<think>One and one.</think>"))
        deltas: list[Any] = [chunk.choices[0].delta for chunk in await self.streamed(thinking=True)]
        assert "".join(delta.reasoning_content or "" for delta in deltas) == "One and one."
        assert "".join(delta.content or "" for delta in deltas) == "Two"

    async def a_grammar_begins_after_the_thoughts_of_a_model_that_thinks(self) -> None:
        for thinking in (True, False):
            self.pool.reset("<think>One and one.</think>Two")
            await self.ask(thinking=thinking, body={"regex": "(Two|Three)"})
            await self.ask(thinking=thinking)
            told = [(asked["regex"], asked["require_reasoning"]) for asked in self.pool.asked]
            assert told == [("(Two|Three)", thinking), (None, False)]

    async def no_beginning_of_a_stop_string_is_streamed(self) -> None:
        self.pool.reset("It is so. ENGINE ENDED", matched="ENDED")
        whole = (await self.ask(stop=["ENDED"])).choices[0]
        assert (whole.message.content, whole.finish_reason) == ("It is so. ENGINE ", "stop")
        chunks = await self.streamed(stop=["ENDED"])
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "It is so. ENGINE "

    async def a_stream_has_the_log_probabilities_of_tokens_that_are_parts_of_a_character(self) -> None:
        making: Any = self.endpoints._making  # pyright: ignore[reportPrivateUsage]
        chat = making.result().chat
        parsers = chat.tool_call_parser, chat.reasoning_parser
        # With a parser SGLang sends them in pieces without text; without one it leaves them out.
        chat.tool_call_parser = chat.reasoning_parser = None
        try:
            for texts in ([TEXT], [TEXT, "日本"]):
                self.pool.reset(*texts)
                chunks = await self.streamed(n=len(texts), logprobs=True)
                for number, text in enumerate(texts):
                    choices = [chunk.choices[0] for chunk in chunks if chunk.choices[0].index == number]
                    said = [one.logprob for choice in choices if choice.logprobs for one in choice.logprobs.content]
                    assert said == [-1.0 - at for at in range(len(self.tokenizer.encode(text)))]
                    assert "".join(choice.delta.content or "" for choice in choices) == text
        finally:
            chat.tool_call_parser, chat.reasoning_parser = parsers

    async def completions_take_texts_and_token_ids(self) -> None:
        self.pool.reset("one", "two")
        found = await self.client.completions.create(model="", prompt=["a b", "c"], max_tokens=5, logprobs=0, echo=False)
        assert [choice.text for choice in found.choices] == ["one", "two"]
        assert (
            found.choices[0].logprobs
            and found.choices[0].logprobs.token_logprobs == [-1.0, -2.0, -3.0][: len(self.tokenizer.encode("one"))]
        )
        self.pool.reset("one")
        stream = await self.client.completions.create(model="", prompt=[[5, 6, 7]], max_tokens=5, stream=True)
        assert "".join([chunk.choices[0].text async for chunk in stream]) == "one"
        assert self.pool.asked[0]["prompts"] == [[5, 6, 7]]

    async def the_most_probable_tokens_are_those_of_the_pool_also_in_a_stream(self) -> None:
        self.pool.reset("one two")
        ids = self.tokenizer.encode("one two")
        wanted = [[(self.tokenizer.decode([token + i]), -1.0 - at - i) for i in range(3)] for at, token in enumerate(ids)]
        whole = (await self.ask(logprobs=True, top_logprobs=3)).choices[0].logprobs.content
        chunks = await self.streamed(logprobs=True, top_logprobs=3)
        streamed = [one for chunk in chunks if (found := chunk.choices[0].logprobs) for one in found.content]
        for found in (whole, streamed):
            assert [[(top.token, top.logprob) for top in one.top_logprobs] for one in found] == wanted
        assert [asked["top_logprobs"] for asked in self.pool.asked] == [3, 3]
        found = (await self.client.completions.create(model="", prompt="a", max_tokens=5, logprobs=2)).choices[0].logprobs
        assert found and found.top_logprobs == [dict(row[:2]) for row in wanted]

    async def a_prompt_that_is_echoed_has_its_log_probabilities(self) -> None:
        """As lm-eval asks for them: `local-completions`."""
        prompts = [[5, 6, 7], [8, 9, 10, 11]]
        self.pool.reset("o", "oo")
        create: Any = self.client.completions.create
        ask: dict[str, Any] = {"model": "", "prompt": prompts, "logprobs": 1, "echo": True, "temperature": 0, "seed": 1234}
        found = await create(**ask, max_tokens=1)
        for prompt, text, choice in zip(prompts, ("o", "oo"), found.choices, strict=True):
            ids, logprobs = self.tokenizer.encode(text), choice.logprobs
            assert choice.text == self.tokenizer.decode(prompt, skip_special_tokens=True) + text
            assert logprobs.tokens == [self.tokenizer.decode([one]) for one in (*prompt, *ids)]
            values = [None, *(-1.0 * at for at in range(1, len(prompt))), *(-1.0 - at for at in range(len(ids)))]
            assert logprobs.token_logprobs == values
            tops = [dict([pair]) for pair in zip(logprobs.tokens, values, strict=True)]
            assert logprobs.top_logprobs == [None, *tops[1:]]
        assert [asked["prompts"] for asked in self.pool.asked] == [[prompt] for prompt in prompts]
        asked = self.pool.asked[-1]
        assert (asked["prompt_logprobs"], asked["top_logprobs"], asked["max_new_tokens"]) == (True, 1, 1)
        both = (await create(model="", prompt="a b", n=2, max_tokens=3, echo=True, logprobs=1)).choices
        assert both[0].logprobs.token_logprobs[:2] == both[1].logprobs.token_logprobs[:2] == [None, -1.0]
        none = (await create(model="", prompt=[5, 6], max_tokens=3, echo=True, logprobs=0)).choices[0].logprobs
        assert none.token_logprobs == [-1.0, -2.0][: len(none.tokens)] and not self.pool.asked[-1]["prompt_logprobs"]
        with pytest.raises(openai.BadRequestError) as refused:
            await create(model="", prompt="a", echo=True, logprobs=1, stream=True)
        assert refused.value.param == "echo"

    async def an_error_of_the_pool_is_raised_as_the_client_knows_it(self) -> None:
        cases: list[tuple[Any, Any, int]] = [
            (BadRequest("max_new_tokens: 9", field="max_new_tokens"), openai.BadRequestError, 400),
            (Busy("the queue is full", retry_after_s=2.0), openai.RateLimitError, 429),
            (EngineFailed("NaN"), openai.InternalServerError, 500),
        ]
        for stream in (False, True):
            for failure, kind, status in cases:
                self.pool.reset(TEXT, failure=failure)
                error: Any = await self.failure(stream=stream)
                assert type(error) is kind and error.status_code == status, error
                assert error.type == failure.code and error.param == ("max_tokens" if failure.field else None)
                assert error.response.headers.get("retry-after") == ("2" if status == 429 else None)
            self.pool.reset(TEXT, failure=DeadlineExceeded("late"))
            assert type(await self.failure(stream=stream)) is openai.APITimeoutError

    async def failure(self, **more: Any) -> Any:
        with pytest.raises(openai.OpenAIError) as failed:
            await self.ask(**more)
        return failed.value

    async def an_error_in_the_middle_of_a_stream_ends_it(self) -> None:
        self.pool.reset(TEXT, failure=EngineFailed("NaN in the middle"), before=6)
        text = ""
        chunks = aiter(await self.ask(stream=True))
        while not text:
            text += (await anext(chunks)).choices[0].delta.content or ""
        assert TEXT.startswith(text)
        with pytest.raises(openai.APIError, match="NaN in the middle"):
            await self.streamed()

    async def what_a_caller_must_not_send_is_refused_by_its_name(self) -> None:
        self.pool.reset(TEXT)
        cases: dict[str, dict[str, Any]] = {
            "custom_logit_processor": {"body": {"custom_logit_processor": "80"}},
            "chat_template_kwargs": {"body": {"chat_template_kwargs": {"chat_template": "{{ 1 }}"}}},
            "lora_path": {"body": {"lora_path": ["french", "german"]}},
            "top_logprobs": {"logprobs": True, "top_logprobs": 21},
            "n": {"n": 1 << 40},
            "temperature": {"temperature": -1},
            "messages": {"messages": "Hello"},
            "x-enginepool-timeout": {"extra_headers": {"x-enginepool-timeout": "soon"}},
        }
        for field, more in cases.items():
            for stream in (False, True):
                error = await self.failure(stream=stream, **more)
                assert isinstance(error, openai.BadRequestError) and error.param == field, (field, error)
        assert not self.pool.asked

    async def an_adapter_is_named_as_for_sglangs_server(self) -> None:
        named: list[dict[str, Any]] = [{"model": "base:french"}, {"body": {"lora_path": "french"}}]
        for stream in (False, True):
            for more in named:
                self.pool.reset(TEXT)
                found: Any = await (self.streamed if stream else self.ask)(**more)
                assert found is not None
                [asked] = self.pool.asked
                assert asked["adapter"] == "french"
        self.pool.reset(TEXT)
        await self.ask()
        assert "adapter" not in self.pool.asked[0]

    async def a_request_without_a_client_says_its_options_in_headers(self) -> None:
        """As the requests of an HTTP server do."""
        self.pool.reset(TEXT)
        making: Any = self.endpoints._making  # pyright: ignore[reportPrivateUsage]
        serving = making.result()
        said = serving.protocol.CompletionRequest(prompt="a", max_tokens=5)
        scope = {"type": "http", "headers": [(b"x-enginepool-timeout", b"7"), (b"x-enginepool-min-version", b"3")]}
        found = await serving.completion.handle_request(said, Request(scope))
        assert found.choices[0].text == TEXT
        [asked] = self.pool.asked
        assert (asked["group"], asked["timeout"], asked["min_version"]) == ("policy", 7.0, 3)
        scope = {"type": "http", "headers": [(b"x-enginepool-timeout", b"soon")]}
        assert (await serving.completion.handle_request(said, Request(scope))).status_code == 400

    async def a_body_that_is_no_request_is_refused(self) -> None:
        self.pool.reset(TEXT)
        cases = {
            b"": "body",
            b"\xff\xfe{": "body",
            b"[]": "body",
            b"[" * 100_000: "body",
            b"{}": "messages",
            b'{"messages": 5, "tools": 3}': "messages",
        }
        for body, field in cases.items():
            reply = await self.endpoints.answer("POST", "/v1/chat/completions", {}, body, None)
            assert isinstance(reply.body, bytes)
            said = json.loads(reply.body)["error"]
            assert (reply.status, said["param"]) == (400, field), (body[:100], said)
        for text in (b'{"prompt": [[99999999999999999999]]}', b'{"prompt": "a", "rid": ["a", "b"]}', b'{"prompt": []}'):
            reply = await self.endpoints.answer("POST", "/v1/completions", {}, text, None)
            assert reply.status == 400, (text, reply)
        assert (await self.endpoints.answer("GET", "/v1/files", {}, b"", None)).status == 404

    async def adapters_are_models_whose_ids_requests_take(self) -> None:
        ids = [FOLDER, f"{FOLDER}:math", f"{FOLDER}:code"]
        assert [model.id async for model in self.client.models.list()] == ids
        model = await self.client.models.retrieve(f"{FOLDER}:code")
        assert model.model_dump()["parent"] == FOLDER
        reply = await self.endpoints.answer("GET", "/v1/models/other", {}, b"", None)
        assert isinstance(reply.body, bytes) and reply.status == 404
        assert all(name in json.loads(reply.body)["error"]["message"] for name in ("'other'", FOLDER))

    async def a_call_that_is_left_is_taken_back_from_the_pool(self) -> None:
        self.pool.reset(TEXT)
        self.pool.hold.clear()
        stream = await self.ask(stream=True, n=3)
        async with stream:
            async for _ in stream:
                break
        await self.until(lambda: self.pool.cancelled == 1)
        await self.until(lambda: not self.manager._detokenizer.decode_status)  # the texts of its samples are forgotten
        self.pool.cancelled = 0
        call = asyncio.create_task(self.ask())
        await self.until(lambda: len(self.pool.asked) == 2)
        call.cancel()
        await self.until(lambda: self.pool.cancelled == 1 and call.done())

    async def a_slow_reader_makes_the_pool_wait(self) -> None:
        self.pool.reset("word " * 400)
        count = len(self.tokenizer.encode("word " * 400))
        stream = await self.ask(stream=True)
        async with aclosing(aiter(stream)) as chunks:  # pyright: ignore[reportArgumentType]
            await anext(chunks)
            for _ in range(300):
                await asyncio.sleep(0)
            assert self.pool.taken < 30 < count
            text = "".join([chunk.choices[0].delta.content or "" async for chunk in chunks])
        assert "word word" in text and self.pool.taken == count

    async def one_process_serves_one_model(self) -> None:
        with pytest.raises(ConfigError, match=r"this process serves .* another process for Qwen/Qwen3-0.6B"):
            build("Qwen/Qwen3-0.6B", {})


@asynccontextmanager
async def scenes() -> AsyncGenerator[Scenes]:
    pool = ChosenPool(FOLDER)
    endpoints = Endpoints(pool, "policy", None, SETTINGS)
    client = async_client(endpoints)
    await client.models.list()
    making: Any = endpoints._making  # pyright: ignore[reportPrivateUsage]
    manager = making.result().manager
    pool.encode = manager.tokenizer.encode
    yield Scenes(pool, endpoints, manager)


def say(name: str, error: str) -> None:
    print(json.dumps([name, error]), flush=True)  # noqa: T201


async def play() -> None:
    async with scenes() as all_:
        for name, scene in inspect.getmembers(all_, inspect.iscoroutinefunction):
            if name in ("ask", "streamed", "until", "failure"):
                continue
            try:
                async with asyncio.timeout(60):
                    await scene()
                await all_.until(lambda: not all_.manager.rid_to_state and not all_.manager._samples)
            except Exception:
                say(name, traceback.format_exc())
            else:
                say(name, "")


if __name__ == "__main__":
    asyncio.run(play())
