"""A coordinator small enough to see through: one ROUTER in a thread, answers that can be checked by hand, faults on demand."""

import queue
import threading
from collections.abc import Callable, Sequence
from typing import TypeVar

import msgspec
import numpy as np
import zmq

from enginepool.protocol.basis import Dtype
from enginepool.protocol.messages import (
    Ack,
    Cancel,
    Decode,
    Embed,
    ErrorReply,
    FrameSpec,
    FromClient,
    GroupStatus,
    Hello,
    Logprobs,
    Message,
    Ping,
    Pong,
    Result,
    Score,
    Status,
    StatusReport,
    Timings,
    TokenizeTexts,
    Usage,
    Welcome,
)

M = TypeVar("M", bound=Message)
#: What answers a score request: a message and its payload frames. None: nothing, for now.
Rule = Callable[[Score, Sequence[bytes]], tuple[Message, Sequence[bytes]] | None]
#: Seconds that a test waits for what must come.
PATIENCE_S = 60.0


def lengths_and_sums(message: Score, frames: Sequence[bytes], version: int = 1) -> tuple[Message, Sequence[bytes]]:
    """Column 0: the length of query + item; column 1: the sum of its ids (bytes, for text) and of the labels."""
    kind = np.uint8 if message.frames[0].dtype == "utf8" else np.int32
    lengths = np.frombuffer(frames[-1], np.uint32)
    items = np.split(np.frombuffer(frames[-2], kind), np.cumsum(lengths)[:-1])
    if len(frames) == 4:
        queries = np.split(np.frombuffer(frames[0], kind), np.cumsum(np.frombuffer(frames[1], np.uint32))[:-1])
    else:
        queries = [np.frombuffer(frames[0], kind)] * len(items)
    rows = [(len(q) + len(i), int(q.sum()) + int(i.sum()) + sum(message.labels)) for q, i in zip(queries, items, strict=True)]
    scores = np.array(rows, np.float32)
    specs, payload = [FrameSpec("scores", "float32", scores.shape)], [scores.tobytes()]
    if message.hidden:
        hidden = np.repeat(scores[:, :1], 4096, axis=1)
        specs.append(FrameSpec("hidden", "float32", hidden.shape))
        payload.append(hidden.tobytes())
    usage = Usage(len(rows), int(scores[:, 0].sum()))
    return Result(message.id, version, [1], usage, Timings(1500, 2_000_000), specs), payload


class FakeCoordinator:
    """Listens from construction to `stop`. `rule` may be replaced at any time; `heard` has every message in its order."""

    def __init__(self, address: str, *, epoch: int = 1, window: int = 0, silent: bool = False) -> None:
        self.epoch = epoch
        self.window = window
        self.silent = silent
        self.rule: Rule = lengths_and_sums
        self.groups: list[GroupStatus] = []
        self.heard: queue.Queue[FromClient] = queue.Queue()
        self.scores: list[Score] = []
        self.embeds: list[Embed] = []
        self.decodes: list[Decode] = []
        self.tokenizes: list[TokenizeTexts] = []
        self.logprobs: list[Logprobs] = []
        #: log-probabilities have a column too few
        self.short_rows = False
        #: ids to embed are below it; None: any are taken
        self.vocab: int | None = None
        self.payloads: list[list[bytes]] = []
        #: hears what has no answer here
        self.others: Callable[[bytes, FromClient, list[bytes]], None] | None = None
        self._errands: queue.SimpleQueue[list[bytes]] = queue.SimpleQueue()
        self._letters: queue.SimpleQueue[tuple[bytes, Message, Sequence[bytes]]] = queue.SimpleQueue()
        self._greeted: set[bytes] = set()
        #: who said hello last
        self.client = b""
        self._decoder: msgspec.msgpack.Decoder[FromClient] = msgspec.msgpack.Decoder(FromClient)
        self._stopping = threading.Event()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 0)
        # Else answers to a client that is slow to read are dropped, and asked for again after half a minute.
        self._socket.setsockopt(zmq.SNDHWM, 0)
        self._socket.bind(address)
        self.address = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._stopping.set()
        self._thread.join()

    def __enter__(self) -> "FakeCoordinator":
        return self

    def __exit__(self, *exc: object) -> None:
        self.stop()

    def wait_for(self, kind: type[M]) -> M:
        """The next message of this kind; those before it are taken away."""
        while True:
            message = self.heard.get(timeout=PATIENCE_S)
            if isinstance(message, kind):
                return message

    def tell(self, *frames: bytes) -> None:
        """Send these frames, also invalid ones, to every client."""
        self._errands.put(list(frames))

    def forget(self) -> None:
        """Know no client any more, as after a restart."""
        self._greeted.clear()

    def write(self, link: bytes, message: Message, frames: Sequence[bytes] = ()) -> None:
        """Send a message on one link, from any thread."""
        self._letters.put((link, message, frames))

    def _run(self) -> None:
        while not self._stopping.is_set():
            if self._socket.poll(20):
                link, header, *payload = self._socket.recv_multipart()
                self._hear(link, self._decoder.decode(header), payload)
            while not self._letters.empty():
                self._send(*self._letters.get())
            while not self._errands.empty():
                frames = self._errands.get()
                for link in self._greeted:
                    self._socket.send_multipart([link, *frames])
        self._socket.close()
        self._context.term()

    def _hear(self, link: bytes, message: FromClient, payload: list[bytes]) -> None:
        if self.silent:
            self.heard.put(message)
            return
        if isinstance(message, Hello):
            self._greeted.add(link)
            self.client = message.client
            self._send(link, Welcome(self.epoch, window_requests=self.window, groups=["g"], incarnation=message.incarnation))
        elif link not in self._greeted:
            self._send(link, ErrorReply("hello_required", "say hello", id=getattr(message, "id", None)))
        elif isinstance(message, Embed):
            self.embeds.append(message)
            self.payloads.append(payload)
            rows = len(payload[-1]) // 4
            if self.vocab is not None:
                text = f"items[0][1]: token id 9 is outside the vocabulary of {self.vocab}"
                limit = str(self.vocab)
                self._send(link, ErrorReply("bad_request", text, message.id, field="items[0][1]", limit=limit))
                return
            embeddings = np.arange(rows * 4, dtype=np.float32).reshape(rows, 4)[:, : message.dimensions or 4]
            specs = [FrameSpec("embeddings", "float32", embeddings.shape)]
            result = Result(message.id, 2, [1], Usage(rows, len(payload[0])), Timings(1500, 2_000_000), specs)
            self._send(link, result, [embeddings.tobytes()])
        elif isinstance(message, Decode):
            self._decode(link, message, payload)
        elif isinstance(message, TokenizeTexts):
            self._tokenize(link, message, payload)
        elif isinstance(message, Logprobs):
            self.logprobs.append(message)
            self.payloads.append(payload)
            if self.vocab is not None:
                text = f"items[0][1]: token id 9 is outside the vocabulary of {self.vocab}"
                self._send(link, ErrorReply("bad_request", text, message.id, field="items[0][1]", limit=str(self.vocab)))
                return
            rows, longest = len(payload[-1]) // 4, int(np.frombuffer(payload[-1], np.uint32).max()) - self.short_rows
            sizes = [("logprobs", longest)] + ([("labels", longest * len(message.labels))] if message.labels else [])
            if top := longest * message.top_logprobs:
                sizes += [("top_ids", top), ("top_logprobs", top)]
            types: dict[str, Dtype] = {"top_ids": "int32"}
            values = [-np.arange(rows * size).reshape(rows, size).astype(types.get(name, "float32")) for name, size in sizes]
            specs = [FrameSpec(name, types.get(name, "float32"), (rows, size)) for name, size in sizes]
            result = Result(message.id, 2, [1], Usage(rows, len(payload[0])), Timings(1500, 2_000_000), specs)
            self._send(link, result, [one.tobytes() for one in values])
        elif isinstance(message, Score):
            self.scores.append(message)
            self.payloads.append(payload)
            answer = self.rule(message, payload)
            if answer is not None:
                self._send(link, *answer)
        elif isinstance(message, Ping):
            self._send(link, Pong(at=message.at, epoch=self.epoch))
        elif isinstance(message, Cancel):
            self._send(link, ErrorReply("cancelled", "as you wish", id=message.id))
        elif isinstance(message, Status):
            self._send(link, StatusReport(self.epoch, id=message.id, groups=self.groups))
        else:
            assert not isinstance(message, Ack) or message.ids
            if self.others is not None:
                self.others(link, message, payload)
        self.heard.put(message)

    def _send(self, link: bytes, message: Message, frames: Sequence[bytes] = ()) -> None:
        self._socket.send_multipart([link, msgspec.msgpack.encode(message), *frames])

    def _decode(self, link: bytes, message: Decode, payload: list[bytes]) -> None:
        """Each id is a character of Latin-1."""
        self.decodes.append(message)
        if self.vocab is not None:
            text = f"items[0][1]: token id 9 is outside the vocabulary of {self.vocab}"
            self._send(link, ErrorReply("bad_request", text, message.id, field="items[0][1]", limit=str(self.vocab)))
            return
        ids, lengths = (np.frombuffer(frame, np.uint32) for frame in payload)
        texts = ["".join(map(chr, row.tolist())).encode() for row in np.split(ids, np.cumsum(lengths)[:-1])]
        joined = b"".join(texts)
        specs = [FrameSpec("texts", "utf8", (len(joined),)), FrameSpec("text_lengths", "uint32", (len(texts),))]
        result = Result(message.id, 2, [], Usage(len(texts), len(ids)), Timings(1500, 0), specs)
        self._send(link, result, [joined, np.array([*map(len, texts)], np.uint32).tobytes()])

    def _tokenize(self, link: bytes, message: TokenizeTexts, payload: list[bytes]) -> None:
        """Each byte is an id."""
        self.tokenizes.append(message)
        ids, rows = np.frombuffer(payload[0], np.uint8).astype(np.int32), len(payload[1]) // 4
        specs = [FrameSpec("items", "int32", ids.shape), FrameSpec("item_lengths", "uint32", (rows,))]
        result = Result(message.id, 2, [], Usage(rows, len(ids)), Timings(1500, 0), specs)
        self._send(link, result, [ids.tobytes(), payload[1]])
