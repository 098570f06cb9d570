"""What a sim engine is told: its sizes, its costs, its weights, and what shall go wrong."""

from typing import Any, Literal, get_args

import msgspec

from enginepool.conversion import TOML, value_at, wrong_type
from enginepool.protocol.errors import located
from enginepool.protocol.messages import Kind

FaultKind = Literal[
    "crash",
    "abort",
    "hang",
    "block",
    "slow",
    "error",
    "out_of_memory",
    "wrong_rows",
    "lie_forwards",
    "exit_on_load",
    "crash_on_load",
    "refuse_on_load",
    "block_on_load",
    "fail_on_take",
    "crash_on_take",
    "abort_on_take",
    "hang_on_take",
    "slow_on_take",
]


class Fault(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Something that goes wrong, at the n-th batch that this engine is given (from 1), or in any batch with a token id in it.
    Without either: at every batch. `*_on_take`: at the n-th new weights. An engine that generates has tasks in place of
    batches, and may have it go wrong at its n-th step instead, for all sequences that run.

    crash: the engine dies with a reason. abort: the process is killed without a word. hang: the engine never answers again.
    block: the process's main thread stands still for `seconds`. slow: the batch takes `seconds` more. error: the engine refuses
    the parts that have the token, or the whole batch. wrong_rows: a row of the first part is missing. lie_forwards: one too
    many is reported. out_of_memory: a batch of more than `rows` rows kills the engine; without `at_batch` so does its start,
    where so many may be in flight. exit_on_load, crash_on_load, refuse_on_load, block_on_load: while it loads, the process
    exits, the engine dies, says that it can never start like this, or the main thread stands still. fail_on_take: new weights
    are refused and the old ones stay; crash_on_take, abort_on_take, hang_on_take: as crash, abort and hang, in place of taking
    them; slow_on_take: they take `seconds` more.
    """

    kind: FaultKind
    at_batch: int | None = None
    at_take: int | None = None
    at_step: int | None = None
    on_token: int | None = None
    seconds: float = 1.0
    rows: int = 0


class SimOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Settings of the sim engine; unknown keys are refused. Times in seconds; sizes in tokens and rows.

    A batch costs `forward_s` + rows * `row_s` + tokens * `token_s`, times 1 ± `jitter` drawn from `seed`. `labels`: columns of
    a classifier. `embedding`: size of its embeddings; it scores as well, unless its kind is `embedding`. `inflight_*` default
    to the batch budget times the forwards in flight. `tensors`: what a weight update brings,
    as a manifest ([name, dtype, shape] each); empty: it takes no updates. One costs `take_s`. `held`: the dtype in which a real
    engine would hold them; empty: their own. `separator`: the engine is a cross-encoder, and this token stands behind both
    texts of a pair. `only_at_start`: it takes weights only when it starts, as an engine
    with quantized weights does. An engine that generates runs `inflight_rows` sequences at once, all of them together in each
    step, which costs as much as a batch of them. One that runs rows as well runs `sequences`, of `sequence_tokens` in all.
    `end_every`: one in so many tokens ends a sequence; 0: none does.
    `chat_template`: it makes a text of chats. `multimodal`: an engine that generates takes images, videos and audio: its tokens
    depend on their bytes. `cache_tokens`: of its prefix cache. `kv_events`: its blocks are those of the pool's affinity, and it
    reports them. `adapters`: names of the LoRA adapters that it generates with; a further one takes `adapter_s`. `experts`:
    [layers, k] of routed experts, where it generates. `sleep_loses_weights`: the weights are lost when their memory is
    released, as on a GPU without a copy on the host.
    """

    kind: Kind = "causal"
    vocab: int = 151_936
    context: int = 32_768
    labels: int = 1
    hidden: int = 0
    experts: tuple[int, int] = (0, 0)
    embedding: int = 0
    batch_tokens: int = 16_384
    batch_rows: int = 256
    inflight_tokens: int | None = None
    inflight_rows: int | None = None
    version: int = 0
    seed: int = 0
    load_s: float = 0.0
    forward_s: float = 0.0
    row_s: float = 0.0
    token_s: float = 0.0
    jitter: float = 0.0
    take_s: float = 0.0
    separator: int | None = None
    tensors: list[Any] = []
    held: str = ""
    only_at_start: bool = False
    end_every: int = 100
    chat_template: bool = True
    multimodal: bool = True
    cache_tokens: int = 65_536
    kv_events: bool = False
    sequences: int = 64
    sequence_tokens: int = 65_536
    adapters: list[str] = []
    sleep_loses_weights: bool = False
    adapter_s: float = 0.0
    faults: list[Fault] = []


def read_options(options: dict[str, Any]) -> SimOptions:
    """The options of a configuration.

    Raises:
        ValueError: an unknown key or an impossible value; one line that names it.
    """
    try:
        read = msgspec.convert(options, SimOptions)
    except msgspec.ValidationError as error:
        key, what = located(str(error))
        allowed, _ = wrong_type(what, TOML)
        if what.startswith("Invalid enum value"):
            allowed = f"one of {', '.join(get_args(Kind if key == 'kind' else FaultKind))}"
        why = f"{key} = {value_at(options, key)!r:.80}: must be {allowed}" if allowed and key else str(error)
        raise ValueError(f"options of engine sim: {why}") from None
    for key in ("vocab", "context", "labels", "batch_tokens", "batch_rows", "sequences", "sequence_tokens"):
        if getattr(read, key) < 1:
            raise ValueError(f"options of engine sim: {key} = {getattr(read, key)}: must be more than 0")
    if read.separator is not None and not 0 <= read.separator < read.vocab:
        raise ValueError(f"options of engine sim: separator = {read.separator}: must be a token id, 0 to {read.vocab - 1}")
    if read.kind == "embedding" and not read.embedding:
        raise ValueError("options of engine sim: embedding = 0: must be more than 0 where kind is 'embedding'")
    if not (min(read.experts) > 0 or read.experts == (0, 0)):
        raise ValueError(
            f"options of engine sim: experts = {list(read.experts)}: must be [layers, k], each more than 0, or [0, 0]"
        )
    for key in (
        "hidden",
        "embedding",
        "end_every",
        "cache_tokens",
        "version",
        "seed",
        "load_s",
        "forward_s",
        "row_s",
        "token_s",
        "jitter",
        "take_s",
        "adapter_s",
    ):
        if not 0 <= getattr(read, key) < 1 << 62:
            raise ValueError(f"options of engine sim: {key} = {getattr(read, key)}: must not be negative")
    return read
