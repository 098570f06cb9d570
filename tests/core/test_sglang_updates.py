"""How an engine takes weights, without SGLang: real tickets to the real loader, in schedulers that are made up."""

import asyncio
import importlib
import os
import pickle
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from enginepool.protocol.layout import layout
from enginepool.protocol.manifest import Tensor
from enginepool.protocol.messages.weight_reports import Finding
from enginepool.protocol.messages.weights import Join
from enginepool.transfer import collective
from enginepool.transfer.digest import digest_of, views
from enginepool.workers.engine import EngineDied, EngineError, NotComparable, OnlyAtStart
from enginepool.workers.engine_weights import MemoryRegion, NewWeights
from enginepool.workers.sglang.host import process as sglang_process
from enginepool.workers.sglang.host.processes import Processes
from enginepool.workers.sglang.host.settings import LOADER, SettingsError
from enginepool.workers.sglang.patches import modules
from enginepool.workers.sglang.patches import scheduler as sglang_scheduler
from enginepool.workers.sglang.patches.scheduler import pass_tickets_of_refused_updates
from enginepool.workers.sglang.weights import lent_memory
from enginepool.workers.sglang.weights import loader as sglang_weights
from enginepool.workers.sglang.weights import updates as sglang_updates
from enginepool.workers.sglang.weights.load_plan import LoadPlan
from enginepool.workers.sglang.weights.updates import SglangWeights
from tests.core.test_sglang_plan import TENSORS, Model, drawn, same, state

torch: Any = importlib.import_module("torch")
library: Any = importlib.import_module("safetensors.torch")

PATIENCE_S = 60.0


class EagerRunner:
    """SGLang's, for forwards without graphs."""


class Scheduler:
    """SGLang's, as far as a flush and graphs go."""

    graphs = False

    def __init__(self, says: Callable[[], bool]) -> None:
        self.says = says
        self.flushed = 0
        runner = SimpleNamespace(
            prefill_cuda_graph_runner=object() if self.graphs else EagerRunner(), decode_cuda_graph_runner=None
        )
        self.tp_worker = SimpleNamespace(model_runner=runner)

    def flush_cache(self, empty_cache: bool = True) -> bool:
        """Emptying torch's cache as well takes milliseconds."""
        assert not empty_cache
        self.flushed += self.says()
        return self.says()


class OlderScheduler(Scheduler):
    """One that cannot be told what to empty."""

    def flush_cache(self) -> bool:  # pyright: ignore[reportIncompatibleMethodOverride]
        return super().flush_cache(empty_cache=False)


class PlainUpdater:
    """SGLang's caller of loaders, which asks first whether the model can take updates."""

    def __init__(self, model: Any, refuses: str) -> None:
        self.get_model = lambda: model
        self.refuses = refuses

    def update_weights_from_tensor(self, named_tensors: Any, load_format: str | None = None) -> tuple[bool, str]:
        if self.refuses:
            return False, self.refuses
        assert load_format == LOADER
        sglang_weights.load(self.get_model(), named_tensors)
        return True, "Success"


class Updater(PlainUpdater):
    """The same with our change."""


pass_tickets_of_refused_updates(Updater, LOADER)


class Request(msgspec.Struct):
    """SGLang's, of an update."""

    serialized_named_tensors: list[bytes]
    load_format: str
    flush_cache: bool
    weight_version: str | None = None
    selector: str = "all"


class OlderRequest(msgspec.Struct):
    """SGLang's before 0.5.21."""

    serialized_named_tensors: list[bytes]
    load_format: str
    flush_cache: bool
    weight_version: str | None = None
    disable_draft_model: bool | None = None


class Engine:
    """Ranks of an engine in this process, behind the tokenizer manager's calls for weights."""

    def __init__(self, ranks: int = 1, request: type = Request) -> None:
        self.models = [Model() for _ in range(ranks)]
        self.idle = [True] * ranks
        self.schedulers = [Scheduler(lambda rank=rank: self.idle[rank]) for rank in range(ranks)]
        #: what was asked for, of the first rank
        self.tickets: list[dict[str, Any]] = []
        self.before: Callable[[], None] = lambda: None
        #: why SGLang takes no updates of this model, or ""
        self.refuses = ""
        #: the last one
        self.request: Any = None
        requests = SimpleNamespace(UpdateWeightsFromTensorReqInput=request)
        self.weights = SglangWeights(self, requests, Processes(ranks), self._over, lambda: None)

    async def _over(self, work: Any) -> Any:
        return await work

    async def update_weights_from_tensor_communicator(self, request: Any) -> list[Any]:
        await asyncio.sleep(0)
        self.request = request
        self.before()
        for rank, payload in enumerate(request.serialized_named_tensors):
            [(text, tensor)] = pickle.loads(payload)
            assert tensor.numel() == 0
            if rank == 0:
                self.tickets.append(sglang_weights.msgspec.json.decode(text))
            sglang_scheduler._schedulers[:] = [self.schedulers[rank]]  # pyright: ignore[reportPrivateUsage]
            updater = Updater(self.models[rank], self.refuses)
            success, message = updater.update_weights_from_tensor([(text, tensor)], load_format=LOADER)
            if not success:
                return [SimpleNamespace(success=False, message=message)]
        return [SimpleNamespace(success=True, message="")]

    async def update_weights_from_tensor(self, request: Any, _: Any) -> tuple[bool, str]:
        [result] = await self.update_weights_from_tensor_communicator(request)
        return result.success, result.message

    def _update_weight_version_if_provided(self, version: str) -> None:
        pass

    def holds_open(self, path: Path) -> bool:
        """Whether a file is mapped into this process."""
        return str(path) in Path("/proc/self/maps").read_text()

    def did(self) -> list[str]:
        """What was asked for since the last call of this, each several times in a row once."""
        did = [ticket["do"] for ticket in self.tickets]
        self.tickets.clear()
        return [what for i, what in enumerate(did) if i == 0 or did[i - 1] != what]


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Engine]]:
    monkeypatch.setattr(sglang_process, "_own_load", [(one.name, one.dtype, one.shape) for one in TENSORS])
    monkeypatch.setattr(sglang_scheduler, "_schedulers", [])
    monkeypatch.setattr(sglang_weights, "_weights", {})
    engines: list[Engine] = []

    def make(ranks: int = 1, refuses: str = "") -> Engine:
        engines.append(Engine(ranks))
        engines[-1].refuses = refuses
        asyncio.run(engines[-1].weights.describe())
        assert engines[-1].did() == ["describe"]
        return engines[-1]

    yield make
    for engine in engines:
        engine.weights.close()


class Drawn:
    """Weights in a file, and what a model is that has loaded them."""

    def __init__(self, directory: Path, seed: int) -> None:
        self.model = Model()
        self.model.load_weights(drawn(seed))
        space = torch.zeros(layout(TENSORS).nbytes, dtype=torch.uint8)
        for view, (_, tensor) in zip(views(space, TENSORS), drawn(seed), strict=True):
            view.copy_(tensor)
        self.digest = digest_of(space)
        self.path = directory / f"space-{seed}"
        self.path.write_bytes(space.numpy().tobytes())
        self.weights = NewWeights(tuple(TENSORS), (MemoryRegion("file", space.numel(), path=str(self.path)),))

    def is_in(self, engine: Engine) -> bool:
        return all(same(state(model), state(self.model)) for model in engine.models)


def test_an_engine_of_which_any_rank_has_an_incomplete_model_can_never_start(
    make: Callable[[int], Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    for ranks in (1, 2):
        reasons = iter([""] * (ranks - 1) + ["no tensor fills lm_head.weight"])
        monkeypatch.setattr(sglang_weights, "incomplete_load", lambda reasons=reasons: next(reasons))
        with pytest.raises(SettingsError, match=r"^no tensor fills lm_head\.weight$"):
            make(ranks)


REFUSES = "Online weight updates are not supported while a cache is on."


def test_an_engine_whose_updates_sglang_refuses_serves_without_updates(make: Callable[..., Engine], tmp_path: Path) -> None:
    for ranks in (1, 2):
        engine, weights = make(ranks, REFUSES), Drawn(tmp_path, 1)
        reason = f"takes weights only at its start: SGLang refuses: {REFUSES}"
        with pytest.raises(OnlyAtStart, match=reason):
            engine.weights.model_tensors()
        with pytest.raises(OnlyAtStart, match=reason):
            asyncio.run(engine.weights.load_weights(weights.weights, 1, weights.digest))
        assert not weights.is_in(engine)


def test_an_incomplete_model_whose_updates_sglang_refuses_can_never_start(
    make: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sglang_weights, "incomplete_load", lambda: "no tensor fills lm_head.weight")
    with pytest.raises(SettingsError, match="no tensor fills"):
        make(1, REFUSES)


def test_updates_that_sglang_refuses_later_leave_the_old_weights(make: Callable[[int], Engine], tmp_path: Path) -> None:
    engine, weights = make(1), Drawn(tmp_path, 1)
    before = state(engine.models[0])
    engine.refuses = REFUSES
    with pytest.raises(EngineError, match=engine.refuses):
        asyncio.run(engine.weights.load_weights(weights.weights, 1, weights.digest))
    assert same(before, state(engine.models[0])) and engine.schedulers[0].flushed == 0


def test_a_ticket_is_for_the_model_that_checks_tokens_and_not_for_one_that_drafts_them(make: Callable[[int], Engine]) -> None:
    engine = make(1)
    assert engine.request.selector == "target"
    older = Engine(request=OlderRequest)
    older.models = engine.models
    asyncio.run(older.weights.describe())
    assert older.request.disable_draft_model is True


def test_what_was_made_ready_is_taken_by_one_ticket_that_names_it(make: Callable[[int], Engine], tmp_path: Path) -> None:
    for ranks in (1, 2):
        engine, weights = make(ranks), Drawn(tmp_path, 1)

        async def story(engine: Engine = engine, weights: Drawn = weights) -> None:
            before = state(engine.models[0])
            assert await engine.weights.prepare_load(weights.weights) > 0
            assert same(before, state(engine.models[0])) and engine.schedulers[0].flushed == 0
            assert engine.did() == ["prepare"]
            times = await engine.weights.load_weights(weights.weights, 1, weights.digest)
            assert times.load_s > 0 and times.flush_s > 0
            assert [ticket.keys() for ticket in engine.tickets] == [{"do", "name", "answer"}]
            assert (engine.weights.version, engine.weights.digest) == (1, weights.digest)

        asyncio.run(story())
        assert weights.is_in(engine)
        assert [scheduler.flushed for scheduler in engine.schedulers] == [2] * ranks


def test_what_computes_digests_on_a_device_is_made_ready_before_it_is_wanted(
    make: Callable[[int], Engine], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []

    def verified(space: Any, manifest: Any, targets: Any) -> tuple[str, list[Any]]:
        done.append(f"verified on {space.device}")
        return "", []

    for module in (sglang_weights, lent_memory):
        monkeypatch.setattr(module, "make_ready", lambda device: done.append(f"ready on {device}"))  # type: ignore[reportUnknownLambdaType]
    monkeypatch.setattr(lent_memory, "verified", verified)
    engine, weights = make(1), Drawn(tmp_path, 1)
    assert done == ["ready on cpu"], "the model's own, before the engine serves"
    asyncio.run(engine.weights.verify(weights.weights))
    assert done[1:] == ["ready on cpu", "verified on cpu"]


def test_what_is_finite_and_becomes_infinity_in_the_engine_is_found(
    make: Callable[[int], Engine], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.modules[__name__], "Model", lambda model=Model: model().half())
    engine, weights = make(1), Drawn(tmp_path, 1)
    model = engine.weights.model_tensors()
    assert set(model.held.values()) == {"float16"} and "skipped" not in model.held
    assert model.targets(TENSORS) == ["float16"] * 5 + [""]
    assert model.targets([Tensor("q", "float16", (4, 6))]) == [], "its own dtype holds what it holds"
    values = torch.from_file(str(weights.path), shared=True, size=48, dtype=torch.float32)
    values[3], values[5] = 65519.0, -65520.0
    assert asyncio.run(engine.weights.verify(weights.weights))[1] == [Finding("embed", "overflow", 1)]


def test_without_a_plan_the_smallest_dtype_of_the_model_counts(
    make: Callable[[int], Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        sys.modules[__name__], "Model", lambda model=Model: model(lambda _model, _name, tensor: tensor + 1).half()
    )
    engine = make(1)
    assert engine.weights.plain
    assert engine.weights.model_tensors().targets(TENSORS) == ["float16"] * 6


def test_a_digest_is_said_of_weights_that_are_held_as_they_were_sent_and_of_no_others(
    make: Callable[[int], Engine], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def said(ranks: int = 1) -> str:
        try:
            return asyncio.run(make(ranks).weights.inspect("digest"))[0]
        except NotComparable as error:
            return str(error)

    assert said() == "not comparable: the engine holds nothing of skipped"
    loaded = [(one.name, one.dtype, one.shape) for one in TENSORS[:-1]]
    monkeypatch.setattr(sglang_process, "_own_load", loaded)
    digest = said()
    assert len(digest) == 32 and said(2) == digest
    module, model = sys.modules[__name__], Model
    monkeypatch.setattr(module, "Model", lambda: model().half())
    assert said() == "not comparable: embed was sent as float32, and the engine holds it as float16"
    monkeypatch.setattr(module, "Model", lambda: model(lambda _model, _name, tensor: tensor + 1))
    assert said() == "not comparable: the load of this model computes: embed: its load computes what it copies"
    engine = make(1)
    engine.idle = [True]
    checkpoint = tmp_path / "model.safetensors"
    library.save_file(dict(drawn(1)[:-1]), checkpoint)
    asyncio.run(engine.weights.load_weights(NewWeights(tuple(TENSORS[:-1]), checkpoint=str(tmp_path)), 1, ""))
    assert len(engine.weights.digest) == 32, "workers that read one checkpoint are compared with each other"


def computed(model: Any, name: str, tensor: Any) -> Any:
    """A load that computes what it copies."""
    return tensor + 1


def rebinding(model: Any, name: str, tensor: Any) -> Any:
    """A load that gives a parameter memory of its own, and computes."""
    if name == "norm":
        model.norm = torch.nn.Parameter(tensor.clone(), requires_grad=False)
    return tensor + 1


def rebinding_by_value(model: Any, name: str, tensor: Any) -> Any:
    """One that cannot be tried without values."""
    return rebinding(model, name, tensor) if tensor.tolist() else None


@pytest.mark.parametrize("graphs", [False, True])
@pytest.mark.parametrize("load", [computed, rebinding, rebinding_by_value])
def test_graphs_that_would_read_old_memory_are_never_left_to_serve(
    make: Callable[[int], Engine], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, load: Any, graphs: bool
) -> None:
    module, model = sys.modules[__name__], Model
    monkeypatch.setattr(module, "Model", lambda: model(load))
    monkeypatch.setattr(Scheduler, "graphs", graphs)
    engine, weights = make(1), Drawn(tmp_path, 1)
    why = "gives norm other memory, and the engine's CUDA graphs would go on reading the old one"
    if graphs and load is rebinding:
        with pytest.raises(EngineError, match=why):
            engine.weights.model_tensors()
        return
    assert engine.weights.model_tensors() and engine.weights.plain
    take = engine.weights.load_weights(weights.weights, 1, weights.digest)
    if graphs and load is rebinding_by_value:
        with pytest.raises(EngineDied, match=why):
            asyncio.run(take)
        return
    asyncio.run(take)
    assert weights.is_in(engine)


def test_the_model_is_looked_through_when_a_group_is_joined_and_not_while_the_engine_stands_still(
    make: Callable[[int], Engine], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, given = make(1), Drawn(tmp_path, 1)
    space = torch.from_file(str(given.path), shared=False, size=layout(TENSORS).nbytes, dtype=torch.uint8)
    looks: list[str] = []

    class Group:
        """Rank 0 has sent all; buckets come in their order."""

        name, device, came = "g", "cpu", 0

        def begin(self, bucket: Any) -> Any:
            bucket.copy_(space[self.came : self.came + bucket.numel()])
            self.came += bucket.numel()
            return SimpleNamespace(order=lambda limit: None, wait=lambda limit: None)  # type: ignore[reportUnknownLambdaType]

    look = LoadPlan._look  # pyright: ignore[reportPrivateUsage]
    monkeypatch.setattr(collective, "join", lambda *_arguments, **_more: Group())  # type: ignore[reportUnknownLambdaType]
    monkeypatch.setattr(LoadPlan, "_look", lambda plan: looks.append("whole") or look(plan))  # type: ignore[reportUnknownLambdaType]

    async def story() -> None:
        await engine.weights.join(Join("g", 2, 1, "address"))
        assert looks == ["whole"]
        await engine.weights.load_weights(NewWeights(tuple(TENSORS), group="g", bucket_bytes=512), 1, "")

    asyncio.run(story())
    assert looks == ["whole"] and given.is_in(engine) and engine.weights.digest == given.digest


def test_other_weights_than_those_that_were_made_ready_are_taken_unprepared(
    make: Callable[[int], Engine], tmp_path: Path
) -> None:
    engine, one, other = make(1), Drawn(tmp_path, 1), Drawn(tmp_path, 2)

    async def story() -> None:
        await engine.weights.prepare_load(one.weights)
        await engine.weights.load_weights(other.weights, 1, other.digest)
        assert other.is_in(engine)
        assert engine.did() == ["prepare", "load"]
        # And what was ready for the one is not asked for again.
        await engine.weights.load_weights(one.weights, 2, one.digest)
        assert [ticket.keys() for ticket in engine.tickets] == [{"do", "regions", "manifest", "answer"}]

    asyncio.run(story())
    assert one.is_in(engine)


@pytest.mark.parametrize("lost", ["let go", "moved"])
def test_weights_that_are_no_longer_prepared_are_loaded_unprepared(
    make: Callable[[int], Engine], tmp_path: Path, lost: str
) -> None:
    engine, weights = make(2), Drawn(tmp_path, 1)

    async def story() -> None:
        await engine.weights.prepare_load(weights.weights)
        for model in engine.models:
            if lost == "moved":
                model.norm.data = model.norm.data.clone()
            else:
                sglang_weights._weights[id(model)].do_release({})  # pyright: ignore[reportPrivateUsage]
        engine.did()
        await engine.weights.load_weights(weights.weights, 1, weights.digest)
        assert [sorted(ticket) for ticket in engine.tickets] == [
            ["answer", "do", "name"],
            ["answer", "do", "manifest", "regions"],
        ]

    asyncio.run(story())
    assert weights.is_in(engine)


def test_nothing_of_a_space_stays_open_once_it_is_let_go_of(make: Callable[[int], Engine], tmp_path: Path) -> None:
    engine, weights = make(1), Drawn(tmp_path, 1)

    async def story() -> None:
        await engine.weights.prepare_load(weights.weights)
        assert engine.holds_open(weights.path)
        await engine.weights.release_buffers()
        assert not engine.holds_open(weights.path)
        await engine.weights.prepare_load(weights.weights)
        await engine.weights.load_weights(weights.weights, 1, weights.digest)
        assert engine.holds_open(weights.path)
        await engine.weights.release_buffers()
        assert not engine.holds_open(weights.path)
        await engine.weights.load_weights(weights.weights, 2, weights.digest)
        assert not engine.holds_open(weights.path)

    asyncio.run(story())


def test_what_cannot_be_made_ready_is_refused_and_leaves_nothing(make: Callable[[int], Engine], tmp_path: Path) -> None:
    engine, weights = make(1), Drawn(tmp_path, 1)
    before = state(engine.models[0])

    async def story() -> None:
        await engine.weights.prepare_load(weights.weights)
        os.rename(weights.path, tmp_path / "gone")
        with pytest.raises(EngineError, match="space-1"):
            await engine.weights.prepare_load(weights.weights)
        assert not engine.holds_open(tmp_path)
        with pytest.raises(EngineError, match="space-1"):
            await engine.weights.load_weights(weights.weights, 1, weights.digest)

    asyncio.run(story())
    assert same(before, state(engine.models[0])) and engine.weights.version == 0
    assert engine.schedulers[0].flushed == 0


def test_a_preparation_that_another_one_overtakes_ends(
    make: Callable[[int], Engine], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, one, other = make(1), Drawn(tmp_path, 1), Drawn(tmp_path, 2)
    monkeypatch.setattr(sglang_weights, "PREPARE_S", 0.0)

    async def story() -> None:
        ready = engine.weights.prepare_load
        overtaken, kept = await asyncio.gather(ready(one.weights), ready(other.weights), return_exceptions=True)
        assert isinstance(overtaken, EngineError) and "was released" in str(overtaken) and isinstance(kept, float)
        engine.tickets.clear()
        await engine.weights.load_weights(other.weights, 1, other.digest)
        assert [ticket.keys() for ticket in engine.tickets] == [{"do", "name", "answer"}]

    asyncio.run(story())
    assert other.is_in(engine)


def test_an_engine_that_is_not_idle_is_asked_again_until_it_is(make: Callable[[int], Engine], tmp_path: Path) -> None:
    engine, weights = make(2), Drawn(tmp_path, 1)
    before = state(engine.models[0])
    asked = 0

    def work() -> None:
        nonlocal asked
        asked += 1
        assert same(before, state(engine.models[0]))
        engine.idle[:] = [asked > 3] * 2

    async def story() -> None:
        await engine.weights.prepare_load(weights.weights)
        engine.before = work
        await engine.weights.load_weights(weights.weights, 1, weights.digest)

    asyncio.run(story())
    assert asked == 4 and weights.is_in(engine)
    assert [scheduler.flushed for scheduler in engine.schedulers] == [2, 2]


def test_an_engine_that_never_gets_idle_keeps_its_weights(
    make: Callable[[int], Engine], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, weights = make(1), Drawn(tmp_path, 1)
    before = state(engine.models[0])
    engine.idle = [False]
    monkeypatch.setattr(sglang_updates, "IDLE_S", 0.02)
    with pytest.raises(EngineError, match="requests are running"):
        asyncio.run(engine.weights.load_weights(weights.weights, 1, weights.digest))
    assert same(before, state(engine.models[0])) and engine.weights.version == 0


def test_ranks_that_receive_different_bytes_are_the_end_of_the_engine(
    make: Callable[[int], Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a direct transfer no stager has looked at the bytes."""

    def received(group: Any, manifest: Any, bucket_bytes: int, digest: Any, own: bool) -> Iterator[tuple[str, Any]]:
        digest.add(torch.full((256,), group.says, dtype=torch.uint8), 0)
        yield from drawn(1)

    monkeypatch.setattr(sglang_weights, "received", received)
    engine = make(2)
    weights = NewWeights(tuple(TENSORS), group="g", bucket_bytes=256)

    def load(*says: int) -> str:
        for model, said in zip(engine.models, says, strict=True):
            member = sglang_weights._weights[id(model)]._member  # pyright: ignore[reportPrivateUsage]
            member.group = SimpleNamespace(name="g", says=said)
        asyncio.run(engine.weights.load_weights(weights, 1, ""))
        return engine.weights.digest

    assert load(1, 1) == load(1, 1) != load(2, 2)
    with pytest.raises(EngineDied, match="received different weights"):
        load(1, 2)


def test_ranks_that_differ_in_what_they_did_are_the_end_of_the_engine(make: Callable[[int], Engine], tmp_path: Path) -> None:
    engine, weights = make(2), Drawn(tmp_path, 1)
    engine.idle[1] = False
    with pytest.raises(EngineDied, match="requests are running"):
        asyncio.run(engine.weights.load_weights(weights.weights, 1, weights.digest))


def test_new_weights_with_caches_of_the_old_ones_are_the_end_of_the_engine(
    make: Callable[[int], Engine], tmp_path: Path
) -> None:
    engine, weights = make(1), Drawn(tmp_path, 1)
    answers = iter([True, True, False, False])
    engine.schedulers[0].says = lambda: next(answers)
    with pytest.raises(EngineDied, match="caches of the old ones"):
        asyncio.run(engine.weights.load_weights(weights.weights, 1, weights.digest))


def test_a_scheduler_that_cannot_be_told_what_to_empty_is_flushed_as_well() -> None:
    class Made(OlderScheduler):
        pass

    sglang_scheduler.note_scheduler(Made)
    made = Made(lambda: True)
    assert sglang_scheduler.flush_caches() and made.flushed == 1
    made.says = lambda: False
    assert not sglang_scheduler.flush_caches()


def test_of_groups_that_are_joined_at_a_time_the_last_one_asked_for_is_kept(
    make: Callable[[int], Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An update may be given up while its group forms, and the next one's forms first."""

    class Group:
        def __init__(self, name: str) -> None:
            self.name, self.aborted = name, False

        def abort(self) -> None:
            self.aborted = True

    groups = {name: Group(name) for name in ("first", "second")}
    begun, may = threading.Event(), threading.Event()

    def join(address: str, name: str, world: int, rank: int, **options: Any) -> Group:
        if name == "first":
            begun.set()
            assert may.wait(PATIENCE_S)
        return groups[name]

    monkeypatch.setattr(collective, "join", join)
    engine = make(1)

    async def story() -> None:
        first = asyncio.create_task(engine.weights.join(Join("first", 2, 1, "nowhere")))
        assert await asyncio.to_thread(begun.wait, PATIENCE_S)
        await engine.weights.join(Join("second", 2, 1, "nowhere"))
        may.set()
        with pytest.raises(EngineError, match="group first: the engine has joined another group"):
            await first
        await engine.weights.join(Join("second", 2, 1, "nowhere"))  # it is in it

    asyncio.run(story())
    assert (groups["first"].aborted, groups["second"].aborted) == (True, False)


def test_weights_are_saved_by_a_thread_and_not_where_others_were_loaded_meanwhile(
    make: Callable[..., Engine], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, begun, go_on = make(ranks=2), threading.Event(), threading.Event()

    class Sharded:
        @staticmethod
        def save_model(model: Any, path: str, pattern: str | None, max_size: int) -> None:
            begun.set()
            assert go_on.wait(PATIENCE_S) and pattern is None and max_size > 1 << 30
            assert model.state_dict().keys() == engine.models[0].state_dict().keys()
            if "full" in path:
                raise OSError("no space left")

    monkeypatch.setitem(sys.modules, modules.LOADER, SimpleNamespace(ShardedStateLoader=Sharded))

    async def save(path: str, load: bool) -> str:
        begun.clear()
        go_on.clear()
        saved = asyncio.ensure_future(engine.weights.save(path))
        assert await asyncio.to_thread(begun.wait, PATIENCE_S)
        if load:
            await engine.weights.load_weights(NewWeights(), 5, "d5")
        go_on.set()
        return await saved

    assert asyncio.run(save("a", False)) == "sharded_state" and engine.did() == ["save"]
    with pytest.raises(EngineError, match="OSError: no space left"):
        asyncio.run(save("full", False))
    with pytest.raises(EngineError, match="other weights were loaded meanwhile"):
        asyncio.run(save("a", True))
    assert asyncio.run(save("a", False)) == "sharded_state"


def test_weights_that_the_engine_holds_in_another_form_are_not_saved(make: Callable[..., Engine]) -> None:
    engine = make()
    engine.models[0].use_intel_amx_backend = True
    with pytest.raises(EngineError, match="not saved: its weights are packed for AMX"):
        asyncio.run(engine.weights.save("a"))
