"""A client's session and the coordinator's core, with links that are lost and coordinators that restart between any two
messages: the reader gets each token once, in order, and never has more unread than it gave credit for."""

import random
from collections import deque

import msgspec
import numpy as np
import pytest

from enginepool.client.session.events import (
    Answer,
    Fail,
    MessageReceived,
    OpenLink,
    SendMessage,
    SessionEffect,
    SessionEvent,
    SessionTick,
    Start,
    StreamPart,
    SubmitRequest,
    TokensTaken,
)
from enginepool.client.session.machine import ClientSession
from enginepool.coordinator.core import events as ev
from enginepool.coordinator.shell.decode import client_event
from enginepool.protocol.columns import join_columns
from enginepool.protocol.frames import check_frames
from enginepool.protocol.generated import check_tokens, read_prompts
from enginepool.protocol.messages import FrameSpec, Generate, Generated, Message, Sampling, StartGeneration, ToClient, Tokens
from tests.core import generations, machines
from tests.core.generations import CAN, GeneratingPool, columns, prompt_columns
from tests.core.machines import Sent
from tests.core.session_invariants import check_session

REQUESTS, SAMPLES, MOST, CREDIT = 3, 2, 40, 6
#: of every prompt
OF_PROMPT = np.array([np.nan, -1.5, -2.5], np.float32)


def token(request: int, sequence: int, at: int) -> int:
    return 500 * (request % 2) + 100 * sequence + at


def length(request: int, sequence: int) -> int:
    return MOST - (3 * request + sequence) % 5


class World:
    """One client, one coordinator at a time, one worker that generates what `token` says."""

    #: workers that are lost: a request that more of them die of is refused
    most_losses: float = 2

    def __init__(self, rng: random.Random, monkeypatch: pytest.MonkeyPatch, top: int) -> None:
        self.rng, self.monkeypatch, self.top = rng, monkeypatch, top
        self.session = ClientSession(b"c" * 16, b"t" * 16, rng.random)
        self.now = 100.0
        self.epoch = 6
        self.links = self.losses = 0
        #: messages on their way on the link of now
        self.up: deque[tuple[bytes, tuple[bytes, ...]]] = deque()
        self.down: deque[Sent] = deque()
        self.unread: dict[int, deque[StreamPart]] = {i: deque() for i in range(1, REQUESTS + 1)}
        self.taken = dict.fromkeys(self.unread, 0)
        self.read: dict[tuple[int, int], list[int]] = {(i, s): [] for i in self.unread for s in range(SAMPLES)}
        self.answers: dict[int, Answer] = {}
        #: how many tokens may be unread: a new link grants the credit again
        self.granted = dict.fromkeys(self.unread, CREDIT)
        self.restart()
        self(Start(self.now))

    def __call__(self, event: SessionEvent) -> None:
        self.perform(self.session.handle(event))
        check_session(self.session)

    def perform(self, effects: list[SessionEffect]) -> None:
        for effect in effects:
            if isinstance(effect, OpenLink):
                self.lose_link()
            elif isinstance(effect, SendMessage):
                frames = tuple(bytes(frame) for frame in effect.frames)
                self.up.append((msgspec.msgpack.encode(effect.message), frames))
                if isinstance(effect.message, Generate):
                    self.granted[effect.message.id] = self.count(effect.message.id) + CREDIT
            elif isinstance(effect, StreamPart):
                assert effect.id not in self.answers, "tokens after the answer"
                self.unread[effect.id].append(effect)
            elif isinstance(effect, Answer):
                assert effect.id not in self.answers, "two answers"
                self.answers[effect.id] = effect
            assert not isinstance(effect, Fail), effect

    def count(self, id_: int) -> int:
        return sum(len(part.tokens) // 4 for part in self.unread[id_])

    # --- what happens ----------------------------------------------------------------------------------------------------

    def restart(self) -> None:
        """The coordinator is killed, and another one takes its place."""
        self.epoch += 1
        self.monkeypatch.setattr(machines, "EPOCH", self.epoch)
        self.monkeypatch.setattr(generations, "EPOCH", self.epoch)
        self.pool = GeneratingPool()
        self.worker = self.pool.worker("w", can=CAN)
        self.progress: dict[tuple[int, int], tuple[Sent, int]] = {}
        #: tasks that have tokens
        self.begun: set[int] = set()
        self.hear(self.pool.sent)
        self.lose_link()

    def lose_link(self) -> None:
        self.links += 1
        self.up.clear()
        self.down.clear()

    def hear(self, sent: list[Sent]) -> None:
        """What the coordinator sent: to the client, on the link of now; and tasks for the worker."""
        for one in sent:
            if isinstance(one.message, StartGeneration):
                for sequence in range(one.message.n):
                    self.progress[one.message.task[1], sequence] = one, one.message.at
            elif one.link == b"link%d" % self.links:
                self.down.append(one)

    def deliver_up(self) -> None:
        if self.up:
            header, frames = self.up.popleft()
            event = client_event(self.now, b"link%d" % self.links, [header, *frames], 1 << 30)
            self.hear(self.pool.do(event))

    def deliver_down(self) -> None:
        if self.down:
            one = self.down.popleft()
            message: Message = msgspec.msgpack.decode(msgspec.msgpack.encode(one.message), type=ToClient)
            if isinstance(message, Tokens | Generated):
                check_frames(message.frames, one.frames)
            if isinstance(message, Tokens):
                check_tokens(message)
            self(MessageReceived(self.now, message, one.frames))  # type: ignore[arg-type]

    def generate(self) -> None:
        """The worker takes a step: some of its sequences get a token."""
        workers = self.pool.machine.core.groups["g"].workers.values()
        steps: list[tuple[Sent, int, int, list[int], str]] = []
        prompts: dict[int, tuple[Sent, list[float]]] = {}
        for (counter, sequence), (task, at) in list(self.progress.items()):
            batch = next((w.batches[self.epoch, counter] for w in workers if (self.epoch, counter) in w.batches), None)
            if batch is None:
                del self.progress[counter, sequence]
            elif self.rng.random() < 0.7:
                request, start, _ = batch.slices[0]
                s = start + sequence
                count = min(self.rng.choice([1, 1, 2]), length(request.id, s) - at)
                ends = at + count == length(request.id, s)
                steps.append((task, sequence, at, [token(request.id, s, at + i) for i in range(count)], "stop" if ends else ""))
                self.progress[counter, sequence] = task, at + count
                if counter not in self.begun and task.message.prompt_logprobs:  # type: ignore[union-attr]
                    prompts[counter] = task, OF_PROMPT.tolist()
                self.begun.add(counter)
                if ends:
                    del self.progress[counter, sequence]
        if steps:
            self.hear(self.pool.step(self.worker, *steps, logprobs=True, top=self.top, prompts=list(prompts.values())))

    def lose_worker(self) -> None:
        self.losses += 1
        if self.losses > self.most_losses:
            return
        self.hear(self.pool.do(ev.WorkerBroken(0, self.worker, "it broke")))
        self.progress.clear()
        before = len(self.pool.sent)
        self.worker = self.pool.worker(f"w{self.rng.random()}", can=CAN)
        self.hear(self.pool.sent[before:])

    def take(self) -> None:
        id_ = self.rng.choice(list(self.unread))
        if self.unread[id_]:
            part = self.unread[id_].popleft()
            tokens = np.frombuffer(part.tokens, np.int32).tolist()
            assert part.logprobs == columns(tokens, self.top)
            self.read[id_, part.sequence] += tokens
            self.taken[id_] += len(tokens)
            self(TokensTaken(self.now, id_, self.taken[id_]))

    def tick(self) -> None:
        if self.session.wake_at < float("inf"):
            self.now = max(self.now, self.session.wake_at)
            self(SessionTick(self.now))
        self.pool.now = max(self.pool.now, self.now)


@pytest.mark.parametrize("top", [0, 2])
@pytest.mark.parametrize("seed", range(40))
def test_each_token_is_read_once_and_in_order_however_links_workers_and_coordinators_are_lost(
    seed: int, top: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = random.Random(seed)
    world = World(rng, monkeypatch, top)
    specs = [FrameSpec("items", "int32", (3,)), FrameSpec("item_lengths", "uint32", (1,))]
    asked: dict[int, Generate] = {}
    for id_ in world.unread:
        asked[id_] = made = Generate(
            id_, specs, n=SAMPLES, sampling=Sampling(max_new_tokens=MOST), stream=True, credit=CREDIT, logprobs=True,
            top_logprobs=top, prompt_logprobs=top > 0,
        )  # fmt: skip
        world(SubmitRequest(world.now, made, (np.array([5, 6, 7], np.int32).tobytes(), b"\3\0\0\0")))
    usual = [world.deliver_up, world.deliver_down, world.generate, world.take] * 6
    faults = [world.lose_link, world.restart, world.lose_worker]
    for step in range(20_000):
        rng.choice(faults if step < 1000 and rng.random() < 0.02 else usual)()
        if rng.random() < 0.1:
            world.tick()
        for id_ in world.unread:
            assert id_ in world.answers or world.count(id_) <= world.granted[id_], "more than the credit"
        if len(world.answers) == REQUESTS and not any(world.unread.values()):
            break
    wanted = {(i, s): [token(i, s, at) for at in range(length(i, s))] for i in world.unread for s in range(SAMPLES)}
    assert world.read == wanted
    for id_, answer in world.answers.items():
        rows = [token for s in range(SAMPLES) for token in wanted[id_, s]]
        assert np.frombuffer(answer.frames[0], np.int32).tolist() == rows
        logprobs, *more = answer.frames[2:]
        assert join_columns(logprobs, more[0] if top else b"", more[1] if top else b"", top) == columns(rows, top)
        if top:
            assert answer.message.prompts == [(0, 3)]  # type: ignore[union-attr]
            found = read_prompts(answer.message, answer.frames, asked[id_])  # type: ignore[arg-type]
            assert bytes(found[0]) == prompt_columns(OF_PROMPT.tolist(), top)
