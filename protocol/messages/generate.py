"""Messages of generation: the request, its tokens as they come, its final answer, and the tasks of workers."""

from typing import Annotated, Literal

import msgspec

from enginepool.protocol.basis import MAX_FRAMES, FrameSpec, Message, TaskId
from enginepool.protocol.capabilities import MAX_ADAPTER_NAME
from enginepool.protocol.messages.media import MAX_MEDIA, Medium
from enginepool.protocol.messages.requests import Timings

#: Blocks in one `prefix_blocks`.
MAX_REPORTED_BLOCKS = 4096
#: Sequences of one request: its prompts, times the samples of each.
MAX_SEQUENCES = 4096
#: Tokens that a sequence may be asked for.
MAX_NEW_TOKENS = 1 << 20
#: Stop strings, stop ids, or biases of one request; characters of a stop string or a pattern; bytes of a grammar.
MAX_STOPS, MAX_STOP, MAX_GRAMMAR = 256, 1024, 65_536
#: Stop patterns of one request, and UTF-8 bytes of one: what SGLang takes.
MAX_STOP_REGEX, MAX_PATTERN = 32, 256
#: Characters of all stop strings, patterns and grammars of one request together.
MAX_SAMPLING_TEXT = 65_536
#: Ids of `allowed_token_ids`, or of `disallowed_token_ids`.
MAX_MASK = 4096
#: UTF-8 bytes of `matched`, which is cut: an answer has one for each sequence in its header.
MAX_MATCHED = 128
#: Tokens of a stream that a client may leave unread.
MAX_CREDIT, DEFAULT_CREDIT = 65_536, 1024

#: Most probable tokens that may be asked for in the place of each generated token.
MAX_TOP_LOGPROBS = 20

#: Why a sequence ended: a stop token, string or pattern; as long as was asked for; or it could not be continued.
Ended = Literal["stop", "length", "interrupted"]

_Text = Annotated[str, msgspec.Meta(max_length=MAX_STOP)]
_Grammar = Annotated[str, msgspec.Meta(max_length=MAX_GRAMMAR)] | None
_Mask = Annotated[list[int], msgspec.Meta(max_length=MAX_MASK)] | None


class TemperatureSchedule(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True, gc=False):
    """[initial, final, tokens]: the temperature goes from `initial`, at position 0 of the output, in equal steps to `final`, at
    position `tokens`, and stays there."""

    initial: float
    final: float
    tokens: int

    def at(self, position: int) -> float:
        """The temperature of the token at this position."""
        done = min(position / self.tokens, 1.0)
        return self.initial * (1.0 - done) + self.final * done


class Sampling(msgspec.Struct, omit_defaults=True, frozen=True, forbid_unknown_fields=True, gc=False):
    """How tokens are chosen, and where a sequence ends: SGLang's sampling parameters by their own names.

    `max_new_tokens` counts the tokens that the request brings along. At most one of `json_schema`, `regex`, `ebnf` and
    `structural_tag` is given. `logit_bias`: by token id, written as text. `sampling_seed`: equal requests with equal seeds get
    equal tokens, where the engine supports it.

    `allowed_token_ids`: no other token is chosen; `disallowed_token_ids`: none of these is; at most one of the two.
    `temperature_schedule`: in place of `temperature`. `require_reasoning`: the grammar begins after the thoughts of the model.
    """

    max_new_tokens: int = 128
    min_new_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    stop: Annotated[list[_Text], msgspec.Meta(max_length=MAX_STOPS)] = []
    stop_token_ids: Annotated[list[int], msgspec.Meta(max_length=MAX_STOPS)] = []
    stop_regex: Annotated[list[_Text], msgspec.Meta(max_length=MAX_STOP_REGEX)] = []
    ignore_eos: bool = False
    logit_bias: Annotated[dict[str, float], msgspec.Meta(max_length=MAX_STOPS)] = {}
    sampling_seed: int | None = None
    json_schema: _Grammar = None
    regex: _Grammar = None
    ebnf: _Grammar = None
    structural_tag: _Grammar = None
    allowed_token_ids: _Mask = None
    disallowed_token_ids: _Mask = None
    temperature_schedule: TemperatureSchedule | None = None
    require_reasoning: bool = False

    @property
    def masked(self) -> list[int]:
        """The ids of its mask, of either kind."""
        return self.allowed_token_ids or self.disallowed_token_ids or []


class SequenceEnd(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """[sequence, reason, matched]: why a sequence ended; the token id, or the text, that it stopped at."""

    sequence: int
    reason: Ended
    matched: int | str | None = None


class Generate(Message, tag="generate"):
    """Continue prompts. Frames: `items` (the prompts), int32 token ids or utf8 text, and `item_lengths` uint32; then, if the
    request brings tokens along, `output` int32 and `output_lengths` uint32 [prompts × n]: each sequence goes on after them;
    then, if it has media, `media` uint8 and `media_lengths` uint32 [media].

    `n`: sequences for each prompt; sequence s belongs to prompt s // n. `stream`: tokens are sent as they come (`tokens`), and
    all in the final answer. `credit`: how many of them the client leaves unread at most. `logprobs`: each token has the
    logarithm of its probability; `top_logprobs`: and so many of the most probable tokens have one, in its place.
    `prompt_logprobs`: so have the tokens of each prompt, given those before, and the most probable ones in their place.
    `partial`: a sequence whose worker is lost, or
    that weights interrupt, ends as `interrupted`, instead of going on elsewhere. `ended`: sequences that have all their tokens
    in `output`. `media`: images, videos and audio of prompts, those of one prompt after the other.
    `adapter`: the LoRA adapter that generates them; "": the model alone.
    `hidden_states`: each token has the hidden state from which it was chosen. `routed_experts`: the answer says to which
    experts each layer routed each token, of prompt and output but the last one; not with `stream` or `media`.
    """

    id: int
    frames: Annotated[list[FrameSpec], msgspec.Meta(max_length=MAX_FRAMES)]
    group: str = ""
    n: int = 1
    sampling: Sampling = Sampling()
    stream: bool = False
    credit: int = DEFAULT_CREDIT
    logprobs: bool = False
    top_logprobs: int = 0
    prompt_logprobs: bool = False
    partial: bool = False
    ended: list[SequenceEnd] = []
    priority: int = 0
    timeout_ms: int | None = None
    min_version: int = 0
    version: int | None = None
    media: Annotated[list[Medium], msgspec.Meta(max_length=MAX_MEDIA)] = []
    adapter: Annotated[str, msgspec.Meta(max_length=MAX_ADAPTER_NAME)] = ""
    hidden_states: bool = False
    routed_experts: bool = False

    @property
    def values(self) -> int:
        """What its header holds that can be much, in numbers: a text counts by its length."""
        s = self.sampling
        texts = [*s.stop, *s.stop_regex, *(end.matched for end in self.ended), s.json_schema, s.regex, s.ebnf, s.structural_tag]
        numbers = len(s.stop_token_ids) + len(s.masked) + 4 * (len(s.logit_bias) + len(self.media))
        return numbers + sum(2 + len(text) // 10 for text in texts if isinstance(text, str))

    @property
    def width(self) -> int:
        """Elements of each token in its answer, besides its id and its hidden state."""
        return self.logprobs + 2 * self.top_logprobs

    @property
    def columns(self) -> int:
        """Elements of a sequence in its answer, without hidden states."""
        return self.sampling.max_new_tokens * (1 + self.width)

    @property
    def prompt_width(self) -> int:
        """Elements of each token of a prompt in its answer."""
        return 1 + 2 * self.top_logprobs if self.prompt_logprobs else 0

    @property
    def prompt_columns(self) -> int:
        """Elements of all prompts in its answer. A text has at most as many ids as bytes, and one more."""
        return (self.frames[0].shape[0] + self.frames[1].shape[0]) * self.prompt_width


class Credit(Message, tag="credit"):
    """The client has taken so many tokens of the stream `id`, of all its sequences together, since it last sent `generate`."""

    id: int
    taken: int


class Run(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """[id, sequence, at, count, version]: the next `count` tokens of the frames are those of a sequence from position `at` on,
    and weights of this version computed them."""

    id: int
    sequence: int
    at: int
    count: int
    version: int


class StreamEnd(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """[id, sequence, reason, matched]: a sequence of the stream `id` has ended, as in `SequenceEnd`."""

    id: int
    sequence: int
    reason: Ended
    matched: int | str | None = None


class Tokens(Message, tag="tokens"):
    """Tokens of streams of this client. Frames: `tokens` int32 [sum of the counts]; then `logprobs` float32 [as many], if one
    of these requests asked for them: NaN at tokens of the others. Requests with `top_logprobs` = k share a message only with
    each other: then `top_ids` int32 [tokens, k] and `top_logprobs` float32 [tokens, k]. So do requests with `hidden_states`:
    then `hidden_states` float32 [tokens, size].

    `prompts`: [id, prompt, count]; then the last frames are `prompt_logprobs` float32 [sum of the counts], and with
    `top_logprobs` `prompt_top_ids` int32 and `prompt_top_logprobs` float32 [as many, k].
    """

    runs: list[Run]
    frames: list[FrameSpec]
    ended: list[StreamEnd] = []
    prompts: list[tuple[int, int, int]] = []


class GenerationUsage(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """[sequences, prompt_tokens, output_tokens, cached_tokens]: tokens of the prompts, each counted once, and of all sequences,
    with those that the request brought along. `cached_tokens`: of the prompts, those that engines had in their prefix cache."""

    sequences: int
    prompt_tokens: int
    output_tokens: int
    cached_tokens: int = 0


class Generated(Message, tag="generated"):
    """The final answer of a `generate`. Frames: `output` int32, `output_lengths` uint32 [sequences], then `logprobs` float32
    [tokens], `top_ids` int32 and `top_logprobs` float32 [tokens, k], `hidden_states` float32 [tokens, size], `routed_experts`
    int16 [sum of `experts` × layers, k], and those of `prompts` as in `Tokens`, if asked for. A sequence has the tokens from
    `starts` on: those before it the request brought along.

    `ended` and `spans`: of each sequence, in order. A span is [version, count]: so many of these tokens, in order, were
    computed by weights of this version. `version`: the highest of them. `prompts`: [prompt, count], of which some tokens were
    generated. `workers`: the names of those that generated tokens of it. `places`: of each sequence, in order,
    [worker, position]: its tokens from this position on were generated by this one of `workers`; empty: all by the first.
    `experts`: of each sequence, in order, the tokens in `routed_experts`; 0: they are not known. `adapters`: of each sequence,
    in order, [version, position]: its tokens from this position on were generated by this version of the adapter; 0: one that
    the engines were started with; empty: no adapter that was loaded later.
    """

    id: int
    version: int
    usage: GenerationUsage
    timings: Timings
    ended: list[SequenceEnd]
    spans: list[list[tuple[int, int]]]
    frames: list[FrameSpec]
    starts: list[int] = []
    prompts: list[tuple[int, int]] = []
    seq: int = 0
    final: bool = True
    workers: list[str] = []
    places: list[list[tuple[int, int]]] = []
    experts: list[int] = []
    adapters: list[list[tuple[int, int]]] = []


class StartGeneration(Message, tag="start"):
    """Continue the frame `prompt` int32: `n` sequences. The first token of each is at position `at` of its output, and
    `sampling.max_new_tokens` counts from there. `prompt_logprobs`: of so many of its first tokens, or 0. `media`: those of the
    prompt, with their frames `media` and `media_lengths`. `adapter`: the name of the engine's: that in
    `Generate`, or of one that was loaded later, NAME@VERSION."""

    task: TaskId
    frames: list[FrameSpec]
    sampling: Sampling
    n: int = 1
    at: int = 0
    logprobs: bool = False
    top_logprobs: int = 0
    prompt_logprobs: int = 0
    priority: int = 0
    media: list[Medium] = []
    adapter: Annotated[str, msgspec.Meta(max_length=MAX_ADAPTER_NAME)] = ""
    hidden_states: bool = False
    routed_experts: bool = False


class StopGeneration(Message, tag="stop"):
    """These tasks, by their counters, are no longer wanted: their sequences end within one step, without an answer."""

    epoch: int
    tasks: list[int]


class Step(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """[task, sequence, at, count, reason, matched]: the next `count` tokens of the frames continue a sequence of the task with
    this counter at position `at`. `reason` is set once the sequence has ended; `error`: the engine could not run it, and
    `refused`: it cannot do what the request asks; then `matched` says why."""

    task: int
    sequence: int
    at: int
    count: int
    reason: Literal["", "stop", "length", "error", "refused"] = ""
    matched: int | str | None = None


#: what `reason` says of a task that failed
STEP_FAILED = ("error", "refused")


class GenerationProgress(Message, tag="progress"):
    """What an engine generated since the last one: of all its streams, in one message; those with `top_logprobs` = k are in one
    of their own, and so are those with `hidden_states`. Frames: as in `Tokens`. All by weights of `version`.

    `cached`: [task, tokens], once with the first tokens of a task: how many tokens of its prompt the engine had in its prefix
    cache. `prompts`: [task, count], once with them, if asked for. `lengths`: [task, tokens], once with them, if its prompt has
    media: how many tokens the prompt has in the engine. `experts`: [task, sequence, tokens], once with the end of a sequence,
    if asked for; then `routed_experts` is before `prompt_logprobs`, as in `Generated`.
    """

    epoch: int
    version: int
    steps: list[Step]
    frames: list[FrameSpec]
    cached: list[tuple[int, int]] = []
    prompts: list[tuple[int, int]] = []
    lengths: list[tuple[int, int]] = []
    experts: list[tuple[int, int, int]] = []


class PrefixBlocks(Message, tag="prefix_blocks"):
    """What has changed in the prefix cache of an engine: `cleared`, it is empty; then without the blocks `removed`, then with
    `stored`. Blocks are numbers of `prefix_blocks.py`. Frames: `stored` uint64 [n, 2], the block before it and the block, and
    `removed` uint64 [m], together at most MAX_REPORTED_BLOCKS."""

    frames: list[FrameSpec]
    cleared: bool = False
