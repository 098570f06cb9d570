"""The calls of a simulation that generate: what is asked, at which pace the caller reads, and what it has read."""

from array import array
from random import Random

from msgspec.structs import replace

from enginepool.client.session.events import StreamPart
from enginepool.protocol.messages import MAX_MASK, Capabilities, FrameSpec, Generate, Sampling, SequenceEnd
from tests.sim.scores import rows_of
from tests.sim.traffic import CHOKING, POISON, REFUSED, TEXT_OFFSET, UNREADABLE, Call

#: one token in so many is the end of a text
END_EVERY = 20
#: of every worker that generates
ADAPTERS = ("a", "b")


class GenerationMix:
    """How often a call generates, and how: probabilities."""

    def __init__(self, random: Random) -> None:
        self.share = random.choice((0.5, 0.8, 1.0))
        self.stream = random.choice((0.3, 0.7, 1.0))
        self.slow = random.choice((0.0, 0.2, 0.6))
        self.partial = random.choice((0.0, 0.1, 0.4))
        self.penalty = random.choice((0.0, 0.2, 0.5))
        self.brought = random.choice((0.0, 0.2))


class SequenceRead:
    """What the caller of a stream has read of one sequence."""

    def __init__(self) -> None:
        self.tokens = b""
        self.logprobs = b""
        self.hidden_states = b""
        self.spans: list[tuple[int, int]] = []
        self.end: SequenceEnd | None = None

    def extend(self, part: StreamPart) -> None:
        count = len(part.tokens) // 4
        assert self.end is None, f"more after its end: {part}"
        self.tokens += part.tokens
        self.logprobs += part.logprobs
        self.hidden_states += part.hidden_states
        if count and self.spans and self.spans[-1][0] == part.version:
            self.spans[-1] = part.version, self.spans[-1][1] + count
        elif count:
            self.spans.append((part.version, count))
        self.end = part.end


class Generating:
    """What belongs to a call that generates. `brought`: of each sequence, the tokens that the caller hands in, as bytes."""

    def __init__(self, request: Generate, brought: list[bytes], pause_s: float) -> None:
        self.request = request
        self.brought = brought
        #: how long the caller takes before it reads what is there; 0: it reads at once
        self.pause_s = pause_s
        self.read = [SequenceRead() for _ in brought]
        self.received = self.taken = 0
        #: the caller will look again
        self.looks = False
        #: the coordinator waits for the caller to read
        self.full = False
        #: the earliest version of its adapter that may generate
        self.floor = 0
        #: how often the request was sent, and to a coordinator of which epoch first
        self.sends = self.epoch = 0

    @property
    def constrained(self) -> bool:
        """It cannot be continued exactly."""
        return bool(self.request.sampling.frequency_penalty)

    def part(self, part: StreamPart, *, final: bool) -> None:
        """The session has a part of the stream; `final`: with the final answer."""
        assert self.request.stream, f"{part} of a request without a stream"
        self.read[part.sequence].extend(part)
        self.received += len(part.tokens) // 4
        # What the caller has not read when the request is sent again counts as read from then on.
        most = self.request.credit * self.sends
        self.full = self.full or (not final and self.received - self.taken >= self.request.credit)
        assert final or self.received - self.taken <= most, f"{self.received - self.taken} tokens, for a credit of {most}"


def generate_instead(random: Random, call: Call, can: Capabilities, mix: GenerationMix) -> None:
    """Let a share of the calls generate after their first items; those that are wrong for their scores stay what they are."""
    if "generate" not in can.operations or call.bad == "bad_request" or random.random() >= mix.share:
        return
    score = call.score
    text = score.frames[0].dtype == "utf8"
    unit = 1 if text else 4
    most = min(can.context, can.inflight_tokens)
    sampling = _sampling(random, min(random.choice((1, 3, 8, 15, 30)), most // 2), can.vocab, mix)
    longest = most - sampling.max_new_tokens
    items, lengths = call.frames[-2:]
    rows = [row[: unit * longest] for row in rows_of(items, lengths, unit)[: random.choice((1, 1, 2, 3))]]
    call.prompts = [array("i", [byte + TEXT_OFFSET for byte in row]).tobytes() for row in rows] if text else rows
    call.tokens = sum(map(len, call.prompts)) // 4
    inside = {token for prompt in call.prompts for token in array("i", prompt)}
    call.poison = POISON in inside
    call.choking = text and CHOKING in inside
    call.refused = REFUSED in inside or (text and UNREADABLE in inside)
    n = random.choice((1, 1, 2, 3))
    frames = [b"".join(rows), array("I", [len(row) // unit for row in rows]).tobytes()]
    specs = [
        FrameSpec("items", "utf8" if text else "int32", (len(frames[0]) // unit,)),
        FrameSpec("item_lengths", "uint32", (len(rows),)),
    ]
    request = call.score = Generate(
        0, specs, score.group, n, sampling, stream=random.random() < mix.stream, credit=random.choice((1, 2, 5, 1024)),
        logprobs=random.random() < 0.3, partial=random.random() < mix.partial, priority=score.priority,
        min_version=score.min_version,
    )  # fmt: skip
    # No draws of their own: the schedules of known seeds stay what they are.
    request.top_logprobs = call.uid % 4 if request.logprobs else 0
    request.prompt_logprobs = call.uid % 5 == 1
    request.adapter = ADAPTERS[call.uid % 3 - 1] if call.uid % 3 else ""
    request.hidden_states = call.uid % 7 in (2, 3)
    request.routed_experts = call.uid % 3 == 1 and not request.stream
    brought = [b"" for _ in range(n * len(rows))]
    if random.random() < mix.brought:
        brought = [_ids(random, random.randrange(sampling.max_new_tokens), can.vocab) for _ in brought]
        if random.random() < 0.3:
            request.ended = [SequenceEnd(0, "stop", 7)]
        specs.append(FrameSpec("output", "int32", (sum(map(len, brought)) // 4,)))
        specs.append(FrameSpec("output_lengths", "uint32", (len(brought),)))
        frames += [b"".join(brought), array("I", [len(row) // 4 for row in brought]).tobytes()]
    pause_s = random.choice((0.05, 0.5, 5.0)) if random.random() < mix.slow else 0.0
    call.frames, call.hidden, call.columns = tuple(frames), 0, ()
    call.generating = Generating(request, brought, pause_s)


def _sampling(random: Random, most: int, vocab: int, mix: GenerationMix) -> Sampling:
    sampling = Sampling(
        max_new_tokens=most,
        min_new_tokens=random.choice((0, most // 2, most)),
        temperature=random.choice((0.0, 1.0)),
        frequency_penalty=0.5 if random.random() < mix.penalty else 0.0,
        stop_token_ids=[random.randrange(20, vocab) for _ in range(random.choice((0, 0, 3)))],
        ignore_eos=random.random() < 0.2,
    )
    match sum(sampling.stop_token_ids) % 5:  # without another number of `random`, from which old schedules are made
        case 1:
            return replace(sampling, allowed_token_ids=[*range(most % 7, vocab, 9)][:MAX_MASK])
        case 2:
            return replace(sampling, disallowed_token_ids=[*range(most % 2, vocab, 2)][:MAX_MASK])
        case _:
            return sampling


def _ids(random: Random, count: int, vocab: int) -> bytes:
    return array("i", [random.randrange(20, vocab) for _ in range(count)]).tobytes()
