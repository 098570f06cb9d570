"""Images, videos and audio of prompts: how arguments become frames, what a worker is sent, and what a medium costs."""

import base64
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from enginepool import errors
from enginepool.client.media import encode_media, media_names
from enginepool.client.session.charges import charge_of
from enginepool.config import Limits
from enginepool.coordinator.core import events as ev
from enginepool.coordinator.operations.generate import GENERATE, GenerateWork
from enginepool.coordinator.requests.fitting import refusal as refusal_of
from enginepool.protocol.errors import WireError
from enginepool.protocol.media import LEAST_TOKENS
from enginepool.protocol.messages import (
    MAX_MEDIA,
    MAX_MEDIUM_BYTES,
    MAX_MEDIUM_NAME,
    Capabilities,
    ErrorReply,
    FrameSpec,
    Generate,
    Medium,
    Ready,
    Sampling,
    StartGeneration,
)
from enginepool.workers.codec import decode_generation
from enginepool.workers.engine import TaskMedium
from tests.core.generations import GeneratingPool, outputs
from tests.core.machines import EPOCH, Sent, config
from tests.core.test_client_generations import Streaming, request

#: 8 slots, and room for two prompts with a medium each
CAN = Capabilities(
    "causal", 1000, 100, batch_tokens=2200, batch_rows=8, inflight_tokens=2200, inflight_rows=8, operations=("generate",),
    features=("image", "audio", "media_url"),
)  # fmt: skip
IMAGES = {"images": [[b"first", b"second"], None, b"third"], "audio": [None, None, b"sound"]}


def message(options: dict[str, Any] | None = None, prompts: int = 3, n: int = 1, stream: bool = False) -> Any:
    """A request of prompts of three ids, each of which has at most one token of output more than its number; its frames."""
    ids, lengths = np.arange(3 * prompts, dtype=np.int32), np.full(prompts, 3, np.uint32)
    specs = [FrameSpec("items", "int32", ids.shape), FrameSpec("item_lengths", "uint32", lengths.shape)]
    media, (more, frames) = encode_media(IMAGES if options is None else options, prompts, single=False)
    asked = Generate(1, [*specs, *more], n=n, sampling=Sampling(max_new_tokens=8), stream=stream, media=media)
    return asked, [ids.tobytes(), lengths.tobytes(), *frames]


def work(*args: Any, **fields: Any) -> GenerateWork:
    return GENERATE.open(*message(*args, **fields))


def started(one: Sent) -> tuple[StartGeneration, list[TaskMedium]]:
    """A task, with the media that its worker reads of its frames."""
    assert isinstance(one.message, StartGeneration)
    return one.message, list(decode_generation(one.message, tuple(one.frames)).media)


# --- arguments ----------------------------------------------------------------------------------------------------------


def test_media_are_sent_in_the_order_of_their_prompts_as_bytes_urls_and_paths() -> None:
    data = "data:image/png;base64," + base64.b64encode(b"decoded").decode()
    options = {"audio": ["https://a.b/c.wav", None], "images": [[bytearray(b"raw"), data], Path("x/é.png")]}
    media, (specs, frames) = encode_media(options, 2, single=False)
    assert media == [
        Medium(0, "image"), Medium(0, "image"), Medium(0, "audio", "url"), Medium(1, "image", "path"),
    ]  # fmt: skip
    assert frames[0] == b"rawdecodedhttps://a.b/c.wav" + "x/é.png".encode()
    assert np.frombuffer(frames[1], np.uint32).tolist() == [3, 7, 17, 8]
    assert specs == [FrameSpec("media", "uint8", (35,)), FrameSpec("media_lengths", "uint32", (4,))]


def test_one_prompt_without_a_list_has_its_media_without_a_list() -> None:
    assert encode_media({"images": b"a"}, 1, single=True)[0] == [Medium(0, "image")]
    assert len(encode_media({"images": [b"a", b"b"], "videos": b"c"}, 1, single=True)[0]) == 3
    assert encode_media({"images": None, "audio": []}, 1, single=True) == ([], ([], ()))


@pytest.mark.parametrize(
    ("images", "field", "said"),
    [
        ([b"a"], "images", "expected 2 entries (one per prompt), got 1"),
        (b"a", "images", "a list with an entry for each prompt"),
        ([b"a", 5], "images[1]", "an int; bytes, a URL"),
        ([None, [b"a", None]], "images[1][1]", "None; bytes, a URL"),
        (["/etc/passwd", b"a"], "images[0]", "'/etc/passwd'; bytes, a URL"),
        (["file:///etc/passwd", b"a"], "images[0]", "bytes, a URL"),
        (["data:image/png;base64,a b", b"a"], "images[0]", "that is no base64"),
        (["data:text/plain,abc", b"a"], "images[0]", "a data: URL has base64"),
        ([b"", b"a"], "images[0]", f"0 bytes; 1 to {MAX_MEDIUM_BYTES}"),
        ([bytes(MAX_MEDIUM_BYTES + 1), b"a"], "images[0]", f"{MAX_MEDIUM_BYTES + 1} bytes; 1 to"),
        (["https://" + "a" * MAX_MEDIUM_NAME, b"a"], "images[0]", f"bytes of url; 1 to {MAX_MEDIUM_NAME}"),
        ([Path("a\0b"), b"a"], "images[0]", "cannot be printed"),
        ([[b"a"] * MAX_MEDIA, b"a"], "images", f"at most {MAX_MEDIA} in one request"),
    ],
)  # fmt: skip
def test_what_is_no_medium_is_refused_by_its_place(images: Any, field: str, said: str) -> None:
    with pytest.raises(errors.BadRequest) as refused:
        encode_media({"images": images}, 2, single=False)
    assert refused.value.field == field and said in str(refused.value) and str(refused.value).startswith(field)


def test_an_error_of_the_coordinator_calls_a_medium_as_the_caller_does() -> None:
    names = media_names(IMAGES, 3, single=False)
    assert list(names.values()) == ["images[0][0]", "images[0][1]", "images[2]", "audio[2]"]
    failure = ErrorReply("bad_request", "media[3]: the workers of this group take no audio", id=1, field="media[3]")
    said = errors.error_from(failure, names)
    assert said.field == "audio[2]" and str(said) == "audio[2]: the workers of this group take no audio"
    assert list(media_names({"images": [b"a"], "videos": b"b"}, 1, single=True).values()) == ["images[0]", "videos"]


# --- what it costs ------------------------------------------------------------------------------------------------------


def test_client_and_coordinator_count_the_same_bytes_for_it() -> None:
    asked, frames = message()
    charge = GENERATE.open(asked, frames).charge
    assert charge is not None and charge[1] == charge_of(asked, frames)
    bare = GENERATE.open(*message({}))
    assert bare.charge is not None and charge[1] - bare.charge[1] >= len(b"firstsecondthirdsound") + 4 * 4


def test_another_image_under_the_same_id_is_another_request() -> None:
    assert work().digest == work().digest != work({"images": [[b"first", b"secone"], None, b"third"]}).digest


# --- which workers take it ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"videos": [None, b"v", None]}, "media[0]: the workers of this group take no video"),
        ({"images": [b"a", Path("b"), None]}, "media[1]: a path, and the workers of this group read none: media_root"),
    ],
)
def test_a_kind_or_a_source_that_no_worker_takes_is_refused_before_the_queue(options: Any, said: str) -> None:
    refusal = refusal_of(work(options), CAN)
    assert isinstance(refusal, WireError) and refusal.code == "bad_request" and refusal.message.startswith(said)
    assert refusal_of(work({"images": ["https://a/b", b"a", None]}), CAN) is None


# --- what workers are sent ----------------------------------------------------------------------------------------------


def test_each_task_has_the_media_of_its_prompt_alone() -> None:
    pool = GeneratingPool()
    for name in ("w", "v", "u"):
        pool.worker(name, can=CAN)
    pool.submit(pool.client(), 1, work())
    by_prompt = [media for _, media in map(started, sorted(pool.tasks(), key=lambda one: bytes(one.frames[0])))]
    assert by_prompt == [
        [TaskMedium("image", "bytes", b"first"), TaskMedium("image", "bytes", b"second")],
        [],
        [TaskMedium("image", "bytes", b"third"), TaskMedium("audio", "bytes", b"sound")],
    ]


def test_a_medium_reserves_tokens_and_one_that_is_larger_than_all_room_runs_alone() -> None:
    pool = GeneratingPool()
    link, client = pool.worker(can=CAN), pool.client()
    for number in (1, 2, 3):
        pool.submit(client, number, work({"images": [b"a"]}, 1))
    first, second = pool.tasks()  # the third has no room
    worker = pool.machine.core.groups["g"].workers["w"]
    assert worker.cost == 2 * (3 + 8 + LEAST_TOKENS)
    sent = pool.step(link, (first, 0, 0, [5], "stop"), (second, 0, 0, [5], "stop"))
    [third] = pool.tasks(sent)
    assert pool.machine.core.groups["g"].workers["w"].cost == 3 + 8 + LEAST_TOKENS
    pool.step(link, (third, 0, 0, [5], "stop"))
    pool.submit(client, 9, work({"images": [[b"a"] * 50]}, 1))
    assert len(pool.tasks()) == 4 and worker.cost == CAN.inflight_tokens


def test_samples_share_the_room_of_their_media_and_give_their_own_back() -> None:
    pool = GeneratingPool()
    link = pool.worker(can=CAN)
    [task] = pool.tasks(pool.submit(pool.client(), 1, work({"images": [b"a"]}, 1, 4)))
    worker = pool.machine.core.groups["g"].workers["w"]
    for done in range(3):
        assert worker.cost == 3 + LEAST_TOKENS + (4 - done) * 8
        pool.step(link, (task, done, 0, [5], "stop"))
    pool.step(link, (task, 3, 0, [5], "stop"))
    assert worker.cost == 0


def test_the_usage_of_an_answer_has_the_tokens_that_media_took_in_the_engine() -> None:
    pool = GeneratingPool()
    link, client = pool.worker(can=CAN), pool.client()
    pool.submit(client, 1, work({"images": [b"a", None]}, 2))
    first, second = pool.tasks()
    told: Any = {"cached": [(0, 40), (1, 3)], "lengths": [(0, 50)]}
    sent = pool.step(link, (first, 0, 0, [5], "stop"), (second, 0, 0, [5], "stop"), **told)
    usage = outputs(sent)[1][0].usage
    assert (usage.prompt_tokens, usage.cached_tokens) == (50 + 3, 40 + 3)


@pytest.mark.parametrize(("length", "cached"), [(0, 0), (CAN.context + 1, 0), (50, 51)])
def test_a_worker_whose_prompt_has_a_length_that_cannot_be_is_lost(length: int, cached: int) -> None:
    pool = GeneratingPool()
    link = pool.worker(can=CAN)
    [task] = pool.tasks(pool.submit(pool.client(), 1, work({"images": [b"a"]}, 1)))
    assert not pool.machine.core.groups["g"].workers["w"].lost
    pool.step(link, (task, 0, 0, [5], ""), cached=[(0, cached)], lengths=[(0, length)])
    assert "w" not in pool.machine.core.groups["g"].workers


# --- what is interrupted ------------------------------------------------------------------------------------------------


EXACT = msgspec.structs.replace(CAN, features=(*CAN.features, "image_ids"))


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("options", "can", "goes_on"),
    [({"images": [b"a"]}, CAN, False), ({"images": [b"a"]}, EXACT, True), ({"audio": [b"a"]}, EXACT, False)],
)
def test_a_sequence_with_media_goes_on_where_ids_are_kept_and_else_begins_again_or_ends(
    options: Any, can: Capabilities, goes_on: bool, stream: bool
) -> None:
    pool = GeneratingPool()
    link = pool.worker("w", can=can)
    [task] = pool.tasks(pool.submit(pool.client(), 1, work(options, 1, stream=stream)))
    pool.step(link, (task, 0, 0, [5, 6], ""))
    pool.worker("v", can=can)
    sent = pool.do(ev.WorkerBroken(0, link, "it broke"))
    if stream and not goes_on:
        [(answer, [tokens])] = outputs(sent).values()
        assert tokens == [5, 6] and answer.ended[0].reason == "interrupted"
        return
    [again] = pool.tasks(sent)
    start, media = started(again)
    has = 2 if goes_on else 0
    assert (start.at, start.frames[0].shape, [one.data for one in media]) == (has, (3 + has,), [b"a"])


def test_copies_of_media_wait_until_a_worker_has_read_those_before() -> None:
    size = 1 << 20
    pool = GeneratingPool(config(limits=Limits(buffer_bytes=5 * size)))
    can = msgspec.structs.replace(EXACT, inflight_tokens=1 << 14)
    first = pool.worker("w", can=can)
    [task] = pool.tasks(pool.submit(pool.client(), 1, work({"images": [bytes(size)]}, 1, 6)))
    pool.step(first, *((task, sample, 0, [5], "") for sample in range(6)))
    second = pool.worker("v", can=can)
    sent = pool.do(ev.WorkerBroken(0, first, "it broke"))
    assert len(pool.tasks(sent)) == 2, "so many copies fill half of what a worker may leave unread"
    assert not pool.tasks(pool.do(ev.WorkerHeard(0, second, unread=2 * size)))
    assert len(pool.tasks(pool.do(ev.WorkerHeard(0, second, unread=size)))) == 1
    # On a new link nothing is unread. What the worker had is sent again.
    pool.do(ev.WorkerRegistered(0, b"new", "g", "v", 1, "host", EPOCH))
    assert len(pool.tasks(pool.do(ev.WorkerSaid(0, b"new", Ready(can, 0))))) <= 2
    seen = len(pool.tasks())
    pool.do(ev.WorkerHeard(0, b"new", unread=0))
    assert len(pool.tasks()) == seen + 2


def test_no_generation_stops_for_media_that_its_worker_may_not_be_sent() -> None:
    size = 1 << 20
    pool = GeneratingPool(config(ageing_s=None, limits=Limits(buffer_bytes=8 * size)))
    can = msgspec.structs.replace(EXACT, batch_rows=1, inflight_rows=1, inflight_tokens=1 << 14)
    link, client = pool.worker(can=can), pool.client()
    pool.submit(client, 1, work({"images": [bytes(size)]}, 1))
    pool.submit(client, 2, work({"images": [bytes(3 * size + size // 5)]}, 1), priority=5)
    assert not pool.stopped()
    assert len(pool.tasks(pool.do(ev.WorkerHeard(0, link, unread=0)))) == 1 and len(pool.stopped()) == 1


def test_a_stream_that_is_sent_again_has_its_media_behind_the_tokens_that_arrived() -> None:
    asked, frames = request()
    media, (specs, more) = encode_media({"images": b"a"}, 1, single=True)
    asked.frames, asked.media = [*asked.frames, *specs], media
    driver = Streaming((asked, [*frames, *map(bytes, more)]))
    driver.tokens((0, 0, [7, 8]))
    driver.relink()
    again, [tokens] = driver.again()
    assert tokens == [7, 8] and [spec.name for spec in again.frames[-2:]] == ["media", "media_lengths"]
    # Another coordinator could not go on with it exactly.
    assert [end.reason for end in again.ended] == ["interrupted"] and again.media == media
