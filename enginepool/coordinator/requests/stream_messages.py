"""Messages of streams: tokens and ends of all streams of a client go in one message. Pure."""

from collections.abc import Iterable

from enginepool.coordinator.core.context import Context
from enginepool.coordinator.core.effects import ToClient
from enginepool.coordinator.core.events import Buffer
from enginepool.coordinator.core.request import Client, Request
from enginepool.coordinator.operations.generate import GenerateWork
from enginepool.protocol.generated import column_specs, prompt_specs, split_columns
from enginepool.protocol.messages import FrameSpec, Run, SequenceEnd, StreamEnd, Tokens

#: Of one message, so that its header is no longer than a receiver reads.
MOST_RUNS = 4096
_NAN = b"\x00\x00\xc0\x7f"


class StreamMessages:
    """What clients are sent about their streams after one event: one message for each client.

    Args:
        top: `top_logprobs` of all of these streams.
    """

    __slots__ = ("_ended", "_logprobs", "_runs", "_some", "_tokens", "_top")

    def __init__(self, top: int) -> None:
        self._top = top
        self._runs: dict[Client, list[Run]] = {}
        self._tokens: dict[Client, list[Buffer]] = {}
        self._logprobs: dict[Client, list[Buffer]] = {}
        self._ended: dict[Client, list[StreamEnd]] = {}
        #: clients that get logprobs
        self._some: set[Client] = set()

    def run(self, request: Request, run: Run, tokens: Buffer, logprobs: Buffer) -> None:
        """Tokens of a stream, as bytes; `logprobs` is empty where they are not asked for, and has columns with `top`."""
        client = request.client
        runs = self._runs.get(client)
        if runs is None:
            runs = self._runs[client] = []
            self._tokens[client], self._logprobs[client] = [], []
        runs.append(run)
        self._tokens[client].append(tokens)
        if len(logprobs):
            self._some.add(client)
        self._logprobs[client].append(logprobs if len(logprobs) else _NAN * run.count)

    def end(self, request: Request, end: SequenceEnd) -> None:
        """A sequence of a stream has ended."""
        self._ended.setdefault(request.client, []).append(StreamEnd(request.id, end.sequence, end.reason, end.matched))

    def send(self, core: Context) -> None:
        for client in {**self._runs, **self._ended}:
            if client.link is None:
                continue  # it sends its requests again, with the tokens that it has
            runs, ended = self._runs.get(client, []), self._ended.get(client, [])
            # Not before their tokens.
            delay = max(len(runs) - 1, 0) // MOST_RUNS * MOST_RUNS
            for first in range(0, max(len(runs), delay + len(ended)), MOST_RUNS):
                part, ends = slice(first, first + MOST_RUNS), slice(max(first - delay, 0), max(first - delay + MOST_RUNS, 0))
                frames: list[Buffer] = [b"".join(self._tokens.get(client, [])[part])]
                total = len(frames[0]) // 4
                specs = [FrameSpec("tokens", "int32", (total,))]
                if client in self._some:
                    frames += split_columns(b"".join(self._logprobs[client][part]), self._top)
                    specs += column_specs(total, True, self._top)
                core.effects.append(ToClient(client.link, Tokens(runs[part], specs, ended[ends]), frames))


def send_prompts(core: Context, request: Request, numbers: Iterable[int]) -> None:
    """The client of a stream gets what is known of these prompts: it has it then if another coordinator goes on."""
    state, work, client = request.generation, request.work, request.client
    assert state is not None and isinstance(work, GenerateWork)
    if not work.stream or client.link is None or state.expected:
        return
    top = work.top_logprobs
    prompts = [(request.id, number, len(state.prompts[number]) // (4 * (1 + 2 * top))) for number in numbers]
    if not prompts:
        return
    specs = [FrameSpec("tokens", "int32", (0,)), *prompt_specs(prompts, top)]
    frames = [b"", *split_columns(b"".join(state.prompts[number] for _, number, _ in prompts), top)]
    core.effects.append(ToClient(client.link, Tokens([], specs, prompts=prompts), frames))
