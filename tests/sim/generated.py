"""What a generation must answer: each sequence from its spans, computed again by the pure function of the engines."""

from array import array
from collections.abc import Iterator, Mapping, Sequence
from copy import copy
from itertools import chain
from typing import NamedTuple

from msgspec.structs import replace

from enginepool.client.session.events import Answer
from enginepool.protocol.adapters import engine_name
from enginepool.protocol.columns import join_columns, split_columns
from enginepool.protocol.generated import read_experts, read_hidden, read_prompt_columns
from enginepool.protocol.messages import Generated, GenerationUsage, SequenceEnd
from enginepool.workers.sim.operation import Weights as SimWeights
from enginepool.workers.sim.tokens import SimSequence, prompt_logprobs, prompt_top_of
from tests.sim.adapting import LATER
from tests.sim.generating import END_EVERY, Generating
from tests.sim.sim_generator import routes_of, states_of, top_of
from tests.sim.traffic import Call

#: of every simulated model
VOCAB = 300


class Weights(NamedTuple):
    """Weights of a group: their version, the number of their content, their digest, and the run that counts their version."""

    version: int
    content: int
    committed: bool
    digest: str = ""
    run: int = 0


class Known(NamedTuple):
    """What may have generated for a call: the adapter that it names, and all commits of adapters. `floor`: the earliest
    version."""

    group: str
    adapter: str
    history: Mapping[tuple[str, str], Sequence[tuple[float, int]]]
    floor: int

    def names(self, version: int | None) -> list[str]:
        """What an engine may call the adapter of a token: in this version, or, None, in any."""
        known = {one for _, one in self.history.get((self.group, self.adapter), ()) if one >= max(self.floor, 1)}
        if not known:
            return [self.adapter]
        return [engine_name(self.adapter, one) for one in sorted(known) if version in (None, one)]


def passed(version: int, weights: Sequence[Weights]) -> bool:
    """Whether weights of a newer version than this one were ever committed."""
    return any(one.committed and one.version > version for one in weights)


def replaced(version: int, weights: Sequence[Weights]) -> bool:
    """Whether other weights were ever committed after those of this version: newer ones, or any where versions began again."""
    commits = [one for one in weights if one.committed]
    return passed(version, weights) or any(one.version == version and {*commits[i:]} != {one} for i, one in enumerate(commits))


class Answered(NamedTuple):
    """One sequence of an answer; the frames as bytes. `columns`: the logprobs, with the most probable tokens if asked for."""

    tokens: bytes
    columns: bytes
    logprobs: bytes
    spans: list[tuple[int, int]]
    end: SequenceEnd
    hidden_states: bytes = b""
    routed_experts: bytes = b""


def check_generated(call: Call, answer: Answer, weights: Sequence[Weights], known_: Known) -> Iterator[str]:
    """The final answer of a call is the right one, and a stream had the same tokens. Yields what happened to its sequences."""
    message, generating = answer.message, call.generating
    assert isinstance(message, Generated) and generating is not None, f"{call}: {message}"
    request = generating.request
    if call.cancelled and request.stream:
        return  # its caller had stopped listening
    sequences = _sequences(call, answer)
    starts = message.starts or [0] * len(sequences)
    assert starts == [len(brought) // 4 for brought in generating.brought], f"{call}: starts {starts}"
    total = sum(starts) + sum(len(sequence.tokens) // 4 for sequence in sequences)
    assert message.usage == GenerationUsage(len(sequences), call.tokens, total, message.usage.cached_tokens), f"{call}"
    assert 0 <= message.usage.cached_tokens <= call.tokens, f"{call}: {message.usage}"
    versions = [version for sequence in sequences for version, _ in sequence.spans]
    assert not versions or message.version == max(versions), f"{call}: version {message.version}"
    assert all(version >= request.min_version for version in versions), f"{call}: {versions}"
    assert request.version is None or not {*versions} - {request.version}, f"{call}: {versions}, asked for {request.version}"
    assert message.workers or request.stream or not versions, f"{call}: no worker"
    for i, places in enumerate(message.places):
        end = starts[i] + len(sequences[i].tokens) // 4
        at = [position for _, position in places]
        assert at == sorted({*at}) and all(starts[i] <= one < end for one in at), f"{call}: sequence {i}: {places}"
        assert all(-1 <= worker < len(message.workers) for worker, _ in places), f"{call}: sequence {i}: {places}"
        assert request.stream or not sequences[i].tokens or at[:1] == [starts[i]], f"{call}: sequence {i}: {places}"
        if len(places) > 1:
            yield "several workers"
    known = {end.sequence: end for end in request.ended}
    for i, sequence in enumerate(sequences):
        if i in known:
            assert not sequence.tokens and sequence.end == known[i], f"{call}: sequence {i} had ended: {sequence}"
        else:
            names = _adapters_of(call, message, i, starts[i], sequence, known_)
            _check_sequence(call, generating, i, sequence, weights, names)
            if len({*map(tuple, names)}) > 1:
                yield "several versions of an adapter"
            yield sequence.end.reason
        if len(sequence.spans) > 1:
            yield "several versions"
        if sequence.hidden_states:
            yield "hidden states"
        if sequence.routed_experts:
            yield "routed experts"
        if request.stream:
            yield "streamed"
            read = generating.read[i]
            assert read.tokens == sequence.tokens, f"{call}: sequence {i} was streamed differently"
            assert read.logprobs == sequence.columns, f"{call}: sequence {i} had other logprobs when it was streamed"
            assert read.hidden_states == sequence.hidden_states, f"{call}: sequence {i} had other hidden states in the stream"
            assert read.spans == sequence.spans, f"{call}: sequence {i}: {read.spans} in the stream, {sequence.spans} now"
            assert read.end == (None if i in known else sequence.end), f"{call}: sequence {i} ended differently: {read.end}"
    if request.prompt_logprobs:
        _check_prompts(call, message, answer, sequences, weights, known_)
        yield "prompt logprobs"
    if generating.full:
        yield "waited for its reader"


def _sequences(call: Call, answer: Answer) -> list[Answered]:
    message, generating = answer.message, call.generating
    assert isinstance(message, Generated)
    request, frames = generating.request, [bytes(frame) for frame in answer.frames]
    top, width = request.top_logprobs, 4 * request.width
    names = ["output", "output_lengths", *(["logprobs"] if request.logprobs else [])]
    names += [*(["top_ids", "top_logprobs"] if top else []), *(["hidden_states"] if request.hidden_states else [])]
    names += ["routed_experts"] if request.routed_experts else []
    if message.prompts:
        names += ["prompt_logprobs", *(["prompt_top_ids", "prompt_top_logprobs"] if top else [])]
    assert [spec.name for spec in message.frames] == names, f"{call}: {message.frames}"
    output, lengths, chances = frames[0], frames[1], frames[2] if request.logprobs else b""
    columns = join_columns(frames[2], frames[3], frames[4], top) if top else chances
    rows = len(generating.brought)
    states = read_hidden(message.frames, frames)
    routes, experts = read_experts(message.frames, frames), message.experts or [0] * rows
    assert len(message.spans) == rows and [end.sequence for end in message.ended] == list(range(rows)), f"{call}: {message}"
    found: list[Answered] = []
    first = routed = 0
    for length, count, spans, end in zip(array("I", lengths), experts, message.spans, message.ended, strict=True):
        part = slice(4 * first, 4 * (first + length))
        assert sum(count for _, count in spans) == length, f"{call}: {spans} for {length} tokens"
        here = columns[width * first : width * (first + length)]
        hidden, mine = bytes(states[8 * first : 8 * (first + length)]), bytes(routes[4 * routed : 4 * (routed + count)])
        routed += count
        of_versions = [(version, tokens) for version, tokens in spans]
        found.append(Answered(output[part], here, chances[part], of_versions, end, hidden, mine))
        assert not request.hidden_states or hidden == states_of(array("i", output[part])), f"{call}: hidden states"
        if top:
            _, *right = split_columns(here, top)
            wrong = (*map(bytes, right),) != top_of(array("i", output[part]), array("f", chances[part]), top, VOCAB)
            assert not wrong, f"{call}: the most probable tokens of sequence {len(found) - 1}"
        first += length
    assert 4 * first == len(output), f"{call}: {len(output)} bytes of output for {first} tokens"
    return found


def _check_prompts(
    call: Call, message: Generated, answer: Answer, sequences: Sequence[Answered], weights: Sequence[Weights], may: Known
) -> None:
    """Each prompt of which tokens were generated has its log-probabilities once, by some weights since the call was made: by
    those of the first token, where one sequence was generated without a part of it being brought along.

    Where its adapter was unloaded, the task that was to give them may have been stopped first.
    """
    generating = call.generating
    assert generating is not None
    known, top = dict(message.prompts), generating.request.top_logprobs
    data = bytes(read_prompt_columns(message.frames, answer.frames)) if known else b""
    n = len(sequences) // len(call.prompts)
    begun = {i // n for i, one in enumerate(sequences) if one.tokens}
    if generating.request.adapter:
        begun -= {i // n for i, one in enumerate(sequences) if one.end.reason == "interrupted"}
    assert len(known) == len(message.prompts) and begun <= known.keys(), f"{call}: {message.prompts}, tokens of {begun}"
    for number, count in message.prompts:
        size = 4 * count * (1 + 2 * top)
        prompt, mine, data = call.prompts[number], data[:size], data[size:]
        by = weights[call.floor :]
        if n == 1 and not generating.brought[number] and sequences[number].tokens:
            by = [one for one in by if one.version == sequences[number].spans[0][0]]
        engines = (SimWeights(one.content).with_adapter(name) for one in by for name in may.names(None))
        allowed = [_of_prompt(prompt, count, top, engine) for engine in engines]
        assert 4 * count == len(prompt) and mine in allowed, f"{call}: prompt {number}"


def _of_prompt(prompt: bytes, count: int, top: int, weights: SimWeights) -> bytes:
    """The columns of the tokens of a prompt."""
    known = prompt_logprobs(prompt, count, weights)
    ids, chances = prompt_top_of(prompt, known, top, VOCAB)
    top_ids, top_logprobs = array("i", chain.from_iterable(ids)), array("f", chain.from_iterable(chances))
    return join_columns(array("f", known).tobytes(), top_ids.tobytes(), top_logprobs.tobytes(), top)


def _adapters_of(call: Call, message: Generated, i: int, start: int, sequence: Answered, known: Known) -> list[list[str]]:
    """Of each new token of a sequence, what its engine may have called the adapter."""
    entries = list(message.adapters[i]) if message.adapters else []
    told, tokens = f"{call}: sequence {i}: adapters {entries}", len(sequence.tokens) // 4
    at = [position for _, position in entries]
    assert at == sorted({*at}) and all(start <= one < start + tokens for one in at), told
    later = known.adapter in LATER
    assert later or not entries, f"{told} of an adapter that engines start with"
    assert not (later and tokens) or call.score.stream or at[:1] == [start], told
    names: list[list[str]] = []
    for place in range(start, start + tokens):
        versions = [version for version, position in entries if position <= place]
        names.append(known.names(versions[-1] if versions else None))
        assert names[-1], f"{told}: never committed, or earlier than what was said to be loaded"
    return names


def _check_sequence(
    call: Call, generating: Generating, i: int, sequence: Answered, weights: Sequence[Weights], names: Sequence[Sequence[str]]
) -> None:
    request, end, told = generating.request, sequence.end, f"{call}: sequence {i}: {sequence.end}, {sequence.spans}"
    may = (request.partial or generating.constrained) and sequence.tokens
    may = may or (request.version is not None and replaced(request.version, weights)) or request.adapter in LATER[:-1]
    assert end.reason != "interrupted" or (may and end.matched is None), told
    prompt, brought = call.prompts[i // request.n], generating.brought[i]
    whole = array("i", prompt + brought + sequence.tokens)
    routed = routes_of(whole) if request.routed_experts and end.reason in ("stop", "length") else b""
    assert sequence.routed_experts == routed, f"{told}: routed experts of {len(sequence.routed_experts) // 4} tokens"
    has, sampling = len(brought) // 4, request.sampling
    sampling = replace(
        sampling, max_new_tokens=sampling.max_new_tokens - has, min_new_tokens=max(0, sampling.min_new_tokens - has)
    )
    # Which of the samples of its prompt it is depends on how they were given to workers.
    samples = range(1 if brought else request.n)
    # A new run may bring other weights under the version of those before it: a span does not tell the two apart.
    of_version = {v: [j for j, one in enumerate(weights) if one.version == v] for v, _ in sequence.spans}
    allowed = [[j for j in of_version[v] if j >= call.floor] for v, count in sequence.spans for _ in range(count)]
    contents = [one.content for one in weights]
    wrong = ""
    for sample in samples:
        expected = SimSequence(prompt + brought, sampling, sample, VOCAB, END_EVERY)
        engine = SimWeights(0, has if generating.constrained else 0)
        wrong = _differs(expected, contents, allowed, sequence, engine, names)
        if not wrong:
            return
    raise AssertionError(f"{told}: {wrong}; committed: {of_version}, from number {call.floor} on")


def _differs(
    expected: SimSequence, contents: Sequence[int], allowed: Sequence[Sequence[int]], sequence: Answered, engine: SimWeights,
    names: Sequence[Sequence[str]],
) -> str:  # fmt: skip
    """How a sequence differs from what weights with these contents generate, or "".

    `allowed`: of each token, the numbers of the weights that may have computed it; later tokens are of later ones. `engine`:
    the rest of what its tokens depend on. `names`: of each token, what the engine may have called its adapter."""
    reason, matched, latest = "", None, 0
    chances = array("f", sequence.logprobs)
    for at, (token, numbers) in enumerate(zip(array("i", sequence.tokens), allowed, strict=True)):
        if reason:
            return f"more after token {at}, which ends it"
        for latest, name in ((number, name) for number in numbers if number >= latest for name in names[at]):
            then = copy(expected)
            drawn = then.next(engine._replace(seed=engine.seed + contents[latest]).with_adapter(name))
            if drawn.token == token and (not chances or array("f", [drawn.logprob])[0] == chances[at]):
                break
        else:
            return f"token {at} is {token}, which weights {numbers} do not generate after those before it"
        expected, reason, matched = then, drawn.reason, drawn.token if drawn.reason == "stop" else None
    end = sequence.end
    if end.reason == "interrupted":
        return f"it had ended: {reason}" if reason else ""
    return "" if (end.reason, end.matched) == (reason, matched) else f"the end should be {reason or 'later'} {matched}"
