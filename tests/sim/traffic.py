"""The calls of a simulation: requests of every shape, some with a deadline, a change of mind, or something wrong with them.

Each row begins with the number of its call, so that an engine that is told to misbehave can say whom it wronged. What a call's
text or ids contain decides what an engine does with it:

    POISON    every engine that runs it dies            REFUSED   the engine refuses the part
    UNREADABLE   the tokenizer refuses the text         CHOKING   the tokenizer dies of the text
"""

from array import array
from collections.abc import Sequence
from random import Random
from typing import Any

from enginepool.protocol.messages import Capabilities, Decode, Embed, FrameSpec, Logprobs, Part, Score
from tests.sim.scores import EMBEDDING, HIDDEN, LOGPROBS, prompts_of, rows_of, salt_of, score_rows

#: a byte of text is the token of its value plus this
TEXT_OFFSET = 3
#: bytes of the text of a token: three digits and a space
TOKEN_BYTES = 4
POISON, REFUSED, UNREADABLE, CHOKING = 5, 6, 7, 10
#: stands between query and item for a cross-encoder, and in no row else
SEPARATOR = 8
FILLER = (20, 120)
_DIGIT, _BASE = 51, 64
#: calls of one simulation can be told apart up to this many
CALLS = _BASE * _BASE


class Call:
    """One call of a client, what it should get, and what it got."""

    __slots__ = (
        "arrival", "bad", "cancel_at", "cancelled", "choking", "client", "columns", "deadline", "floor", "frames",
        "generating", "hidden", "id", "outcome", "poison", "prompts", "refused", "retry_busy", "score", "submitted",
        "timeout", "tokens", "uid",
    )  # fmt: skip

    def __init__(self, uid: int, client: int, arrival: float) -> None:
        self.uid = uid
        self.client = client
        self.arrival = arrival
        self.id = 0
        #: the request: `Score`, `Embed`, `Logprobs`, `Decode`, or `Generate`
        self.score: Any = Score(0, [])
        self.frames: Sequence[bytes] = ()
        #: each row as the engine sees it
        self.prompts: list[bytes] = []
        self.tokens = 0
        self.columns: Sequence[int] = ()
        self.hidden = 0
        #: what belongs to it if it generates: `Generating`
        self.generating: Any = None
        self.timeout: float | None = None
        self.deadline: float | None = None
        self.cancel_at: float | None = None
        self.retry_busy = True
        #: the code that it must be refused with
        self.bad = ""
        self.poison = self.choking = self.refused = False
        self.submitted = -1.0
        #: the commit that had happened when it was asked, by its number: its answer is of that one or a later one
        self.floor = 0
        self.cancelled = False
        self.outcome = ""

    def expected(self, content: int) -> list[bytes]:
        """The frames of the right answer of these weights."""
        salt = salt_of(content, self.score)
        frames = [score_rows(self.prompts, self.columns, salt)]
        if self.hidden:
            frames.append(score_rows(self.prompts, range(HIDDEN, HIDDEN + self.hidden), salt))
        return frames

    @property
    def texts(self) -> list[bytes]:
        """The frames of the right answer of a call that decodes."""
        texts = [text_of(row).encode() for row in self.prompts]
        return [b"".join(texts), array("I", map(len, texts)).tobytes()]

    @property
    def names(self) -> list[str]:
        """Of the frames of its answer."""
        if isinstance(self.score, Embed):
            return ["embeddings"]
        if isinstance(self.score, Logprobs):
            return ["logprobs"]
        if isinstance(self.score, Decode):
            return ["texts", "text_lengths"]
        return ["scores", "hidden"] if self.hidden else ["scores"]

    def __repr__(self) -> str:
        wrong = [name for name in ("poison", "choking", "refused") if getattr(self, name)]
        return f"<Call {self.uid} client={self.client} id={self.id} rows={len(self.prompts)} {wrong or ''} {self.outcome}>"


class Mix:
    """How often a call is out of the ordinary: probabilities."""

    def __init__(self, random: Random) -> None:
        def rate(often: float, high: float) -> float:
            return high * random.random() if random.random() < often else 0.0

        self.text = rate(0.5, 0.5)
        self.poison = rate(0.3, 0.05)
        self.choking = rate(0.15, 0.2)
        self.refused = rate(0.3, 0.2)
        self.bad = rate(0.3, 0.2)
        self.deadline = rate(0.5, 0.5)
        self.cancel = rate(0.5, 0.3)
        self.large = rate(0.5, 0.3)
        self.impatient = rate(0.2, 0.5)
        self.priorities = random.choice([(0,), (-1, 0, 1), (-1000, 0, 1000), tuple(range(-10, 11))])


def uid_of(prompt: bytes) -> int:
    """Whose row this is."""
    high, low = array("i", prompt[:8])
    return (high - _DIGIT) * _BASE + low - _DIGIT


def mark_of(uid: int) -> list[int]:
    """The first tokens of the rows of a call."""
    return [_DIGIT + uid // _BASE, _DIGIT + uid % _BASE]


def make_call(random: Random, call: Call, group: str, can: Capabilities, mix: Mix, named: bool) -> Call:
    """Fill in `call`, a request to `group`."""
    mark = mark_of(call.uid)
    rows = random.randint(1, 6)
    if random.random() < mix.large:
        rows = random.randint(6, 40)
    text = random.random() < mix.text
    paired = random.random() < 0.3
    room = can.context - 4
    width = min(random.choice((3, 8, 20)), room // 2)
    query = [_row(random, mark, width) for _ in range(rows if paired else 1)]
    items = [_row(random, mark, width) for _ in range(rows)]
    if random.random() < 0.05:
        items[random.randrange(rows)] += _filler(random, room - 2 * width)
    odd = items[random.randrange(rows)]
    if random.random() < mix.poison:
        odd[-1:] = [POISON] if len(odd) > 2 else [odd[-1], POISON]
        call.poison = True
    elif random.random() < mix.refused:
        odd[-1:] = [REFUSED] if len(odd) > 2 else [odd[-1], REFUSED]
        call.refused = True
    elif text and random.random() < mix.choking:
        odd.append(CHOKING)
        call.choking = True
    elif text and random.random() < mix.refused:
        odd.append(UNREADABLE)
        call.refused = True
    score = call.score = Score(0, [], group if named else "", priority=random.choice(mix.priorities))
    score.item_first = random.random() < 0.3
    score.softmax = random.random() < 0.3
    if can.kind == "causal":
        score.labels = [random.randrange(can.vocab) for _ in range(random.randint(1, 3))]
    elif random.random() < 0.4:
        score.hidden = True
        call.hidden = can.hidden
    # No draws of their own: the schedules of known seeds stay what they are.
    score.softmax = score.softmax and (len(score.labels) or can.labels) > 1
    score.logprobs = call.uid % 3 == 0 and (can.kind == "causal" or score.softmax)
    if random.random() < mix.bad:
        _spoil(random, call, items, can)
    call.columns = score.labels or range(can.labels)
    if random.random() < mix.deadline:
        call.timeout = random.choice((0.05, 0.5, 3.0, 20.0)) * (0.5 + random.random())
    if random.random() < mix.cancel:
        call.cancel_at = call.arrival + random.choice((0.0, 0.05, 1.0)) * random.random()
    call.retry_busy = random.random() >= mix.impatient
    if can.separator is not None:
        _separate(call, query, items, text)
    _encode(call, query, items, paired, text, can.separator)
    return call


def widen(random: Random, call: Call, can: Capabilities, share: float) -> None:
    """Give a `share` of the calls many labels."""
    if can.kind == "causal" and not call.bad and random.random() < share:
        call.score.labels = [random.randrange(can.vocab) for _ in range(random.randint(20, 300))]
        call.columns = call.score.labels


def embed_instead(random: Random, call: Call, can: Capabilities, share: float) -> None:
    """Let a `share` of the calls embed their items; those that are wrong for a reason of their scores stay what they are."""
    if not can.embedding or call.bad == "bad_request" or random.random() >= share:
        return
    text = call.score.frames[0].dtype == "utf8"
    items, lengths = call.frames[-2:]
    dimensions = random.choice((0, 1, can.embedding // 2, can.embedding))
    if random.random() < 0.05:
        dimensions, call.bad = can.embedding + 1, call.bad or "bad_request"
    score = call.score
    call.score = Embed(
        0, score.frames[-2:], score.group, dimensions, random.random() < 0.5, score.priority, min_version=score.min_version
    )
    call.frames, call.hidden = (items, lengths), 0
    call.columns = range(EMBEDDING, EMBEDDING + (dimensions or can.embedding))
    rows = rows_of(items, lengths, 1 if text else 4)
    call.prompts = [array("i", [byte + TEXT_OFFSET for byte in row]).tobytes() for row in rows] if text else rows
    call.tokens = sum(map(len, call.prompts)) // 4


def logprobs_instead(call: Call, can: Capabilities) -> None:
    """Let the call, unless it is text or wrong for a reason of its scores, ask for log-probabilities of its items."""
    score, frames = call.score, call.frames
    if "logprobs" not in can.operations or call.bad == "bad_request" or score.frames[0].dtype == "utf8":
        return
    call.score = Logprobs(0, score.frames, score.group, [], score.priority, min_version=score.min_version)
    call.hidden = 0
    longest = max(map(len, rows_of(frames[-2], frames[-1]))) // 4
    call.columns = range(LOGPROBS, LOGPROBS + longest)
    call.prompts = prompts_of(Part([]), frames)


def decode_instead(call: Call) -> None:
    """Let the call decode its items, unless it is text, or something is wrong with it, or it waits for weights."""
    score, strange = call.score, call.bad or call.poison or call.choking or call.refused
    if strange or score.frames[0].dtype == "utf8" or score.min_version or score.version is not None:
        return
    call.score = Decode(0, score.frames[-2:], score.group, priority=score.priority)
    call.frames, call.hidden, call.columns = call.frames[-2:], 0, ()
    call.prompts = rows_of(call.frames[0], call.frames[1])
    call.tokens = sum(map(len, call.prompts)) // 4


def text_of(row: bytes) -> str:
    """What the simulated tokenizer makes of token ids."""
    return "".join(f"{token} " for token in array("i", row))


def exact_instead(random: Random, call: Call, committed: int) -> None:
    """Let a share of the calls name the exact version of the weights that answer: the committed one, or one that may come."""
    if call.bad or random.random() >= 0.15:
        return
    call.score.min_version, call.score.version = 0, committed + random.choice((0, 0, 0, 1, 2))
    call.timeout = call.timeout or 20.0


def _row(random: Random, mark: list[int], width: int) -> list[int]:
    return mark + _filler(random, random.randint(0, max(0, width - 2)))


def _filler(random: Random, n: int) -> list[int]:
    low, span, draw = FILLER[0], FILLER[1] - FILLER[0], random.random
    return [low + int(span * draw()) for _ in range(n)]


def _spoil(random: Random, call: Call, items: list[list[int]], can: Capabilities) -> None:
    kind = random.choice(("long", "labels", "group"))
    if kind == "long":
        items[-1] += _filler(random, can.context)
        call.bad = "bad_request"
    elif kind == "labels":
        call.score.labels = [*call.score.labels, can.vocab]
        call.bad = "bad_request"
    else:
        call.score.group = "nobody"
        call.bad = "unknown_group"


def _separate(call: Call, query: list[list[int]], items: list[list[int]], text: bool) -> None:
    """For a cross-encoder: rows of ids with their separator, some without one and raw, a few without one and refused."""
    call.score.raw = call.uid % 4 == 1
    if text or call.score.raw:
        return
    if call.uid % 8 == 3:
        call.bad = call.bad or "bad_request"
        return
    for row in items if call.score.item_first else query:
        row.append(SEPARATOR)


def _encode(
    call: Call, query: list[list[int]], items: list[list[int]], paired: bool, text: bool, separator: int | None
) -> None:
    score = call.score
    content = "utf8" if text else "int32"
    frames: list[bytes] = []
    specs: list[FrameSpec] = []
    for name, rows, ragged in (("query", query, paired), ("item", items, True)):
        flat = [token for row in rows for token in row]
        frames.append(bytes([token - TEXT_OFFSET for token in flat]) if text else array("i", flat).tobytes())
        specs.append(FrameSpec("query" if name == "query" else "items", content, (len(flat),)))
        if ragged:
            frames.append(array("I", [len(row) for row in rows]).tobytes())
            specs.append(FrameSpec(f"{name}_lengths", "uint32", (len(rows),)))
    heads = query if paired else query * len(items)
    behind = [separator] if separator is not None and text and not score.raw else []
    pairs = [(i, q) if score.item_first else (q, i) for q, i in zip(heads, items, strict=True)]
    joined = [first + behind + second + behind for first, second in pairs]
    call.prompts = [array("i", row).tobytes() for row in joined]
    call.tokens = sum(len(row) for row in joined)
    call.frames = tuple(frames)
    score.frames = specs
