"""Weight updates of an SGLang engine, from the side of the worker's process: tickets to the loader in its schedulers.

A load is one `update_weights_from_tensor` on an empty or paused engine. SGLang's own flush is off, because its assertion would
end the engine: the loader flushes the caches before and after. Every answer is checked. `prepare_load` does what can be done
before the engine stops for the load, so that the ticket of the load is tiny. No SGLang here.
"""

import asyncio
import importlib
import itertools
import pickle
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from enginepool.protocol.layout import digest_sums, joined_digest
from enginepool.protocol.manifest import Tensor, encode_manifest
from enginepool.protocol.messages.weight_reports import Finding
from enginepool.protocol.messages.weights import Join
from enginepool.protocol.redis_url import is_redis
from enginepool.workers.engine import EngineDied, EngineError, NotComparable, OnlyAtStart, PauseMode
from enginepool.workers.engine_weights import Chunk, LoadTimes, ModelTensors, NewWeights
from enginepool.workers.sglang.host.processes import Processes
from enginepool.workers.sglang.host.settings import LOADER, SettingsError
from enginepool.workers.sglang.weights.answer_files import AnswerFiles
from enginepool.workers.sglang.weights.rank_answers import raise_first, whole_findings

#: An engine whose last answer is out may need another moment to be idle; one that needs longer than this is not empty.
IDLE_S = 30.0
#: how long that moment is at first, and at most, before the engine is asked again
_MOMENT_S, _MOMENTS_S = 0.001, 0.1
#: an engine that takes longer hangs
TAKE_S = 300.0
JOIN_S = 90.0
EXAMINE_S = 90.0
SAVE_S = 1800.0
#: how long after one look for an answer the next one is: at first, and at most
_LOOK_S, _LOOKS_S = 0.001, 0.02

#: `EngineEnd.unless_over`: EngineDied as soon as the engine is gone
UnlessOver = Callable[[Awaitable[Any]], Awaitable[Any]]


class SglangWeights:
    """The weights of one SGLang engine, an `EngineWeights`.

    Args:
        tokenizer_manager: SGLang's, which talks to the schedulers.
        requests: SGLang's module of request classes.
        processes: schedulers that hold weights.
        forget_cached: called when what was computed on the old weights is of no use any more.
    """

    def __init__(
        self, tokenizer_manager: Any, requests: Any, processes: Processes, unless_over: UnlessOver,
        forget_cached: Callable[[], None],
    ) -> None:  # fmt: skip
        self._tm = tokenizer_manager
        self._requests = requests
        self._unless_over = unless_over
        self._forget_cached = forget_cached
        self._numbers = itertools.count()
        self._answers = AnswerFiles()
        #: the load that the schedulers have prepared, and its name
        self._prepared: tuple[NewWeights, int] | None = None
        self._model: ModelTensors | None = None
        self._refused = "not loaded yet"
        self._processes = processes
        self.ranks = processes.ranks
        self.version = 0
        self.digest = ""
        #: the memory of the weights is released: no process may touch it
        self.asleep = False
        #: a paused engine computes again as soon as it has loaded verified weights
        self.goes_on = False
        #: why updates are slower than they could be, or ""
        self.plain = ""
        #: how often it was told to load
        self._loads = 0

    def close(self) -> None:
        """Remove the files of answers."""
        self._answers.close()

    async def describe(self) -> None:
        """Learn what an update of this model consists of. Called once, before the engine serves.

        Raises SettingsError: a rank has not loaded its model completely; EngineDied: a rank cannot say what it has loaded.
        """
        refused = self._processes.why_no_updates
        answers = await self._ask({"do": "describe"} | ({"refused": refused} if refused else {}))
        if reasons := [answer["unusable"] for answer in answers if "unusable" in answer]:
            raise SettingsError(reasons[0])
        if errors := [answer["error"] for answer in answers if "error" in answer]:
            # The model may not be as it was loaded.
            raise EngineDied(f"the engine cannot say what it has loaded: {errors[0]}")
        answer = answers[0]
        self._refused = answer.get("refused", "")
        if not self._refused:
            self.plain = next((one["plain"] for one in answers if one["plain"]), "")
            tensors = tuple(Tensor(name, dtype, tuple(shape)) for name, dtype, shape in answer["tensors"])
            # A tensor that one rank does without may be needed by another one.
            optional = frozenset[str].intersection(*(frozenset(one["optional"]) for one in answers))
            self._model = ModelTensors(tensors, optional, tuple(answer["gpus"]), answer["held"])

    def model_tensors(self) -> ModelTensors:
        """What an update of this model consists of. Raises OnlyAtStart."""
        if self._model is None:
            raise OnlyAtStart(f"this engine takes weights only at its start: {self._refused}")
        return self._model

    async def join(self, request: Join) -> None:
        """Join a process group while the engine serves. Raises EngineError."""
        name = request.rendezvous
        ticket = {"do": "join", "group": name, "address": request.address, "world": request.world, "backend": request.backend}
        tickets = [ticket | {"rank": request.rank + i} for i in range(self.ranks)]
        await self._ask_for_later(tickets, JOIN_S, f"group {name}: the engine did not join")

    async def verify(self, weights: NewWeights) -> tuple[str, list[Finding]]:
        """Open regions and read every byte while the engine serves. Raises EngineError."""
        ticket: dict[str, Any] = {"do": "verify", "manifest": encode_manifest(weights.tensors).decode()}
        ticket["targets"] = self.model_tensors().targets(weights.tensors)
        tickets = [ticket | {"regions": regions} for regions in self._of_each_rank(weights)]
        answers = await self._ask_for_later(tickets, EXAMINE_S, "the engine did not verify the new weights")
        digests = {answer["digest"] for answer in answers}
        if len(digests) > 1:
            raise EngineError("the engine's processes see different weights")
        return answers[0]["digest"], [Finding(**finding) for finding in answers[0]["findings"]]

    def _of_each_rank(self, weights: NewWeights) -> list[list[dict[str, Any]]]:
        """The regions for each rank, as a ticket has them: its own one, or all shards. Ranks without an own one read the first
        one, on a GPU across GPUs. Raises EngineError."""
        if not weights.regions:
            raise EngineError("regions: expected one or more, got none")
        regions: list[dict[str, Any]] = msgspec.to_builtins(list(weights.regions))
        if weights.sharded:
            return [regions] * self.ranks
        return [[space] for space in regions] if len(regions) == self.ranks else [regions[:1]] * self.ranks

    async def _ask_for_later(self, tickets: list[dict[str, Any]], seconds: float, late: str) -> list[dict[str, Any]]:
        """The second answers to tickets that are carried out while the engine serves. Raises EngineError."""
        paths = self._answers.name("later", len(tickets))
        raise_first(await self._ask(*(ticket | {"later": str(path)} for ticket, path in zip(tickets, paths, strict=True))))
        try:
            async with asyncio.timeout(seconds):
                pause = _LOOK_S
                while not all(path.exists() for path in paths):
                    await self._unless_over(asyncio.sleep(pause))
                    pause = min(2 * pause, _LOOKS_S)
        except TimeoutError:
            raise EngineError(f"{late} within {seconds:g} s") from None
        answers = [self._answers.take(path) for path in paths]
        raise_first(answers)
        return answers

    async def prepare_load(self, weights: NewWeights) -> float:
        """Prepare to load from these regions, a moment at a time, while the engine serves.

        Returns for how many seconds that kept a scheduler from its forwards. Raises EngineError: `load_weights` does it all.
        """
        self._prepared = None
        name = next(self._numbers)
        manifest = encode_manifest(weights.tensors).decode()
        asked: dict[str, Any] = {"do": "prepare", "name": name}
        tickets = [asked | {"regions": regions, "manifest": manifest} for regions in self._of_each_rank(weights)]
        while True:
            answers = await self._ask(*tickets)
            raise_first(answers)
            if all(answer["done"] for answer in answers):
                self._prepared = weights, name
                return max(answer["seconds"] for answer in answers)
            tickets = [asked]

    async def release_buffers(self) -> None:
        """Forget the prepared or verified load, and release its memory. Raises EngineError."""
        self._prepared = None
        await self._ask({"do": "release"})

    async def load_weights(self, weights: NewWeights, version: int, digest: str, running: PauseMode | None = None) -> LoadTimes:
        """Run on these weights from now on. Raises EngineError: the old ones stay; EngineDied: what is loaded is unknown."""
        self._loads += 1
        self._forget_cached()  # the engine is empty or paused, so nothing is computed until it has them
        if not (weights.regions or weights.checkpoint or weights.group):
            # The tokenizer's side keeps the version; 0.5.17 to 0.5.23 have this method for it.
            self._tm._update_weight_version_if_provided(str(version))
            self.version, self.digest = version, digest
            return LoadTimes(0.0, 0.0)
        self.model_tensors()  # raises, where it takes weights only at its start
        prepared, self._prepared = self._prepared, None
        answers: list[dict[str, Any]] = []
        if prepared is not None and prepared[0] == weights:
            answers = await self._exchange([{"do": "load", "name": prepared[1]}], version, running)
        if not answers or all(answer.get("kind") == "NotPrepared" for answer in answers):
            answers = await self._exchange(self._tickets(weights), version, running)
        failed = [answer for answer in answers if "error" in answer]
        if failed and (len(failed) < len(answers) or any(answer["touched"] for answer in failed)):
            raise EngineDied(f"the engine failed while it took new weights: {failed[0]['error']}")
        if failed:
            raise EngineError(f"the engine refused the new weights: {failed[0]['error']}")
        if weights.checkpoint:
            digest, _ = await self._digest()
        elif weights.group:
            digest = answers[0]["digest"]
            if any(answer["digest"] != digest for answer in answers):
                raise EngineDied("the engine's processes received different weights")
        self.version, self.digest = version, digest
        return LoadTimes(max(answer["load_s"] for answer in answers), max(answer["flush_s"] for answer in answers))

    async def _exchange(self, tickets: list[dict[str, Any]], version: int, running: PauseMode | None) -> list[dict[str, Any]]:
        """The answers to tickets that change weights, for which the engine must be idle, or paused."""
        if running:
            goes_on = {"goes_on": True} if self.goes_on and tickets[0]["do"] == "load" else {}
            tickets = [ticket | {"running": running} | goes_on for ticket in tickets]
        loop = asyncio.get_running_loop()
        end, moment = loop.time() + IDLE_S, _MOMENT_S
        while True:
            answers = await self._ask(*tickets, version=version)
            if loop.time() >= end or not all(answer.get("kind") == "EngineBusy" for answer in answers):
                return answers
            await self._unless_over(asyncio.sleep(moment))
            moment = min(2 * moment, _MOMENTS_S)

    def _tickets(self, weights: NewWeights) -> list[dict[str, Any]]:
        """What each rank is asked that takes them unprepared."""
        ticket: dict[str, Any] = {"manifest": encode_manifest(weights.tensors).decode()}
        if weights.checkpoint:
            return [ticket | {"do": "checkpoint", "path": weights.checkpoint}]
        if weights.group:
            return [ticket | {"do": "receive", "group": weights.group, "bucket_bytes": weights.bucket_bytes}]
        return [ticket | {"do": "load", "regions": regions} for regions in self._of_each_rank(weights)]

    async def save(self, target: str) -> str:
        """Write them to `target` while the engine serves; returns the load_format that reads them. Raises EngineError."""
        form = "remote" if is_redis(target) else "sharded_state"
        if self._processes.times > 1:
            raise EngineError(f"not saved: this engine has replicas or stages, and load_format {form} has none")
        loads, ticket = self._loads, {"do": "save", "path": target}
        await self._ask_for_later([ticket] * self.ranks, SAVE_S, "the engine did not save its weights")
        if self._loads != loads:
            raise EngineError("not saved: other weights were loaded meanwhile; save again")
        return form

    async def confirm(self) -> None:
        """Return once the schedulers have carried out all that they were sent before. Raises EngineError, EngineDied."""
        raise_first(await self._ask({"do": "confirm"}))

    async def inspect(self, what: str) -> tuple[str, list[Finding]]:
        """(digest, findings) of what is in all ranks together. Raises EngineError; NotComparable."""
        if what == "digest":
            digest, why = await self._digest()
            if why:
                raise NotComparable(f"not comparable: {why}")
            return digest, []
        answers = await self._ask({"do": what})
        raise_first(answers)
        return "", whole_findings(answers)

    async def _digest(self) -> tuple[str, str]:
        """(the digest of what is in all ranks together, why it is not that of what was sent, or ""). Raises EngineError."""
        answers = await self._ask({"do": "digest"})
        raise_first(answers)
        parts = {name: digest for answer in answers for name, digest in answer["digests"]}
        why = next((answer["why"] for answer in answers if answer["why"]), "")
        # A tensor that is absent in one rank may be in another one.
        absent = set[str].intersection(*(set(answer["absent"]) for answer in answers))
        if absent and not why:
            why = f"the engine holds nothing of {min(absent)}"
        return joined_digest((0, *digest_sums(digest)) for digest in parts.values()), why

    async def tensor(self, name: str, offset: int, count: int) -> Chunk:
        """Elements of one weight by its checkpoint name, put together from all ranks. Raises EngineError."""
        answers = await self._ask({"do": "tensor", "name": name, "offset": offset, "count": count})
        answers = [answer for answer in answers if answer.get("kind") != "Absent"] or answers
        raise_first(answers)
        values = np.zeros(len(answers[0]["data"]) // 4, np.float32)
        for answer in answers:
            part, here = np.frombuffer(answer["data"], np.float32), np.frombuffer(answer["here"], np.bool_)
            values = np.where(here, part, values)
        return Chunk(values, answers[0]["dtype"], tuple(answers[0]["shape"]))

    async def _ask(self, *tickets: dict[str, Any], version: int | None = None) -> list[dict[str, Any]]:
        """The answers of all ranks to their tickets, or to the same one. `version`: the ticket changes weights."""
        if self.asleep:
            raise EngineError("the engine's weights are asleep: wake them first")
        all_tickets = list(tickets) if len(tickets) == self.ranks else list(tickets) * self.ranks
        paths = self._answers.name("answer", len(all_tickets))
        payloads: list[bytes] = []
        for ticket, path in zip(all_tickets, paths, strict=True):
            asked = ticket | {"answer": str(path)} | ({"several": True} if self._processes.times > 1 else {})
            text = msgspec.json.encode(asked).decode()
            # The form that SGLang's own call wants for its pipe to its schedulers. It is only written here, never read.
            payloads.append(pickle.dumps([(text, _NoTensor())]))
        request = self._requests.UpdateWeightsFromTensorReqInput(
            serialized_named_tensors=payloads,
            load_format=LOADER,
            flush_cache=False,
            **for_the_model_alone(self._requests.UpdateWeightsFromTensorReqInput),
            weight_version=None if version is None else str(version),
        )
        if version is None:
            # A question may be asked while the engine serves, so not under the lock that waits until it does not.
            results = await self._within(self._tm.update_weights_from_tensor_communicator(request), TAKE_S)
            success, message = results[0].success, results[0].message
        else:
            success, message = (await self._within(self._tm.update_weights_from_tensor(request, None), TAKE_S))[:2]
        if not success:
            raise EngineError(f"the engine refused: {message}")
        return [self._answers.take(path) for path in await self._within(self._of_all(paths), TAKE_S)]

    async def _of_all(self, paths: list[Path]) -> list[Path]:
        """The files of all processes. Replicas, and stages, that are given the same ticket each have one; they may be late."""
        if self._processes.times == 1:
            return paths
        found: list[Path] = []
        while len(found) < len(paths) * self._processes.times:
            await asyncio.sleep(_LOOKS_S)
            found = [file for path in paths for file in path.parent.glob(f"{path.name}.*") if file.suffix != ".part"]
        return found

    async def _within(self, work: Awaitable[Any], seconds: float) -> Any:
        try:
            async with asyncio.timeout(seconds):
                return await self._unless_over(work)
        except TimeoutError:
            raise EngineDied(f"the engine hangs: no answer about its weights within {seconds:g} s") from None


def for_the_model_alone(request: Any) -> dict[str, Any]:
    """The field with which a request of this class, of an update, leaves out a model that only drafts tokens."""
    return {"selector": "target"} if "selector" in request.__struct_fields__ else {"disable_draft_model": True}


class _NoTensor:
    """Becomes an empty tensor where it is read. One that is pickled itself takes torch's own way, a hundred times as long."""

    def __reduce__(self) -> tuple[Any, tuple[()]]:
        torch: Any = importlib.import_module("torch")
        return torch.Tensor, ()
