"""`Pool.score` and `Pool.score_pairs`: the calls, their arguments in Python's names, and their result."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Unpack, cast

from enginepool.client.arguments import Ids, bad, check_options
from enginepool.client.chats import ChatDict, check_template, encode_chats
from enginepool.client.payload import (
    Payload,
    check_label_texts,
    check_labels,
    check_softmax,
    check_temperature,
    encode_pairs,
    encode_row_labels,
    encode_shared,
)
from enginepool.client.results import Floats, RequestTimings, RequestUsage, figures, float_frame
from enginepool.client.row_calls import ROW_NAMES, RowCalls, TruncatedOptions, flag
from enginepool.errors import Malformed
from enginepool.protocol.frames import Buffer
from enginepool.protocol.messages import Result, Score

#: What the wire calls the arguments of `score` and `score_pairs`.
_SCORE_NAMES = {
    "labels": "label_token_ids",
    "label_texts": "labels",
    "softmax": "apply_softmax",
    "hidden": "return_pooled_hidden_states",
    **ROW_NAMES,
}
_CHAT_NAMES = {**_SCORE_NAMES, "items": "messages", "chat": "chat_template_kwargs"}
_PAIR_NAMES = {**_SCORE_NAMES, "query": "prompts", "items": "responses"}


class ScoreOptions(TruncatedOptions, total=False):
    """The options of `Pool.score` and `Pool.score_pairs`, which say what each one does."""

    label_token_ids: Ids | Sequence[Ids] | None
    labels: Sequence[str] | None
    apply_softmax: bool
    item_first: bool
    return_pooled_hidden_states: bool
    logprobs: bool
    raw: bool
    temperature: float


class ChatScoreOptions(ScoreOptions, total=False):
    """The options of `Pool.score` alone."""

    messages: Sequence[Sequence[ChatDict]] | None
    add_generation_prompt: bool
    chat_template_kwargs: Mapping[str, bool | int | float | str | None] | None


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
        workers: names of the workers that computed it, as in `enginepool status`; of very many the first ones.
    """

    scores: Floats
    hidden: Floats | None
    version: int
    forwards: tuple[int, ...]
    timings: RequestTimings
    usage: RequestUsage
    truncated: int = 0
    workers: tuple[str, ...] = ()


class ScoreCalls(RowCalls):
    """Base of `Pool`."""

    async def score(
        self,
        query: str | Ids | None = None,
        items: Sequence[str] | Sequence[Ids] | None = None,
        **options: Unpack[ChatScoreOptions],
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
            messages: in place of query and items, chats: of each a list of messages {"role", "content"}, of which the model's
                own chat template makes a text. At most 4 MiB as JSON and 16,384 messages in all.
            add_generation_prompt: the text of a chat ends where the model's answer would begin. Default: True.
            chat_template_kwargs: further names of the template, such as {"enable_thinking": False}. Default: None.
            label_token_ids: the tokens to score; CausalLM only, at most 4096. A list for each item: as many of each.
            labels: the same tokens by their texts, such as ["yes", "no"]: one token each, or the error names its tokens.
            apply_softmax: CausalLM: normalize over the labels alone. Classifiers: softmax over the outputs. Default: False.
            temperature: `apply_softmax` divides logits by it, 0.001 to 1000. Default: 1.0.
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
            raw: a cross-encoder takes ids without a separator, and texts are joined without one. Default: False.
            truncation: of rows that are longer than the model takes: `error` refuses them; `left` and `right` cut their item
                there, never the query. Default: None: as `error`, but texts for a cross-encoder are cut as pairs are.

        Returns:
            scores float32 [items, labels], and what it took; see `ScoreResult`.

        Raises:
            BadRequest: an argument cannot be served; `field` names it, `limit` the limit.
            EnginepoolError: everything else that can happen; see `enginepool.errors`.

        Cancelling the task that awaits it takes the request back.
        """
        check_options("score", options, ChatScoreOptions)
        return await self._score(*_rows(query, items, options), options)

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
        labels = options.get("label_token_ids")
        if (own := encode_row_labels(labels, specs[-1].shape[0])) is not None:
            specs, frames, labels = [*specs, *own[0]], (*frames, *own[1]), None
        score = Score(
            id=0,
            frames=specs,
            labels=check_labels(labels),
            label_texts=check_label_texts(options.get("labels"), options.get("label_token_ids")),
            softmax=flag(options, "apply_softmax"),
            item_first=flag(options, "item_first"),
            hidden=flag(options, "return_pooled_hidden_states"),
            logprobs=flag(options, "logprobs"),
            raw=flag(options, "raw"),
            temperature=check_temperature(options.get("temperature", 1.0), softmax=flag(options, "apply_softmax")),
        )
        if names is _CHAT_NAMES:
            score.chat = check_template(options.get("add_generation_prompt", True), options.get("chat_template_kwargs"))
        check_softmax(score.softmax, score.columns(()))
        return _read(*await self._submit(score, frames, names, options))


def _rows(query: object, items: object, options: ChatScoreOptions) -> tuple[Payload, Mapping[str, str]]:
    """The frames of `score`, and what the wire calls its arguments: query and items, or messages, but never both."""
    if (messages := options.get("messages")) is None:
        for name in ("add_generation_prompt", "chat_template_kwargs"):
            if name in options:
                raise bad(name, f"{name}: given without messages")
        if query is None and items is None:
            raise bad("query", "query: missing; give query and items, or messages")
        # What is None is refused in its words.
        return encode_shared(cast("Ids", query), cast("Sequence[Ids]", items)), _SCORE_NAMES
    for name, value in (("query", query), ("items", items)):
        if value is not None:
            raise bad(name, f"{name}: messages are given, too; give query and items, or messages")
    if options.get("truncation") == "right":
        text = "truncation: 'right' would cut where the answer of a chat begins; 'left' cuts its beginning"
        raise bad("truncation", text, "left")
    return encode_chats(messages), _CHAT_NAMES


def _read(result: Result, frames: Sequence[Buffer]) -> ScoreResult:
    """The result in an answer whose frames are of the announced lengths; the arrays are the caller's to change.

    Raises:
        Malformed: there are no scores, or they are no numbers.
    """
    scores = float_frame(result, frames, "scores")
    if scores is None or scores.ndim != 2:
        raise Malformed("the answer holds no scores float32 [items, labels]", field="scores")
    hidden = float_frame(result, frames, "hidden")
    return ScoreResult(scores, hidden, *figures(result))
