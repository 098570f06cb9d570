"""What a trainer may give to a publisher, and the bytes that become of it."""

import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from enginepool.errors import BadRequest
from enginepool.protocol.layout import layout
from enginepool.protocol.manifest import Tensor, difference
from enginepool.trainer import bucket_stream
from enginepool.trainer.bucket_stream import BucketStream
from enginepool.trainer.buffers import Buffers
from enginepool.trainer.tensor_feed import Stopped
from enginepool.trainer.tensors import SendPlan, Source, make_plan
from enginepool.trainer.trainer_ranks import TrainerRanks
from enginepool.transfer.digest import Digest, digest_of, views


def names(plan: SendPlan) -> list[str]:
    """The names that are announced; what comes has to have the same."""
    announced = [tensor.name for tensor in plan.manifest]
    assert [name for name, _ in plan.tensors()] == announced
    return announced


class Tied(torch.nn.Module):
    """A head whose weight is that of the embedding, and a twin of another shape of the same bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.lm_head = torch.nn.Linear(4, 10, bias=False)
        self.embed = torch.nn.Embedding(10, 4)
        self.lm_head.weight = self.embed.weight
        self.register_buffer("flat", self.embed.weight.detach().view(-1))


def test_a_module_is_its_state_with_names_dtypes_and_shapes() -> None:
    net = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3)).to(torch.bfloat16)
    plan = make_plan(net)
    assert plan.manifest[0] == Tensor("0.weight", "bfloat16", (3, 2))
    assert plan.manifest[-1] == Tensor("1.num_batches_tracked", "int64", ())
    assert names(plan) == list(net.state_dict())


def test_tied_tensors_are_sent_once_under_the_first_name_or_the_one_that_the_model_keeps() -> None:
    net = Tied()
    assert names(make_plan(net)) == ["flat", "lm_head.weight"]
    net._tied_weights_keys = ["lm_head.weight"]  # type: ignore[assignment]
    assert names(make_plan(net)) == ["flat", "embed.weight"]
    assert names(make_plan(net.state_dict())) == ["flat", "lm_head.weight"]


def test_prefixes_of_wrappers_are_taken_off() -> None:
    one = torch.zeros(1)
    wrapped = {"module._fsdp_wrapped_module.a._checkpoint_wrapped_module.w": one, "module._orig_mod.b": one.clone()}
    assert names(make_plan(wrapped)) == ["a.w", "b"]
    assert names(make_plan({"module.a": one, "b": one.clone()})) == ["module.a", "b"]


def test_a_hook_renames_leaves_out_and_cuts() -> None:
    def rename(name: str, tensor: Any) -> Any:
        if name == "experts":
            return [(f"experts.{i}.w", tensor[i]) for i in range(tensor.shape[0])]
        return None if name == "rope" else f"model.{name}"

    source = {"a": torch.ones(2), "rope": torch.ones(3), "experts": torch.arange(6.0).view(2, 3)}
    plan = make_plan(source, rename=rename)
    assert plan.manifest == [
        Tensor("model.a", "float32", (2,)),
        Tensor("experts.0.w", "float32", (3,)),
        Tensor("experts.1.w", "float32", (3,)),
    ]
    assert [tensor.tolist() for _, tensor in plan.tensors()] == [[1, 1], [0, 1, 2], [3, 4, 5]]


@pytest.mark.parametrize(
    ("returned", "said"),
    [
        (3, "returned an int; a name, None to leave the tensor out, or (name, tensor) pairs"),
        (torch.ones(2), "returned a Tensor; a name"),
        ([3], "its entry 0 is an int; (name, tensor)"),
        ([("b", torch.ones(2)), ("c", 4)], "its entry 1 is a tuple; (name, tensor)"),
    ],
)
def test_what_a_rename_hook_may_not_return_is_refused(returned: Any, said: str) -> None:
    with pytest.raises(BadRequest) as refused:
        make_plan({"a": torch.ones(2)}, rename=lambda name, tensor: returned)
    assert str(refused.value).startswith(f"rename('a', tensor): {said}") and refused.value.field == "rename"


def test_a_peft_model_is_renamed_as_the_error_says() -> None:
    def rename(name: str, _: Any) -> str | None:
        return None if "lora_" in name else name.removeprefix("base_model.model.").replace(".base_layer", "")

    source = {
        "base_model.model.model.layers.0.q_proj.base_layer.weight": torch.ones(2, 2),
        "base_model.model.model.layers.0.q_proj.lora_A.default.weight": torch.ones(1, 2),
        "base_model.model.model.layers.0.q_proj.lora_B.default.weight": torch.ones(2, 1),
        "base_model.model.model.norm.weight": torch.ones(2),
    }
    names = [tensor.name for tensor in make_plan(source, rename=rename).manifest]
    assert names == ["model.layers.0.q_proj.weight", "model.norm.weight"]
    misfit = difference(make_plan(source).manifest, make_plan(source, rename=rename).manifest)
    assert misfit is not None and "PEFT" in misfit[1]
    assert difference(make_plan(source, rename=rename).manifest, make_plan(source, rename=rename).manifest) is None


def test_floats_are_converted_before_they_are_gathered_and_other_numbers_stay() -> None:
    gathered: list[tuple[str, torch.dtype]] = []

    def gather(name: str, tensor: Any) -> Any:
        gathered.append((name, tensor.dtype))
        return tensor

    plan = make_plan({"a": torch.ones(2), "n": torch.ones(2, dtype=torch.int64)}, dtype=torch.bfloat16, gather=gather)
    assert [tensor.dtype for tensor in plan.manifest] == ["bfloat16", "int64"]
    assert gathered == []
    assert [tensor.dtype for _, tensor in plan.tensors()] == [torch.bfloat16, torch.int64]
    assert gathered == [("a", torch.bfloat16), ("n", torch.int64)]


def pairs() -> Iterator[tuple[str, torch.Tensor]]:
    yield "a", torch.ones(2)
    yield "b", torch.zeros(3, 1)


@pytest.mark.parametrize(
    ("source", "manifest"),
    [
        (pairs, None),
        (pairs(), None),
        (list(pairs()), None),
        (pairs, [("a", torch.float32, [2]), ("b", "float32", (3, 1))]),
        (pairs(), [Tensor("a", "float32", (2,)), Tensor("b", "float32", (3, 1))]),
        (list(pairs()), [("a", "torch.float32", [2]), ("b", "float32", [3, 1])]),
    ],
)
def test_pairs_come_from_anything_that_gives_them(source: Source, manifest: Any) -> None:
    plan = make_plan(source, manifest=manifest)
    assert plan.manifest == [Tensor("a", "float32", (2,)), Tensor("b", "float32", (3, 1))]
    assert names(plan) == ["a", "b"]


def test_an_iterator_with_a_manifest_is_not_read_before_its_turn() -> None:
    source = pairs()
    make_plan(source, manifest=[("a", torch.float32, [2])])
    assert next(source)[0] == "a"


@pytest.mark.parametrize(
    ("source", "field", "words"),
    [
        (7, "source", "an int; a torch.nn.Module"),
        ({"a": [1, 2]}, "source[a]", "a list; a tensor"),
        ({"a": torch.zeros(1, dtype=torch.complex64)}, "source[a]", "dtype complex64 cannot be sent"),
        ([("a", torch.zeros(1)), ("a", torch.ones(1))], "source[a]", "named twice"),
        ({}, "source", "at least one tensor"),
        ({1: torch.zeros(1)}, "source", "its key 1 is an int"),
        ("model.safetensors", "source", "a str; a torch.nn.Module"),
        ([torch.zeros(2)], "source", "its entry 0 is a Tensor"),
        ([("a", torch.zeros(1)), ("b",)], "source", "its entry 1 is a tuple"),
        (lambda: [(1, torch.zeros(1))], "source", "its entry 0 is a tuple"),
        ({"a": torch.zeros(2).to_sparse()}, "source[a]", "layout torch.sparse_coo"),
        ({"a\udc80": torch.zeros(2)}, "source", "not UTF-8"),
    ],
)
def test_what_cannot_be_sent_is_refused_by_name(source: Source, field: str, words: str) -> None:
    with pytest.raises(BadRequest, match=words.replace("[", r"\[")) as caught:
        make_plan(source)
    assert caught.value.field == field


def test_a_tensor_without_values_is_refused_by_name_when_its_turn_comes() -> None:
    source = {"a": torch.zeros(2, device="meta")}
    with pytest.raises(BadRequest, match="meta, which has no values") as caught:
        list(make_plan(source).tensors())
    assert caught.value.field == "source[a]"
    (found,) = make_plan(source, gather=lambda name, tensor: torch.ones(tensor.shape)).tensors()
    assert found[1].tolist() == [1, 1], "a hook may know where they are"


NO_MANIFESTS: list[Any] = [5, [("w", "float32")], [("w", "float32", 2)], [("w", "float32", ["x"])], ["w"]]


@pytest.mark.parametrize("manifest", NO_MANIFESTS)
def test_a_manifest_that_is_none_is_refused(manifest: Any) -> None:
    with pytest.raises(BadRequest, match="manifest: ") as caught:
        make_plan({"w": torch.zeros(2)}, manifest=manifest)
    assert caught.value.field == "manifest"


# --- bytes -------------------------------------------------------------------------------------------------------------


class Tape:
    """A group that keeps what is broadcast; a buffer that is written before its broadcast is over spoils the tape."""

    def __init__(self) -> None:
        self.buckets: list[Any] = []
        self.finished = False

    def begin(self, bucket: Any) -> "Late":
        self.buckets.append(None)
        return Late(self, len(self.buckets) - 1, bucket)

    def finish(self, timeout_s: float) -> None:
        assert timeout_s == 5.0 and all(bucket is not None for bucket in self.buckets)
        self.finished = True


class Late:
    """Reads the buffer only when it is waited for, as a slow network would."""

    def __init__(self, tape: Tape, place: int, bucket: Any) -> None:
        self.tape, self.place, self.bucket = tape, place, bucket

    def order(self, timeout_s: float) -> None:
        self.wait(timeout_s)

    def wait(self, timeout_s: float) -> None:
        assert timeout_s == 5.0
        if self.tape.buckets[self.place] is None:
            self.tape.buckets[self.place] = self.bucket.clone()


def in_bytes(tensor: Any) -> Any:
    return tensor.contiguous().view(-1).view(torch.uint8)


def send(
    plan: SendPlan,
    bucket_bytes: int,
    tape: Tape,
    progress: list[int] | None = None,
    stop: int = 10**9,
    buffers: Buffers | None = None,
) -> tuple[str, int]:
    told: list[int] = []
    buffers = buffers or Buffers(torch.device("cpu"))
    sending = BucketStream(plan, buffers, bucket_bytes, TrainerRanks(), stopped=lambda: len(tape.buckets) >= stop)
    sending.prepare()
    assert tape.buckets == []
    sent = sending.send(tape, 5.0, told.append if progress is None else progress.append)  # type: ignore[arg-type]
    assert tape.finished
    return sent


@pytest.mark.parametrize("seed", range(60))
def test_the_space_holds_every_tensor_and_its_digest_is_that_of_what_was_sent(seed: int) -> None:
    rng = random.Random(seed)
    dtypes = [torch.float32, torch.bfloat16, torch.int8, torch.bool, torch.float64, torch.float8_e4m3fn]
    source: dict[str, Any] = {}
    for i in range(rng.randint(1, 12)):
        shape = [rng.choice([0, 1, 3, 64, 300]) for _ in range(rng.choice([0, 1, 1, 2]))]
        tensor = torch.randint(0, 2, shape).to(rng.choice(dtypes)) if shape else torch.tensor(float(i))
        source[f"t{i}"] = tensor.t() if tensor.dim() == 2 and rng.random() < 0.5 else tensor
    plan, tape, progress = make_plan(list(source.items())), Tape(), list[int]()
    digest, sent = send(plan, rng.choice([256, 512, 4096, 1 << 20]), tape, progress)
    total = layout(plan.manifest).nbytes
    assert sent == total
    assert progress == sorted(progress)
    if total:
        space = torch.cat(tape.buckets)
        assert digest == digest_of(space)
        for (name, tensor), view in zip(source.items(), views(space, plan.manifest), strict=True):
            assert (view.dtype, view.shape) == (tensor.dtype, tensor.shape)
            assert torch.equal(in_bytes(view), in_bytes(tensor)), name


@pytest.mark.parametrize(
    ("manifest", "words"),
    [
        ([("a", "float32", [2]), ("c", "float32", [3, 1])], "expected c as announced, got b"),
        ([("a", "float32", [2]), ("b", "float32", [1, 3])], r"b: expected the announced shape \[1, 3\], got \[3, 1\]"),
        ([("a", "bfloat16", [2]), ("b", "float32", [3, 1])], "a: expected the announced dtype bfloat16, got float32"),
        ([("a", "float32", [2])], "b follows the last announced tensor"),
        ([("a", "float32", [2]), ("b", "float32", [3, 1]), ("c", "float32", [1])], "ended after 2 of 3 tensors; c is missing"),
    ],
)
def test_a_source_that_gives_other_tensors_than_were_announced_is_stopped(manifest: Any, words: str) -> None:
    with pytest.raises(BadRequest, match=words):
        send(make_plan(pairs, manifest=manifest), 4096, Tape())


@pytest.mark.parametrize("ahead", [True, False])
def test_a_source_with_one_buffer_for_all_its_tensors_is_stopped(ahead: bool) -> None:
    buffer = torch.zeros(8)

    def reused() -> Iterator[tuple[str, Any]]:
        for number, name in enumerate("abc"):
            buffer.fill_(number)
            yield name, buffer.view(2, 4)

    described = [(name, "float32", (2, 4)) for name in "abc"]
    with pytest.raises(BadRequest, match="source: b lies in the memory of a, which is not sent yet") as caught:
        send(make_plan(reused()) if ahead else make_plan(reused, manifest=described), 1024, Tape())
    assert caught.value.field == "source[a]"


def test_memory_that_did_not_change_may_be_given_under_two_names_and_what_was_sent_may_be_written_to() -> None:
    both, halves = torch.ones(256), torch.zeros(512)

    def source() -> Iterator[tuple[str, Any]]:
        yield "a", both
        yield "b", both
        for number in range(2):
            half = halves[number * 256 : number * 256 + 256]
            half.fill_(number + 2)
            yield f"half.{number}", half
        for number in range(4, 12):
            both.fill_(number)
            yield f"c.{number}", both

    described = [(name, "float32", (256,)) for name in ("a", "b", "half.0", "half.1", *(f"c.{n}" for n in range(4, 12)))]
    tape = Tape()
    send(make_plan(source, manifest=described), 1024, tape)
    numbers: Any = torch.cat(tape.buckets).view(torch.float32)[::256]
    assert numbers.tolist() == [1.0, 1.0, *map(float, range(2, 12))]


def test_what_is_kept_from_one_update_serves_the_next_with_other_tensors_and_other_shapes() -> None:
    buffers = Buffers(torch.device("cpu"))
    rng = random.Random(4)
    for shapes in [[(30, 7), (5,), (700,)], [(30, 7), (5,), (700,)], [(3, 3), (1000, 3)], [(30, 7), (5,), (700,)], [()]]:
        source = {f"t{i}": torch.full(shape, rng.random(), dtype=torch.bfloat16) for i, shape in enumerate(shapes)}
        plan, tape = make_plan(source), Tape()
        digest, _ = send(plan, 512, tape, buffers=buffers)
        space = torch.cat(tape.buckets)
        assert digest == digest_of(space)
        for tensor, view in zip(source.values(), views(space, plan.manifest), strict=True):
            assert torch.equal(view, tensor)


def test_tensors_that_no_wide_word_can_be_read_from_are_sent_whole() -> None:
    base = torch.arange(64, dtype=torch.int16).view(torch.bfloat16)
    odd = torch.arange(65, dtype=torch.uint8)
    source = {"aside": base[1:9], "tall": base.view(8, 8).t(), "byte": odd[1:], "strided": base[::2], "nan": base.neg()[:4]}
    source["nan"].view(torch.int16).copy_(torch.tensor([0x7F81, -1, 0x7FC1, 3]))
    plan, tape = make_plan(list(source.items())), Tape()
    send(plan, 256, tape)
    for tensor, view in zip(source.values(), views(torch.cat(tape.buckets), plan.manifest), strict=True):
        assert torch.equal(in_bytes(view), in_bytes(tensor))


def test_no_more_is_read_ahead_than_two_buckets_hold() -> None:
    read: list[str] = []

    def source() -> Iterator[tuple[str, Any]]:
        for i in range(6):
            read.append(f"t{i}")
            yield f"t{i}", torch.full((64,), float(i))

    plan = make_plan(source(), manifest=[(f"t{i}", "float32", [64]) for i in range(6)])
    tape = Tape()
    sending = BucketStream(plan, Buffers(torch.device("cpu")), 256, TrainerRanks(), stopped=lambda: False)
    sending.prepare()
    assert read == ["t0", "t1"]
    sending.send(tape, 5.0, lambda _sent: None)  # type: ignore[arg-type]
    sent = torch.cat(tape.buckets).view(torch.float32)
    assert torch.equal(sent[::64], torch.arange(6.0))


def test_a_broadcast_waits_for_no_digest_but_those_that_the_next_filling_stands_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []

    class Noted(Digest):
        def add(self, bucket: Any, at: int) -> None:
            events.append(f"digest {at // 256}")
            super().add(bucket, at)

        def text(self) -> str:
            events.append("text")
            return super().text()

    class Way(Late):
        def order(self, timeout_s: float) -> None:
            events.append(f"order {self.place}")
            super().wait(timeout_s)

        def wait(self, timeout_s: float) -> None:
            events.append(f"wait {self.place}")
            super().wait(timeout_s)

    class Group(Tape):
        def begin(self, bucket: Any) -> Late:
            events.append(f"begin {len(self.buckets)}")
            late = super().begin(bucket)
            return Way(self, late.place, bucket)

    monkeypatch.setattr(bucket_stream, "Digest", Noted)
    plan = make_plan({f"t{i}": torch.full((64,), float(i + 1)) for i in range(4)})
    tape = Group()
    digest, _ = send(plan, 256, tape)
    assert events == [
        "digest 0", "digest 1", "begin 0", "begin 1",
        "order 0", "begin 2", "digest 2", "wait 0",
        "order 1", "begin 3", "digest 3", "wait 1",
        "text", "wait 2", "wait 3",
    ]  # fmt: skip
    assert digest == digest_of(torch.cat(tape.buckets))


def test_an_update_that_was_given_up_sends_no_further_bucket() -> None:
    tape = Tape()
    with pytest.raises(Stopped):
        send(make_plan({"a": torch.zeros(1000)}), 256, tape, stop=3)
    assert len(tape.buckets) == 3


def test_an_update_that_is_given_up_while_its_source_is_read_leaves_the_buffers_to_the_next_one() -> None:
    buffers, over = Buffers(torch.device("cpu")), list[BucketStream]()
    weights = {f"t{i}": torch.full((64,), float(i + 2)) for i in range(4)}

    def stuck() -> Iterator[tuple[str, Any]]:
        yield "t0", torch.ones(64)
        # The next update has begun: no call waits for this answer.
        over.append(BucketStream(make_plan(weights), buffers, 256, TrainerRanks(), stopped=lambda: False))
        over[0].prepare()
        yield "t1", torch.ones(64)

    plan = make_plan(stuck, manifest=[(f"t{i}", "float32", [64]) for i in range(2)])
    with pytest.raises(Stopped):
        BucketStream(plan, buffers, 256, TrainerRanks(), stopped=lambda: bool(over)).prepare()
    tape = Tape()
    over[0].send(tape, 5.0, lambda _sent: None)  # type: ignore[arg-type]
    assert torch.equal(torch.cat(tape.buckets), torch.cat([in_bytes(tensor) for tensor in weights.values()]))
