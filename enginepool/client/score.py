"""`Pool.score` and `Pool.score_pairs`: the calls, their arguments in Python's names, and their result."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Unpack

from enginepool.client.arguments import Ids, check_options
from enginepool.client.payload import (
    Payload,
    check_label_texts,
    check_labels,
    check_softmax,
    check_temperature,
    encode_pairs,
    encode_shared,
)
from enginepool.client.results import Floats, RequestTimings, RequestUsage, figures, float_frame
from enginepool.client.row_calls import RowCalls, TruncatedOptions, flag
from enginepool.errors import Malformed
from enginepool.protocol.frames import Buffer
from enginepool.protocol.messages import Result, Score

#: What the wire calls the arguments of `score` and `score_pairs`.
_SCORE_NAMES = {
    "labels": "label_token_ids",
    "label_texts": "labels",
    "softmax": "apply_softmax",
    "hidden": "return_pooled_hidden_states",
    "timeout_ms": "timeout",
}
_PAIR_NAMES = {**_SCORE_NAMES, "query": "prompts", "items": "responses"}


class ScoreOptions(TruncatedOptions, total=False):
    """The options of `Pool.score` and `Pool.score_pairs`, which say what each one does."""

    label_token_ids: Ids | None
    labels: Sequence[str] | None
    apply_softmax: bool
    item_first: bool
    return_pooled_hidden_states: bool
    logprobs: bool
    raw: bool
    temperature: float


@dataclass(frozen=True, slots=True, eq=False)
class ScoreResult:
    """The answer of a score request.

    Attributes:
        scores: float32 [items, labels]. CausalLM: the probability of each label token, in the order asked. Classifiers and
            reward models: one column for each output of the head. With `logprobs` the natural logarithms of probabilities.
        hidden: pooled hidden states, float32 [items, size], if asked for.
        version: version of the weights that computed every row.
        forwards: for each batch that held rows of this request, the forward passes that it took, as measured in the engine:
            1 is whole.
        timings: time in the queue and in the engine.
        usage: rows and tokens.
        truncated: how many rows were cut.
    """

    scores: Floats
    hidden: Floats | None
    version: int
    forwards: tuple[int, ...]
    timings: RequestTimings
    usage: RequestUsage
    truncated: int = 0


class ScoreCalls(RowCalls):
    """Base of `Pool`."""

    async def score(
        self,
        query: str | Ids,
        items: Sequence[str] | Sequence[Ids],
        **options: Unpack[ScoreOptions],
    ) -> ScoreResult:
        """Score each item after one query. Query and items are all text, or all token ids.

        A CausalLM gives the probability of each label token after query + item; a classifier or reward model the outputs of its
        head. Items of one call run as one forward pass if they fit one batch of a worker, else as few whole batches.

        A cross-encoder (BERT or XLM-RoBERTa with a head) scores as `CrossEncoder` of sentence-transformers does. Texts are
        joined as its tokenizer joins a pair, and truncated to what the model takes; an empty query is no text of a pair. A
        single output goes through sigmoid, unless the model's configuration names another function. Token ids are not changed:
        every row needs the separator between query and item.

        Args:
            query: a text, or token ids (a sequence of ints, or a one-dimensional integer array).
            items: texts, or token ids of each item (also a two-dimensional array: a row each).
            label_token_ids: the tokens to score; CausalLM only, at most 4096. Default: None.
            labels: the same tokens by their texts (`["yes", "no"]`), in place of `label_token_ids`. The model's tokenizer makes
                one token of each, or the error names its tokens. Default: None.
            apply_softmax: CausalLM: normalize over the labels alone. Classifiers: softmax over the outputs. Default: False.
            temperature: `apply_softmax` divides logits by it, 0.001 to 1000: the lower, the more the best label stands out.
                Default: 1.0.
            item_first: rows are item + query. Default: False.
            return_pooled_hidden_states: classifiers only. Default: False.
            group: may be left out where the pool has one group.
            priority: −1000 to 1000; larger runs first. Default: 0.
            timeout: seconds to the answer, after which the call ends with DeadlineExceeded and what waits is not run. Default:
                None, which is no limit.
            retry_busy: True, the default: wait and try again when the pool is full; else Busy is raised.
            min_version: the oldest weights that may answer; the request waits in the pool until they are there. Default: 0.
            version: the only weights that may answer. A later version is waited for; after an earlier one, or once a newer one
                is committed, the call ends with VersionPassed. Default: None, which is any.
            logprobs: natural logarithms instead of probabilities, computed as such: in float32 a probability below 1e-45 is 0,
                and its logarithm -inf. Classifiers: only with `apply_softmax`, or where the head's outputs are probabilities.
                Default: False.
            raw: a cross-encoder takes rows as they are: token ids without a separator, texts joined without one. Default:
                False.
            truncation: of rows that are longer than the model takes: `error` refuses them; `left` and `right` cut their item at
                its beginning or end, never the query. Default: None, which refuses them too, except that texts for a
                cross-encoder are cut as its tokenizer cuts pairs. `truncated` of the result counts rows that were cut.

        Returns:
            scores float32 [items, labels], and what it took; see `ScoreResult`.

        Raises:
            BadRequest: an argument cannot be served; `field` names it, `limit` the limit.
            EnginepoolError: everything else that can happen; see `enginepool.errors`.

        Cancelling the task that awaits it takes the request back.
        """
        check_options("score", options, ScoreOptions)
        return await self._score(encode_shared(query, items), _SCORE_NAMES, options)

    async def score_pairs(
        self,
        prompts: Sequence[str] | Sequence[Ids],
        responses: Sequence[str] | Sequence[Ids],
        **options: Unpack[ScoreOptions],
    ) -> ScoreResult:
        """Score each response after its own prompt, as one request: row i is prompts[i] + responses[i].

        Everything else is as in `score`.
        """
        check_options("score_pairs", options, ScoreOptions)
        return await self._score(encode_pairs(prompts, responses), _PAIR_NAMES, options)

    async def _score(self, payload: Payload, names: Mapping[str, str], options: ScoreOptions) -> ScoreResult:
        specs, frames = payload
        score = Score(
            id=0,
            frames=specs,
            labels=check_labels(options.get("label_token_ids")),
            label_texts=check_label_texts(options.get("labels"), options.get("label_token_ids")),
            softmax=flag(options, "apply_softmax"),
            item_first=flag(options, "item_first"),
            hidden=flag(options, "return_pooled_hidden_states"),
            logprobs=flag(options, "logprobs"),
            raw=flag(options, "raw"),
            temperature=check_temperature(options.get("temperature", 1.0), softmax=flag(options, "apply_softmax")),
        )
        check_softmax(score.softmax, score.labels or score.label_texts)
        return _read(*await self._submit(score, frames, names, options))


def _read(result: Result, frames: Sequence[Buffer]) -> ScoreResult:
    """The result in an answer whose frames are of the announced lengths; the arrays are the caller's to change.

    Raises:
        Malformed: there are no scores, or they are no numbers.
    """
    scores = float_frame(result, frames, "scores")
    if scores is None or scores.ndim != 2:
        raise Malformed("the answer holds no scores float32 [items, labels]", field="scores")
    hidden = float_frame(result, frames, "hidden")
    return ScoreResult(scores, hidden, *figures(result), result.truncated)
