"""A coordinator whose one model counts: token i of an output is i, plus 100 times the sequence, plus what the test says."""

from collections.abc import Sequence

import numpy as np

from enginepool.protocol.messages import (
    Credit,
    Ended,
    FrameSpec,
    FromClient,
    Generate,
    Generated,
    GenerationUsage,
    Run,
    SequenceEnd,
    StreamEnd,
    Timings,
    Tokens,
)
from tests.wire.fake_coordinator import FakeCoordinator

VERSION = 3


def token(sequence: int, at: int) -> int:
    return 100 * sequence + at


class GeneratingCoordinator(FakeCoordinator):
    """Answers requests to generate. `stops`: the sequences that stop, and after how many tokens; else all are as long as asked
    for. A stream gets its tokens one by one, as far as the credit goes; without `forwards` none."""

    def __init__(self, address: str) -> None:
        self.asked: list[Generate] = []
        self.credits: list[int] = []
        self.brought: list[list[bytes]] = []
        self.stops: dict[int, int] = {}
        self.forwards = True
        self.reason: Ended = "stop"
        self.version = VERSION
        self._streams: dict[int, tuple[bytes, Generate, list[int], int]] = {}
        super().__init__(address)
        self.others = self._generate

    def _generate(self, link: bytes, message: FromClient, frames: list[bytes]) -> None:
        if isinstance(message, Generate):
            self.asked.append(message)
            self.brought.append(frames)
            rows = len(frames[1]) // 4 * message.n
            brings = any(spec.name == "output_lengths" for spec in message.frames)
            starts = np.frombuffer(frames[3], np.uint32).tolist() if brings else [0] * rows
            if not message.stream:
                self.answer(link, message, starts)
            else:
                self._streams[message.id] = link, message, starts.copy(), 0
                if self.forwards:
                    self._forward(message.id, starts, 0)
        elif isinstance(message, Credit):
            self.credits.append(message.taken)
            starts = self._streams[message.id][2]
            if self.forwards:
                self._forward(message.id, starts, message.taken)

    def _forward(self, id_: int, starts: list[int], taken: int) -> None:
        """Send as many tokens as there is credit for, then the answer."""
        link, request, _, sent = self._streams[id_]
        has = starts.copy()
        left = sent
        lengths = self.lengths(request, len(starts))
        order = [(s, at) for at in range(max(lengths)) for s in range(len(starts)) if starts[s] <= at < lengths[s]]
        for s, _ in order[:left]:
            has[s] += 1
        for s, at in order[left : taken + request.credit]:
            sent += 1
            done = at + 1 == lengths[s]
            ended = [StreamEnd(id_, s, *self.end(request, s))] if done else []
            self.tokens(link, request, [(s, at, 1)], ended)
        self._streams[id_] = link, request, starts, sent
        if sent == len(order):
            self.answer(link, request, starts)

    def lengths(self, request: Generate, rows: int) -> list[int]:
        return [self.stops.get(s, request.sampling.max_new_tokens) for s in range(rows)]

    def end(self, request: Generate, sequence: int) -> tuple[Ended, int | None]:
        if sequence not in self.stops:
            return "length", None
        return self.reason, 7 if self.reason == "stop" else None

    def tokens(
        self, link: bytes, request: Generate, runs: Sequence[tuple[int, int, int]], ended: Sequence[StreamEnd] = ()
    ) -> None:
        """Send runs of (sequence, position, tokens)."""
        flat = np.array([token(s, at + i) for s, at, count in runs for i in range(count)], np.int32)
        specs = [FrameSpec("tokens", "int32", (len(flat),))]
        frames = [flat.tobytes()]
        if request.logprobs:
            specs.append(FrameSpec("logprobs", "float32", (len(flat),)))
            frames.append((-flat.astype(np.float32)).tobytes())
        made = [Run(request.id, s, at, count, self.version) for s, at, count in runs]
        self._send(link, Tokens(made, specs, list(ended)), frames)

    def answer(self, link: bytes, request: Generate, starts: Sequence[int]) -> None:
        """The final answer: the tokens from `starts` on."""
        lengths = self.lengths(request, len(starts))
        rows = [[token(s, at) for at in range(start, lengths[s])] for s, start in enumerate(starts)]
        flat = np.array([one for row in rows for one in row], np.int32)
        frames = [flat.tobytes(), np.array([len(row) for row in rows], np.uint32).tobytes()]
        specs = [FrameSpec("output", "int32", (len(flat),)), FrameSpec("output_lengths", "uint32", (len(rows),))]
        if request.logprobs:
            specs.append(FrameSpec("logprobs", "float32", (len(flat),)))
            frames.append((-flat.astype(np.float32)).tobytes())
        self._send(
            link,
            Generated(
                request.id, self.version, GenerationUsage(len(rows), 5, sum(lengths), 3), Timings(1500, 2_000_000),
                [SequenceEnd(s, *self.end(request, s)) for s in range(len(rows))],
                [[(self.version, len(row))] if row else [] for row in rows], specs, list(starts) if any(starts) else [],
            ),
            frames,
        )  # fmt: skip
