"""`enginepool.integrations.skyrl`: the methods of SkyRL's interface, and what they do to a pool of sim workers."""

import asyncio
import importlib
import inspect
import pickle
import sys
from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from enginepool import Pool, errors
from enginepool.integrations.skyrl import PoolInferenceEngine
from enginepool.protocol.messages import Cancel, ErrorReply, FromClient, Generate, GroupStatus, Sampling
from enginepool.workers.sim.tokens import expected_output
from tests.process.daemons import PATIENCE_S
from tests.process.processes import Processes
from tests.process.scenes import OPTIONS
from tests.process.test_generate import VOCAB, generating, run
from tests.process.weights import some_weights
from tests.wire.generating_coordinator import GeneratingCoordinator

#: the abstract methods of SkyRL's `InferenceEngineInterface`, and their arguments
METHODS = {
    "generate": ("input_batch", "model"),
    "get_endpoint_url": (),
    "chat_completion": ("request_payload",),
    "render_chat_completion": ("request_payload",),
    "completion": ("request_payload",),
    "wake_up": ("args", "kwargs"),
    "sleep": ("args", "kwargs"),
    "init_weight_update_communicator": ("init_info",),
    "update_named_weights": ("request",),
    "teardown": (),
    "reset_prefix_cache": ("reset_running_requests",),
    "pause_generation": (),
    "resume_generation": (),
    "finish_session": ("session_id",),
    "get_world_size": (),
}
PROPERTIES = ("model_name",)
SYNCHRONOUS = ("get_endpoint_url",)
#: as SkyRL gives it
SAMPLING: dict[str, Any] = {
    "min_tokens": 1, "skip_special_tokens": True, "include_stop_str_in_output": True, "max_tokens": 20, "temperature": 1.0,
    "top_p": 1.0, "top_k": -1, "min_p": 0.0, "logprobs": 0, "stop": None,
}  # fmt: skip


class Tokenizer:
    def decode(self, ids: list[int], *, skip_special_tokens: bool) -> str:
        return " ".join(map(str, ids))

    def apply_chat_template(self, messages: Any, **named: Any) -> list[int]:
        assert (named["tokenize"], named["return_dict"], named["enable_thinking"]) == (True, False, False)
        return [len(message["content"]) for message in messages] + [1] * named["add_generation_prompt"]


@dataclass
class Chunk:
    """As SkyRL's WeightChunk."""

    names: list[str]
    dtypes: list[str]
    shapes: list[list[int]]
    tensors: list[Any]


def engine(pool: Any, **options: Any) -> PoolInferenceEngine:
    return PoolInferenceEngine(pool, model_name="policy-model", tokenizer=Tokenizer(), group="g", publish=OPTIONS, **options)


def test_it_has_every_method_of_the_interface_with_its_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, arguments in METHODS.items():
        method: Any = getattr(PoolInferenceEngine, name)
        assert tuple(inspect.signature(method).parameters) == ("self", *arguments), name
        assert inspect.iscoroutinefunction(method) == (name not in SYNCHRONOUS), name
    assert all(isinstance(inspect.getattr_static(PoolInferenceEngine, name), property) for name in PROPERTIES)
    assert len(METHODS) + len(PROPERTIES) == 16

    # Where SkyRL is installed, it is one of its engines, and no abstract method is left.
    def left(*_: object) -> None:
        """It is not implemented."""

    made = {name: abstractmethod(left) for name in (*METHODS, *PROPERTIES)}
    base = "skyrl.backends.skyrl_train.inference_servers.base"
    for place in ("skyrl", "skyrl.backends", "skyrl.backends.skyrl_train", base.removesuffix(".base"), base):
        monkeypatch.setitem(sys.modules, place, ModuleType(place))
    interface = type("InferenceEngineInterface", (ABC,), made)
    monkeypatch.setattr(sys.modules[base], "InferenceEngineInterface", interface, raising=False)
    monkeypatch.delitem(sys.modules, "enginepool.integrations.skyrl")
    again: Any = importlib.import_module("enginepool.integrations.skyrl")
    assert isinstance(again.PoolInferenceEngine("ipc:///nowhere", model_name="m", tokenizer=None), interface)


def test_it_generates_pauses_and_publishes(processes: Processes, tmp_path: Path) -> None:
    daemon = generating(processes, tmp_path, options={"forward_s": 0.001, "adapters": ["french"]})
    client = engine(daemon.address)

    def check(answer: dict[str, Any], prompts: list[list[int]], **named: Any) -> None:
        sampling = Sampling(max_new_tokens=20, min_new_tokens=1)
        options: Any = {"vocab": VOCAB, "end_every": 0, **named}
        wanted = [
            expected_output(ids, sampling, sample=sum(ids is p for p in prompts[:i]), **options)
            for i, ids in enumerate(prompts)
        ]
        assert answer["response_ids"] == [tokens for tokens, _, _ in wanted]
        assert answer["responses"] == [" ".join(map(str, tokens)) for tokens, _, _ in wanted]
        assert answer["stop_reasons"] == ["length"] * len(prompts)
        np.testing.assert_allclose(answer["response_logprobs"], [logprobs for _, logprobs, _ in wanted], rtol=1e-5)
        assert answer["prompt_logprobs"] is None and answer["rollout_expert_indices"] is None

    async def scene() -> None:
        first, second = [11, 12], [13]
        prompts = [first, first, second]
        batch: Any = {"prompt_token_ids": prompts, "sampling_params": SAMPLING, "session_ids": ["a", "b", "c"], "prompts": None}
        await client.wake_up()
        assert await client.get_world_size() == (2, 1) and client.model_name == "policy-model"
        check(await client.generate(batch, "policy-model"), prompts)
        check(await client.generate(batch, model="french"), prompts, adapter="french")

        await client.pause_generation()
        waiting = asyncio.ensure_future(client.generate(batch))
        await client.init_weight_update_communicator(SimpleNamespace(override_existing_receiver=True))
        weights: Any = some_weights(1)
        chunks = [Chunk([name], [str(tensor.dtype)], [[*tensor.shape]], [tensor]) for name, tensor in weights.items()]
        record: Any = await client.update_named_weights(iter(chunks))
        assert (record.version, record.outcome, record.transfer) == (1, "committed", "staged") and not waiting.done()
        await client.reset_prefix_cache(reset_running_requests=True)
        await client.resume_generation()
        spans: Any = {"spans": [(1, 20)], "digests": {1: record.digest}}
        check(await waiting, prompts, **spans)
        assert (await client.update_named_weights(some_weights(2))).version == 2
        await client.reset_prefix_cache()
        await client.finish_session("a")
        client.increment_weight_version()
        assert client.weight_version == 1

        with pytest.raises(errors.BadRequest):
            await client.generate({"prompts": [[{"role": "user", "content": "Who?"}]]})
        for refused in (SimpleNamespace(lora_path="/adapters/1"), {"names": ["weight"]}, SimpleNamespace(names=["weight"])):
            with pytest.raises(errors.Unsupported):
                await client.update_named_weights(refused)
        await client.sleep(level=2)
        waiting = asyncio.ensure_future(client.generate(batch))
        await client.wake_up(tags=["weights"])
        assert (await client.update_named_weights(some_weights(3))).version == 3 and not waiting.done()
        await client.wake_up(tags=["kv_cache"])
        assert len((await waiting)["response_ids"]) == len(prompts)
        await client.teardown()

    run(scene)
    # Another loop, and a copy in another process.
    copied = pickle.loads(pickle.dumps(client))

    async def again() -> None:
        for one in (client, copied):
            check(
                await one.generate({"prompt_token_ids": [[5]], "sampling_params": SAMPLING}),
                [[5]],
                **{"spans": [(3, 20)]} | digests,
            )
            await one.teardown()

    async def committed() -> str:
        async with Pool.connect(daemon.address) as pool:
            await pool.ready(PATIENCE_S)
            return (await pool.status()).groups[0].digest

    digests = {"digests": {3: asyncio.run(committed())}}
    run(again)


def test_calls_at_once_open_one_connection_and_the_next_call_opens_it_after_a_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch: Any = {"prompt_token_ids": [[1]], "sampling_params": {"max_tokens": 1}}
    opened: list[Pool] = []
    refusals = [errors.ConnectError("no coordinator")]
    connect = Pool.connect

    async def counted(address: str, **options: Any) -> Pool:
        await asyncio.sleep(0)
        if refusals:
            raise refusals.pop()
        opened.append(await connect(address, **options))
        return opened[-1]

    monkeypatch.setattr(Pool, "connect", counted)
    with GeneratingCoordinator(f"ipc://{tmp_path}/c.sock") as coordinator:
        client = engine(coordinator.address)

        async def scene() -> None:
            refused = await asyncio.gather(*(client.generate(batch) for _ in range(4)), return_exceptions=True)
            assert [type(one) for one in refused] == [errors.ConnectError] * 4
            first, *others = [asyncio.ensure_future(client.generate(batch)) for _ in range(8)]
            await asyncio.sleep(0)
            first.cancel()
            assert [answer["response_ids"] for answer in await asyncio.gather(*others)] == [[[0]]] * 7
            assert first.cancelled() and len(opened) == 1
            await client.teardown()
            begun = asyncio.ensure_future(client.generate(batch))
            await asyncio.sleep(0)
            await client.teardown()
            with pytest.raises(errors.PoolClosed):
                await begun
            assert len(opened) == 2
            for pool in opened:
                with pytest.raises(errors.PoolClosed):
                    await pool.status()

        run(scene)


def test_a_prompt_that_is_refused_ends_the_requests_of_the_others(tmp_path: Path) -> None:
    def refuse_the_last(link: bytes, message: FromClient, frames: list[bytes]) -> None:
        if isinstance(message, Generate) and np.frombuffer(frames[0], np.int32).tolist() == [9]:
            coordinator.write(link, ErrorReply("bad_request", "items[0]: refused", message.id, field="items[0]"))

    with GeneratingCoordinator(f"ipc://{tmp_path}/c.sock") as coordinator:
        coordinator.others, coordinator.groups = refuse_the_last, [GroupStatus("g")]
        client = engine(coordinator.address)

        async def scene() -> None:
            with pytest.raises(errors.BadRequest):
                await client.generate({"prompt_token_ids": [[1], [2], [9]]})
            await client.get_world_size()  # what was sent before was heard
            await client.teardown()

        run(scene)
        assert sum(isinstance(message, Cancel) for message in list(coordinator.heard.queue)) == 2


def test_chats_go_to_the_api_of_openai_and_to_the_tokenizer(processes: Processes, tmp_path: Path) -> None:
    client = engine("ipc:///nowhere", endpoint_url="http://front:8000")
    asked: list[tuple[str, str, bytes]] = []

    class Endpoints:
        async def answer(self, method: str, path: str, headers: Any, body: bytes, within: None) -> Any:
            asked.append((method, path, body))
            return SimpleNamespace(body=b'{"choices": []}')

    def endpoints(group: str, model: None, settings: dict[str, Any]) -> Endpoints:
        assert (group, settings) == ("g", {})
        return Endpoints()

    async def here() -> Any:
        return SimpleNamespace(endpoints=endpoints)

    client._here = here  # pyright: ignore[reportPrivateUsage]
    messages = [{"role": "user", "content": "Who?"}]

    async def scene() -> None:
        body: Any = {"model": "policy-model", "messages": messages, "session_id": "a"}
        assert await client.chat_completion({"json": body, "headers": {}}) == {"choices": []}
        assert await client.completion({"json": {"prompt": [1, 2]}}) == {"choices": []}
        assert await client.completion({"json": {"prompt": [1, 2], "model": "french"}}) == {"choices": []}
        template: Any = {"messages": messages, "chat_template_kwargs": {"enable_thinking": False}}
        assert await client.render_chat_completion({"json": template}) == {"token_ids": [4, 1], "features": None}
        with pytest.raises(errors.BadRequest):
            await client.chat_completion({"json": {"stream": True}})

    run(scene)
    assert asked == [
        ("POST", "/v1/chat/completions", b'{"model":"","messages":[{"role":"user","content":"Who?"}]}'),
        ("POST", "/v1/completions", b'{"prompt":[1,2],"model":""}'),
        ("POST", "/v1/completions", b'{"prompt":[1,2],"model":"","lora_path":"french"}'),
    ]
    assert client.get_endpoint_url() == "http://front:8000"
    with pytest.raises(errors.Unsupported):
        engine("ipc:///nowhere").get_endpoint_url()
