"""What an engine says that it can do, and how its budgets shrink when engines of its group run out of memory."""

from typing import Literal

import msgspec

#: of a model
Kind = Literal["causal", "classifier", "embedding"]
#: Seconds of a forward of several requests on a GPU. A request of high priority waits for the one that runs and for one more.
#: Another device may need longer forwards, and says so in `Capabilities.forward_ms`.
FORWARD_S = 0.025
#: The longest forward that a worker may declare, in milliseconds.
MOST_FORWARD_MS = 10_000
#: Tokens and rows in flight, and tokens of a forward. What a worker has, and the pace that is learned of it, which may be
#: several times what it said, are in each status report, which has room for 64 bits.
MAX_BUDGET = 1 << 48
#: LoRA adapters of a worker, and characters of a name. Each status report and some errors have them all.
MAX_ADAPTERS, MAX_ADAPTER_NAME = 64, 128
#: Of 512 rows and 32,768 tokens in flight, 8 and 512 are left. A forward that is too large even then is not too large.
MOST_HALVINGS = 6


class Capabilities(msgspec.Struct, omit_defaults=True, frozen=True):
    """What a loaded engine can do, and the budgets inside which a batch is one forward pass.

    `kind`: `causal` scores label tokens, `classifier` returns the head's logits, `embedding` pools each row into one vector.
    `operations`: the requests of rows that it runs. `embedding`: size of an embedding (0: it does not embed); `dimensions`: the
    sizes that a request may ask for, from 1 to `embedding`; []: each of them. `context`: the longest query + item, in
    tokens, that is accepted. `labels`: columns of a classifier's scores (0 for causal). `hidden`: size of pooled hidden
    states, or of those of generated tokens (0: not available). `page`: lengths count rounded up to it. `batch_*`: budget of one
    batch; `inflight_*`: bound on the sum of all batches at this worker. A single row may exceed `batch_tokens`, never
    `inflight_tokens`. `max_item` more than 0: where a batch says so, the worker packs its rows, that is, joins them into
    sequences (`packing.py`), with no longer item. `packed_pace`, `packed_fixed_ms`: as `pace` and `fixed_ms`, of such batches.
    `pace`: tokens that the engine computes in `forward_ms` milliseconds, the time for which a request of high priority may be
    kept waiting by one forward of others (0: no matter); batches are filled and put in flight accordingly. Both are measured
    and may differ between workers of a group. The coordinator begins with this pace, and learns from the batches. `fixed_ms`:
    milliseconds of the smallest forward, of which a larger one takes about as many besides its tokens (0: not measured).
    `cached_query`: a query of so many tokens or more, shared by several rows, is computed once (0: none is); a batch of one
    request that has one may weigh `cached_tokens` instead of `batch_tokens`, every row counted in full. `halvings`: how often
    these budgets were halved (`halved`), because engines of the group ran out of memory. `separator`: the token that stands
    between query and item in every row of a cross-encoder; None for other models. `activation`: what is applied to the head's
    outputs. `reserved`: where the model's context length bounds `context`, how many of its tokens the engine keeps for itself.
    `operations`: what the worker can be asked for. `features`: what it has besides: `generate` may have `grammar`, `stop_text`,
    `logit_processors` and `reasoning_parser`, other operations `chat_template`, all of them `deterministic`. Of a worker that
    generates, `inflight_rows` are the sequences that it runs at once, and `inflight_tokens` its key-value pool. `adapters`: the
    names of the LoRA adapters that it generates with, in order; at most `MAX_ADAPTERS`. `experts`: [layers, k], where it says
    to which k experts each layer routes each token; [0, 0]: it does not. `sequences`, `sequence_tokens` and `sequence_context`:
    of a worker that generates and runs rows, what it generates at once, and the longest prompt and output together; its other
    budgets are those of rows then, and neither takes room of the other. 0: `inflight_rows`, `inflight_tokens` and `context`.
    `dtype`: of its weights. `parallel`: its sizes of tensor, pipeline, data and expert parallelism. `token_bytes`: the bytes of
    text that one token adds at most, where its tokenizer decodes; 0: it does not.
    """

    kind: Kind
    vocab: int
    context: int
    batch_tokens: int
    batch_rows: int
    inflight_tokens: int
    inflight_rows: int
    page: int = 1
    labels: int = 0
    hidden: int = 0
    model: str = ""
    engine: str = ""
    device: str = ""
    text: bool = True
    max_item: int = 0
    pace: int = 0
    cached_query: int = 0
    cached_tokens: int = 0
    halvings: int = 0
    separator: int | None = None
    activation: Literal["", "sigmoid"] = ""
    reserved: int = 0
    forward_ms: int = 25
    operations: tuple[str, ...] = ("score",)
    embedding: int = 0
    dimensions: list[int] = []
    features: tuple[str, ...] = ()
    adapters: tuple[str, ...] = ()
    experts: tuple[int, int] = (0, 0)
    sequences: int = 0
    sequence_tokens: int = 0
    sequence_context: int = 0
    dtype: str = ""
    parallel: tuple[int, int, int, int] = (1, 1, 1, 1)
    token_bytes: int = 0
    packed_pace: int = 0
    fixed_ms: int = 0
    packed_fixed_ms: int = 0

    @property
    def packs(self) -> bool:
        """Whether it packs rows where a batch says so."""
        return self.max_item > 0

    @property
    def mixed(self) -> bool:
        """Whether it generates and runs rows."""
        return self.sequences > 0

    @property
    def most_sequences(self) -> int:
        """Sequences that it generates at once."""
        return self.sequences or self.inflight_rows

    @property
    def most_sequence_tokens(self) -> int:
        """Tokens of all sequences that it generates at once."""
        return self.sequence_tokens or self.inflight_tokens

    @property
    def longest_sequence(self) -> int:
        """Tokens of a prompt and its output together."""
        return self.sequence_context or self.context


def halved(can: Capabilities, times: int) -> Capabilities:
    """`can` with every budget halved so many times; none is less than one row, or one page.

    The longest row that is accepted is never longer than all tokens in flight, and shrinks with them. The longest sequence of a
    worker that only generates stays: its key-value pool has room, and the engine computes long prompts in pieces.
    """
    for _ in range(times):
        page = can.page
        least = -(-can.context // page) * page if can.operations == ("generate",) else page
        batch, inflight, cached = (
            min(tokens, max(least, tokens // 2 // page * page))
            for tokens in (can.batch_tokens, can.inflight_tokens, can.cached_tokens)
        )
        context = min(can.context, inflight)
        longest = -(-can.sequence_context // page) * page
        sequence_tokens = min(can.sequence_tokens, max(longest, can.sequence_tokens // 2 // page * page))
        can = msgspec.structs.replace(
            can,
            context=context,
            reserved=can.reserved if context == can.context else 0,
            batch_tokens=batch,
            batch_rows=max(1, can.batch_rows // 2),
            inflight_tokens=inflight,
            inflight_rows=max(1, can.inflight_rows // 2),
            max_item=min(can.max_item, context),
            cached_tokens=max(batch, cached) if can.cached_query else 0,
            halvings=can.halvings + 1,
            sequences=min(can.sequences, max(1, can.sequences // 2)),
            sequence_tokens=sequence_tokens,
        )
    return can
