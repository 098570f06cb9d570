"""Messages of streams: tokens and ends of all streams of a client go in one message. Pure."""

from collections.abc import Iterable, Iterator

from enginepool.coordinator.core.context import Context
from enginepool.coordinator.core.effects import ToClient
from enginepool.coordinator.core.events import Buffer, Link
from enginepool.coordinator.core.request import Client, Request
from enginepool.coordinator.operations.generate import GenerateWork
from enginepool.protocol.columns import split_columns
from enginepool.protocol.generated import column_specs, prompt_specs
from enginepool.protocol.messages import FrameSpec, Run, SequenceEnd, StreamEnd, Tokens

#: Of one message, so that its header is no longer than a receiver reads.
MOST_RUNS = 4096
#: Of what is sent together, so that a message is no longer than every client takes.
MOST_BYTES = 256 << 10
_NAN = b"\x00\x00\xc0\x7f"
#: Bytes of hidden states of one message, so that messages of others are not behind a long one. A single token may have more.
MOST_STATES = 1 << 20


class ClientTokens:
    """What one client is sent about its streams. `logprobs`: of each run, empty where they are not asked for; `some`: of one
    they are. `hidden_states`: of each run, or of none."""

    __slots__ = ("ended", "hidden_states", "logprobs", "runs", "some", "tokens")

    def __init__(self) -> None:
        self.runs: list[Run] = []
        self.tokens: list[Buffer] = []
        self.logprobs: list[Buffer] = []
        self.hidden_states: list[Buffer] = []
        self.some = False
        self.ended: list[StreamEnd] = []


class StreamMessages:
    """What clients are sent about their streams: one message for each client, of all that is added before `send`.

    Args:
        top: `top_logprobs` of all of these streams. All of them have hidden states, or none has.
    """

    __slots__ = ("_clients", "_top")

    def __init__(self, top: int) -> None:
        self._top = top
        self._clients: dict[Client, ClientTokens] = {}

    def run(self, client: Client, run: Run, tokens: Buffer, logprobs: Buffer, hidden_states: Buffer = b"") -> None:
        """Tokens of a stream, as bytes; `logprobs` is empty where they are not asked for, and has columns with `top`."""
        mine = self._clients.get(client)
        if mine is None:
            mine = self._clients[client] = ClientTokens()
        mine.runs.append(run)
        mine.tokens.append(tokens)
        mine.logprobs.append(logprobs)
        if logprobs:
            mine.some = True
        if hidden_states:
            mine.hidden_states.append(hidden_states)

    def end(self, request: Request, end: SequenceEnd) -> None:
        """A sequence of a stream has ended."""
        mine = self._clients.get(request.client)
        if mine is None:
            mine = self._clients[request.client] = ClientTokens()
        mine.ended.append(StreamEnd(request.id, end.sequence, end.reason, end.matched))

    def send(self, core: Context) -> None:
        """Send what was added."""
        clients, self._clients = self._clients, {}
        for client, mine in clients.items():
            if client.link is None:
                continue  # it sends its requests again, with the tokens that it has
            if len(mine.runs) <= MOST_RUNS >= len(mine.ended):
                self._send(core, client.link, mine)
                continue
            # No end before its tokens.
            delay = max(len(mine.runs) - 1, 0) // MOST_RUNS * MOST_RUNS
            for first in range(0, max(len(mine.runs), delay + len(mine.ended)), MOST_RUNS):
                part, piece = slice(first, first + MOST_RUNS), ClientTokens()
                piece.runs, piece.tokens, piece.logprobs = mine.runs[part], mine.tokens[part], mine.logprobs[part]
                piece.ended = mine.ended[max(first - delay, 0) : max(first - delay + MOST_RUNS, 0)]
                piece.some, piece.hidden_states = mine.some, mine.hidden_states[part]
                self._send(core, client.link, piece)

    def _send(self, core: Context, link: Link, mine: ClientTokens) -> None:
        tokens = b"".join(mine.tokens)
        total = len(tokens) // 4
        specs, frames = [FrameSpec("tokens", "int32", (total,))], list[Buffer]((tokens,))
        if mine.some:
            logprobs = [found or _NAN * run.count for run, found in zip(mine.runs, mine.logprobs, strict=True)]
            frames += split_columns(b"".join(logprobs), self._top)
            specs += column_specs(total, True, self._top)
        if mine.hidden_states:
            frames.append(b"".join(mine.hidden_states))
            specs += column_specs(total, False, 0, len(frames[-1]) // len(tokens))
        core.effects.append(ToClient(link, Tokens(mine.runs, specs, mine.ended), frames))


class UnsentTokens:
    """What engines generated in this turn, and is not sent yet: a coordinator that is late sends the tokens of several steps
    together. It is sent before anything else is said about a request, and at the end of the turn at the latest."""

    __slots__ = ("_by_kind", "_core", "_nbytes")

    def __init__(self, core: Context) -> None:
        self._core = core
        #: by `top_logprobs`, and whether they have hidden states; empty between two turns
        self._by_kind: dict[tuple[int, bool], StreamMessages] = {}
        self._nbytes = 0

    def of(self, top: int, hidden: bool, nbytes: int) -> StreamMessages:
        """Those of streams with this `top_logprobs`, and with hidden states or without, to which so many bytes are going to be
        added."""
        if self._nbytes and self._nbytes + nbytes > MOST_BYTES:
            self.send()
        self._nbytes += nbytes
        return self._of(top, hidden)

    def end(self, request: Request, end: SequenceEnd) -> None:
        """A sequence of a stream has ended. Its end is sent with its tokens, also if it comes in a message without any."""
        work = request.work
        assert isinstance(work, GenerateWork)
        self._of(work.top_logprobs, work.hidden_states).end(request, end)

    def _of(self, top: int, hidden: bool) -> StreamMessages:
        found = self._by_kind.get((top, hidden))
        if found is None:
            found = self._by_kind[top, hidden] = StreamMessages(top)
        return found

    def send(self) -> None:
        """Send all."""
        self._nbytes = 0
        while self._by_kind:
            _, messages = self._by_kind.popitem()
            messages.send(self._core)


def in_pieces(spans: Iterable[tuple[int, int, int]], row: int) -> Iterator[tuple[int, int, int]]:
    """(first, count, version) of spans of tokens, each with hidden states of MOST_STATES at most. `row`: bytes of one."""
    most = max(MOST_STATES // row, 1) if row else 0
    for first, count, version in list(spans):
        for at in range(first, first + count, most or count):
            yield at, min(most or count, first + count - at), version


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
