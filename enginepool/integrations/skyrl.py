"""SkyRL: a group of a pool as its inference engines. Works with and without the package `skyrl`.

    class Experiment(BasePPOExp):
        def get_inference_client(self):
            return PoolInferenceEngine("tcp://10.0.0.1:5755", group="policy", model_name=MODEL, tokenizer=self.tokenizer)

SkyRL's own senders of weights talk to vLLM. `update_named_weights` takes the tensors themselves instead.
"""

import asyncio
import importlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from itertools import groupby
from os import PathLike
from typing import Any, cast

import msgspec

from enginepool.client.arguments import bad, kind
from enginepool.client.control import MEMORY_TAGS
from enginepool.client.pool import Pool
from enginepool.client.readiness import named_group
from enginepool.errors import EngineFailed, Unsupported
from enginepool.integrations.repeated_prompts import generate_runs
from enginepool.protocol.messages.control import ControlReport
from enginepool.trainer.publisher import WeightPublisher

_INTERFACE = "skyrl.backends.skyrl_train.inference_servers.base"
#: vLLM's names of sampling parameters, where the pool has others
_NAMES = {"max_tokens": "max_new_tokens", "min_tokens": "min_new_tokens", "seed": "sampling_seed"}
#: those that concern text, which the pool does not make, and those that are read elsewhere
_OTHERS = {"logprobs", "prompt_logprobs", "skip_special_tokens", "include_stop_str_in_output", "output_kind", "detokenize", "n"}


def _interface() -> Any:
    """SkyRL's abstract class, whose methods are those of this one; `object` where it is not installed."""
    try:
        return importlib.import_module(_INTERFACE).InferenceEngineInterface
    except ImportError:
        return object


_Interface: Any = _interface()


class PoolInferenceEngine(_Interface):
    """SkyRL's `InferenceEngineInterface` on a group of a pool that generates.

    It connects when it is first used, once on each event loop, and can be pickled: SkyRL hands it to other processes.

    Args:
        pool: the address of a pool, or a `Pool`, which is used on its own loop; a pickled copy connects to its address.
        model_name: what SkyRL calls the model; another name in a call is that of an adapter of the group.
        tokenizer: of the model, for the texts of responses and for chats.
        keys: as of `Pool.connect`.
        endpoint_url: of an HTTP server of yours; a pool has none.
        generate: options of `Pool.generate` for all calls, such as priority, or routed_experts.
        publish: options of `WeightPublisher`, such as device or dtype.
    """

    def __init__(
        self,
        pool: Pool | str,
        *,
        model_name: str,
        tokenizer: Any,
        group: str = "",
        keys: str | PathLike[str] | None = None,
        endpoint_url: str = "",
        generate: Mapping[str, Any] | None = None,
        publish: Mapping[str, Any] | None = None,
    ) -> None:
        self._address = pool if isinstance(pool, str) else pool.address
        self._name, self._tokenizer, self._group, self._keys = model_name, tokenizer, group, keys
        self._endpoint_url = endpoint_url
        self._generate, self._publish = dict(generate or {}), dict(publish or {})
        #: how many updates SkyRL says that it has made
        self.weight_version = 0
        self._pool = pool if isinstance(pool, Pool) else None
        #: of the pool, if it was opened here
        self._loop: asyncio.AbstractEventLoop | None = None
        #: opens the pool, for all calls that come meanwhile
        self._opening: asyncio.Task[Pool] | None = None
        self._publisher: WeightPublisher | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, **dict.fromkeys(("_pool", "_loop", "_opening", "_publisher"))}

    async def _here(self) -> Pool:
        """A pool on the running loop. SkyRL runs one loop after the other."""
        loop = asyncio.get_running_loop()
        if self._pool is not None and self._loop in (None, loop):
            return self._pool
        if self._opening is None or self._opening.done() or self._opening.get_loop() is not loop:
            self._opening = loop.create_task(self._open())
        return await asyncio.shield(self._opening)  # others wait for it, too

    async def _open(self) -> Pool:
        await self._leave()
        pool = await Pool.connect(self._address, keys=self._keys)
        self._loop, self._pool = asyncio.get_running_loop(), pool
        return pool

    async def _leave(self) -> None:
        pool, publisher, own = self._pool, self._publisher, self._loop is not None
        self._pool = self._publisher = self._loop = None
        with suppress(RuntimeError):  # its loop is closed
            if publisher is not None:
                await publisher.close()
            if pool is not None and own:
                await pool.close()

    # --- generation ------------------------------------------------------------------------------------------------------

    @property
    def model_name(self) -> str:
        """What requests call the model."""
        return self._name

    def _adapter(self, model: str | None) -> str | None:
        """The adapter that a call with this name asks for; None: the model alone."""
        return model if model and model != self._name else None

    async def generate(self, input_batch: Mapping[str, Any], model: str | None = None) -> dict[str, Any]:
        """Continue each of `prompt_token_ids`. Equal prompts in a row are one request for several samples.
        The first error ends the other requests.

        Sessions and cache salts need nothing: the pool finds prefixes by their tokens, and serves none of other weights.
        """
        for name in ("prompts", "mm_features"):
            if input_batch.get(name) is not None:
                raise bad(name, f"{name}: not supported; give prompt_token_ids")
        asked: Any = input_batch.get("sampling_params") or {}
        if asked.get("n") not in (None, 1):
            raise bad("n", f"n: {asked['n']}; SkyRL repeats its prompts", "1")
        options: Any = {**_sampling(asked), **self._generate, "group": self._group}
        options["logprobs"] = asked.get("logprobs") is not None
        if adapter := self._adapter(model):
            options["adapter"] = adapter
        pool = await self._here()
        prompts: Any = input_batch.get("prompt_token_ids") or ()
        runs = [(ids, len([*equal])) for ids, equal in groupby(prompts)]
        answers = await generate_runs(pool, runs, options)
        samples = [sample for answer in answers for sample in answer[0]]
        rows = [sample.token_ids.tolist() for sample in samples]
        return {
            "responses": [self._tokenizer.decode(ids, skip_special_tokens=True) for ids in rows],
            "response_ids": rows,
            "stop_reasons": ["abort" if one.finish_reason == "interrupted" else one.finish_reason for one in samples],
            "response_logprobs": [one.logprobs.tolist() for one in samples if one.logprobs is not None] or None,
            "prompt_logprobs": None,
            "rollout_expert_indices": [one.routed_experts for one in samples] if options.get("routed_experts") else None,
        }

    async def chat_completion(self, request_payload: dict[str, Any]) -> dict[str, Any]:
        """OpenAI's API, as `Pool.openai` has it; an error is an answer, too."""
        return await self._openai("/v1/chat/completions", request_payload)

    async def completion(self, request_payload: dict[str, Any]) -> dict[str, Any]:
        """OpenAI's API, as `Pool.openai` has it; an error is an answer, too."""
        return await self._openai("/v1/completions", request_payload)

    async def _openai(self, path: str, request_payload: dict[str, Any]) -> dict[str, Any]:
        body = {**request_payload["json"], "model": ""}
        if adapter := self._adapter(request_payload["json"].get("model")):
            body["lora_path"] = adapter
        if body.pop("stream", False):
            raise bad("stream", "stream: True; the answer is one object")
        body.pop("session_id", None)
        endpoints = (await self._here()).endpoints(self._group, None, {})
        reply = await endpoints.answer("POST", path, request_payload.get("headers") or {}, msgspec.json.encode(body), None)
        return msgspec.json.decode(cast("bytes", reply.body))

    async def render_chat_completion(self, request_payload: dict[str, Any]) -> dict[str, Any]:
        """The token ids of a chat, under `token_ids`, by the tokenizer's template. Chats with media are not supported."""
        body: Any = request_payload["json"]
        named: dict[str, Any] = {"tools": body.get("tools"), **(body.get("chat_template_kwargs") or {})}
        prompt = body.get("add_generation_prompt", True)
        ids = self._tokenizer.apply_chat_template(
            body["messages"], add_generation_prompt=prompt, tokenize=True, return_dict=False, **named
        )
        return {"token_ids": list(ids), "features": None}

    def get_endpoint_url(self) -> str:
        """The `endpoint_url` that was given. Raises Unsupported: there is none."""
        if not self._endpoint_url:
            raise Unsupported("endpoint_url: not given; a pool has no HTTP server, so give the address of one that uses it")
        return self._endpoint_url

    async def finish_session(self, session_id: str) -> None:
        """Nothing is kept for a session."""

    # --- flow ------------------------------------------------------------------------------------------------------------

    async def pause_generation(self) -> None:
        """The group starts no work from now on, for all of its clients: `Pool.pause`. Updates need no pause."""
        _all_did(await (await self._here()).pause(self._group))

    async def resume_generation(self) -> None:
        """`Pool.resume`: what waits begins, and what was interrupted goes on after its last token."""
        _all_did(await (await self._here()).resume(self._group))

    async def reset_prefix_cache(self, reset_running_requests: bool = False) -> None:
        """Flush the caches of all engines, each once it is idle. `reset_running_requests`: SkyRL asks for an update, which
        flushes them by itself."""
        if not reset_running_requests:
            await (await self._here()).flush(self._group)

    async def sleep(self, *args: Any, **kwargs: Any) -> None:
        """`Pool.sleep`: the engines release these `tags`, by default all. SGLang has no `level`."""
        _all_did(await (await self._here()).sleep(self._group, tags=kwargs.get("tags") or MEMORY_TAGS))

    async def wake_up(self, *args: Any, **kwargs: Any) -> None:
        """`Pool.wake`: the engines take back these `tags`, by default all. SkyRL wakes `weights`, then `kv_cache`, and knows no
        `cuda_graph`, which wakes with the last."""
        tags: set[Any] = set(kwargs.get("tags") or MEMORY_TAGS)
        if "kv_cache" in tags:
            tags.add("cuda_graph")
        _all_did(await (await self._here()).wake(self._group, tags=[*tags]))

    async def get_world_size(self) -> tuple[int, int]:
        """(workers of the group, 1)."""
        return len(named_group(await (await self._here()).status(None), self._group).workers), 1

    # --- weights ---------------------------------------------------------------------------------------------------------

    async def init_weight_update_communicator(self, init_info: Any) -> None:
        """Make a publisher. The process group is formed with the first update, and not by `init_info`."""
        await self._publishing()

    async def update_named_weights(self, request: Any) -> Any:
        """Publish one update: a module, a mapping of names to tensors, or an iterable of SkyRL's `WeightChunk`, all of it.

        Returns:
            an `UpdateRecord`. An update that is aborted is tried again, as `WeightPublisher.publish` says.

        Raises:
            Unsupported: the request has names without tensors, or the path of an adapter.
        """
        source = _source(request)
        return await (await self._publishing()).publish(source, in_flight="abort")

    async def _publishing(self) -> WeightPublisher:
        pool = await self._here()
        if self._publisher is None:
            self._publisher = WeightPublisher(pool, group=self._group, **self._publish)
        return self._publisher

    def increment_weight_version(self) -> None:
        """SkyRL counts its updates."""
        self.weight_version += 1

    async def teardown(self) -> None:
        """End the publisher, and the connection if it was made here."""
        if self._opening is not None and self._opening.get_loop() is asyncio.get_running_loop():
            await asyncio.wait([self._opening])
        await self._leave()


def _sampling(asked: Mapping[str, Any]) -> dict[str, Any]:
    """vLLM's sampling parameters by the pool's names, without those that are not set."""
    return {_NAMES.get(name, name): value for name, value in asked.items() if name not in _OTHERS and value is not None}


def _source(given: Any) -> Any:
    """What `WeightPublisher.publish` takes."""
    if getattr(given, "lora_path", ""):
        raise Unsupported("update_named_weights: the path of an adapter; merge adapters into the weights")
    is_mapping = isinstance(cast("object", given), Mapping)
    if hasattr(given, "state_dict") or (is_mapping and "names" not in given):
        return given
    if is_mapping or not (hasattr(given, "tensors") or isinstance(cast("object", given), Iterable)):
        text = f"update_named_weights: {kind(cast('object', given))} without tensors; give a module, a mapping, or chunks"
        raise Unsupported(text)
    return dict(_pairs([given] if hasattr(given, "tensors") else given))


def _all_did(report: ControlReport) -> None:
    """Raises EngineFailed where a worker could not do it. One that starts is awake and has no work, but needs its memory."""
    fine = {""} if report.command == "sleep" else {"", "pool_down"}
    if failed := [f"{worker.name}: {worker.message}" for worker in report.workers if worker.code not in fine]:
        raise EngineFailed(f"{report.command}: {'; '.join(failed[:3])}")


def _pairs(chunks: Any) -> Iterator[tuple[str, Any]]:
    for chunk in chunks:
        yield from zip(chunk.names, chunk.tensors, strict=True)
