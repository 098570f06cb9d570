"""A client's session and the coordinator's core, with sequences that no other engine continues exactly: what a reader gets of a
sequence is of one run of it, however often workers, links and coordinators are lost, and requests are sent again."""

import random
from math import inf

import numpy as np
import pytest

from enginepool.client.session.events import Fail, SessionEffect, SessionTick, SubmitRequest
from enginepool.protocol.messages import FrameSpec, Generate, Sampling, StartGeneration
from tests.core.machines import Sent
from tests.core.test_client_and_coordinator_streams import MOST, REQUESTS, SAMPLES, World, length

#: a token is its position, and so many times the number of the run that it is of
RUN, RUNS = 50, 19


class Inexact(World):
    """Its worker generates other tokens each time that a sequence begins."""

    most_losses = inf

    def __init__(self, rng: random.Random, monkeypatch: pytest.MonkeyPatch) -> None:
        self.runs = 0
        #: by epoch, task and sequence; none of one that goes on
        self.run_of: dict[tuple[int, int, int], int] = {}
        self.failed: list[Fail] = []
        super().__init__(rng, monkeypatch, 0)
        self.granted = dict.fromkeys(self.unread, 1 << 20)

    def perform(self, effects: list[SessionEffect]) -> None:
        self.failed += [effect for effect in effects if isinstance(effect, Fail)]
        super().perform([effect for effect in effects if not isinstance(effect, Fail)])

    def hear(self, sent: list[Sent]) -> None:
        for one in sent:
            if isinstance(one.message, StartGeneration) and one.message.at == 0:
                self.runs += 1
                for sequence in range(one.message.n):
                    self.run_of[self.epoch, one.message.task[1], sequence] = self.runs % RUNS
        super().hear(sent)

    def generate(self) -> None:
        workers = self.pool.machine.core.groups["g"].workers.values()
        steps: list[tuple[Sent, int, int, list[int], str]] = []
        for (counter, sequence), (task, at) in list(self.progress.items()):
            batch = next((w.batches[self.epoch, counter] for w in workers if (self.epoch, counter) in w.batches), None)
            if batch is None:
                del self.progress[counter, sequence]
            elif self.rng.random() < 0.6:
                request, start, _ = batch.slices[0]
                assert request.generation is not None
                most, has = length(request.id, start + sequence), request.generation.sequences[start + sequence].tokens
                run = self.run_of.get((self.epoch, counter, sequence), has[0] // RUN if has else 0)
                count = min(self.rng.choice([1, 1, 2]), most - at)
                tokens = [RUN * run + at + i for i in range(count)]
                steps.append((task, sequence, at, tokens, "stop" if at + count == most else ""))
                self.progress[counter, sequence] = task, at + count
                if at + count == most:
                    del self.progress[counter, sequence]
        if steps:
            self.hear(self.pool.step(self.worker, *steps, logprobs=True))

    def hear_nothing(self) -> None:
        """For so long that the session sends its requests again."""
        self.now = float(self.now + self.session.settings.resend_s + 1)
        self.pool.now = max(self.pool.now, self.now)
        self(SessionTick(self.now))


@pytest.mark.parametrize("seed", range(100))
def test_what_is_read_of_a_sequence_is_of_one_run(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(seed)
    world = Inexact(rng, monkeypatch)
    specs = [FrameSpec("items", "int32", (3,)), FrameSpec("item_lengths", "uint32", (1,))]
    for id_ in world.unread:
        sampling = Sampling(max_new_tokens=MOST, frequency_penalty=rng.choice([0.0, 0.5, 0.5]))
        asked = Generate(id_, specs, n=SAMPLES, sampling=sampling, stream=True, credit=rng.choice([1, 6, 50]), logprobs=True)
        world(SubmitRequest(world.now, asked, (np.array([5, 6, 7], np.int32).tobytes(), b"\3\0\0\0")))
    usual = [world.deliver_up, world.deliver_down, world.generate, world.take] * 6
    faults = [world.lose_link, world.restart, world.lose_worker, world.lose_worker, world.hear_nothing, world.hear_nothing]
    for step in range(20_000):
        rng.choice(faults if step < 1500 and rng.random() < 0.06 else usual)()
        if rng.random() < 0.1:
            world.tick()
        if len(world.answers) + len(world.failed) == REQUESTS and not any(world.unread.values()):
            break
    assert len(world.answers) + len(world.failed) == REQUESTS
    for tokens in world.read.values():
        assert [token % RUN for token in tokens] == list(range(len(tokens)))
        assert len({token // RUN for token in tokens}) <= 1, tokens
