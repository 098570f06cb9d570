"""The sequences of a generation: the tokens that they have, and what their client was sent. Pure.

The coordinator keeps every token until the final answer. So a sequence whose worker is lost goes on elsewhere after its last
token, and a client that reads slowly slows its own stream alone: what it has no credit for stays here.
"""

from collections.abc import Iterator, Sequence
from typing import Generic, TypeVar

from enginepool.coordinator.operations.generate import GenerateWork
from enginepool.protocol.frames import Buffer
from enginepool.protocol.generated import GeneratedSequence
from enginepool.protocol.messages import TaskId

T = TypeVar("T")


class RunningSequence(GeneratedSequence):
    """One sequence: a sample of a prompt."""

    __slots__ = ("adapters", "sent", "under_way", "workers")

    def __init__(self, brought: Buffer) -> None:
        super().__init__(brought)
        #: tokens that the client has, or that are on their way to it; start <= sent <= len(tokens)
        self.sent = self.start
        #: its client sent the request again on the link on which it has been sent tokens: also those that it did not have yet
        #: may reach it
        self.under_way = False
        #: (name, position): the workers that generated its tokens, each from this position on
        self.workers: Sequence[tuple[str, int]] = ()
        #: (version, position): the versions of its adapter that generated them, each from this position on
        self.adapters: Sequence[tuple[int, int]] = ()

    def begin_again(self) -> None:
        """Drop all tokens but those that the request brought along. The client has none of them."""
        del self.tokens[self.start :], self.logprobs[:], self.spans[:], self.hidden_states[:]
        self.workers = self.adapters = ()

    @property
    def is_seen(self) -> bool:
        """Its client may have tokens of it."""
        return self.sent > self.start or self.under_way

    def states(self, at: int, count: int) -> bytes:
        """The hidden states of so many tokens from a position on; empty: it has none."""
        row = len(self.hidden_states) // max(len(self.tokens) - self.start, 1)
        first = row * (at - self.start)
        return bytes(memoryview(self.hidden_states)[first : first + row * count])

    def unsent(self, most: int) -> Iterator[tuple[int, int, int]]:
        """(first, count, version) of the next tokens that the client has not been sent, at most so many in all."""
        first = self.start
        for version, count in self.spans:
            end = min(first + count, self.sent + most)
            begin = max(first, self.sent)
            if begin < end:
                yield begin, end - begin, version
            first += count


class GenerationState(Generic[T]):
    """The sequences of one request. `T`: a task of a worker."""

    __slots__ = (
        "again", "behind", "blocks", "cached", "credit", "expanded", "expected", "losses", "lost_with", "prompt_tasks",
        "prompts", "sent", "sequences", "taken", "tasks",
    )  # fmt: skip

    def __init__(self, work: GenerateWork) -> None:
        ends = {end.sequence: end for end in work.ended}
        #: in the order of the prompts, the samples of a prompt one after the other
        self.sequences = [RunningSequence(tokens) for tokens in work.brought()]
        for at, end in ends.items():
            self.sequences[at].end = end
        #: the tasks in which workers run some of them
        self.tasks: dict[TaskId, T] = {}
        #: of the prompt whose sequences are next, or of which one ended last: its number, the engine's
        #: name of its adapter, and its blocks (`prefix_affinity.py`)
        self.blocks: tuple[tuple[int, str], list[int]] = (-1, ""), []
        #: by the number of a prompt: how many of its tokens an engine had in its prefix cache
        self.cached: dict[int, int] = {}
        #: by the number of a prompt with media: how many tokens it has in the engine
        self.expanded: dict[int, int] = {}
        #: by the number of a prompt: its log-probabilities, as bytes of float32; and the task that was last asked for them
        self.prompts: dict[int, bytes] = {}
        self.prompt_tasks: dict[int, TaskId] = {}
        #: workers that were lost with it, and the latest of them
        self.losses = 0
        self.lost_with: object = None
        #: sequences of a stream whose client has not been sent all, tokens or end; in the order in which it is sent them
        self.behind: dict[int, None] = {}
        #: tokens that were sent, and that the client has taken, since it last sent the request; 0 <= sent - taken <= credit
        self.sent = self.taken = 0
        self.credit = work.credit if work.stream else 0
        #: the link of its client is lost, or new: what the client has is not known until it sends the request again. All
        #: sequences are in `behind` then
        self.expected = False
        #: it was sent again in this turn; until the end of the turn it stays `expected`
        self.again = False

    def unfinished(self, start: int, end: int) -> list[tuple[int, int]]:
        """The ranges of sequences from `start` to `end` that have not ended."""
        ranges: list[tuple[int, int]] = []
        for i in range(start, end):
            if self.sequences[i].end is None:
                if ranges and ranges[-1][1] == i:
                    ranges[-1] = ranges[-1][0], i + 1
                else:
                    ranges.append((i, i + 1))
        return ranges

    def expect(self) -> None:
        """The client of a stream has no link, or a new one. It is sent nothing before it has sent the request again."""
        if not self.expected:
            self._all_behind()
        self.expected, self.again = True, False

    def _all_behind(self) -> None:
        self.behind = dict.fromkeys(range(len(self.sequences)))

    def resume(self, received: GenerateWork) -> None:
        """The client has sent the request again, with the tokens that it has: on a new link, or where it has heard nothing for
        long. The others follow at the end of this turn."""
        if not self.again:
            for sequence in self.sequences:
                sequence.under_way = not self.expected and sequence.is_seen
        if not self.expected:
            self._all_behind()
        self.expected = self.again = True
        for sequence, tokens in zip(self.sequences, received.brought(), strict=True):
            sequence.sent = max(sequence.start, min(len(tokens) // 4, len(sequence.tokens)))
        self.sent = self.taken = 0

    def continues(self, received: GenerateWork) -> bool:
        """Whether the tokens that the client has are the first ones of this run. `received`: the request that brings them.

        They are not if the answer was lost and has been dropped: an older message of the client has then started another run.
        """
        for sequence, tokens in zip(self.sequences, received.brought(), strict=True):
            if memoryview(sequence.tokens).cast("B")[: len(tokens)] != tokens:
                return False
        # Of such requests a client says "interrupted" itself, for a coordinator that does not run them.
        own = "interrupted" if received.partial or received.constrained or received.media.media else ""
        ended = [self.sequences[end.sequence] for end in received.ended if end.reason != own]
        most = received.sampling.max_new_tokens  # a sequence with so many has ended, also if its end has not come yet
        return all(one.end is not None or len(one.tokens) == most for one in ended)
