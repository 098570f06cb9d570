"""`Pool.similarity` and `Pool.rerank`: documents by their relevance to a query, from embeddings or scores."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Unpack

import numpy as np
import numpy.typing as npt

from enginepool.client.arguments import Ids, bad, check_int, check_options, check_timeout
from enginepool.client.embed import EmbedCalls, EmbedResult, instructed
from enginepool.client.payload import check_label_texts, check_labels, check_rows
from enginepool.client.results import Floats
from enginepool.client.row_calls import TruncatedOptions
from enginepool.client.score import ScoreCalls, ScoreResult
from enginepool.errors import PoolDown, UnknownGroup
from enginepool.protocol.messages import GroupLimits, Status, StatusReport


class SimilarityOptions(TruncatedOptions, total=False):
    """The options of `Pool.similarity`, which says what each one does."""

    instruction: str | None


class RerankOptions(SimilarityOptions, total=False):
    """The options of `Pool.rerank`, which says what each one does."""

    label_token_ids: Ids | None
    labels: Sequence[str] | None
    top_n: int | None


@dataclass(frozen=True, slots=True, eq=False)
class RerankResult:
    """The answer of `Pool.rerank`.

    Attributes:
        order: int64 [top_n]: places of the documents, the most relevant first; of equals the earlier one.
        scores: float32 [documents], in the order of the documents; more is more relevant.
        method: `cross-encoder`, `labels` or `embeddings`.
        version: version of the weights that computed them.
        workers: names of the workers that computed them, as in `ScoreResult`.
    """

    order: npt.NDArray[np.int64]
    scores: Floats
    method: str
    version: int
    workers: tuple[str, ...] = ()


class RerankCalls(ScoreCalls, EmbedCalls):
    """The calls of a pool that compare texts."""

    async def similarity(
        self,
        queries: Sequence[str] | Sequence[Ids],
        documents: Sequence[str] | Sequence[Ids],
        **options: Unpack[SimilarityOptions],
    ) -> Floats:
        """The cosine of each query's embedding and each document's: float32 [queries, documents], in one request.

        Args:
            queries, documents: as `inputs` of `embed`: all texts, or all token ids.
            instruction: a text that goes before each query, as in `embed`; queries are texts, then. Default: None.
            truncation: as in `embed`, of queries and documents.
            group, priority, timeout, retry_busy, min_version, version: as in `score`.

        Raises:
            BadRequest, EnginepoolError: as in `embed`.
        """
        check_options("similarity", options, SimilarityOptions)
        queries, documents = check_rows("queries", queries), check_rows("documents", documents)
        queries = instructed("queries", queries, options.pop("instruction", None))
        return (await self._cosines(queries, documents, options))[0]

    async def rerank(
        self, query: str | Ids, documents: Sequence[str] | Sequence[Ids], **options: Unpack[RerankOptions]
    ) -> RerankResult:
        """Put documents in the order of their relevance to a query, by what the group's model is:

            a classifier of pairs (cross-encoder)   its score of (query, document), with the model's own separator
            a causal model                          the probability of the first of its labels, over all of them
            an embedding model                      the cosine of the two embeddings

        Args:
            query: text or token ids.
            documents: texts, or token ids, as the query.
            group: may be left out where the pool has one group.
            label_token_ids: causal models: two or more token ids that may follow; the first one means relevant.
            labels: the same by their texts (`["yes", "no"]`), as in `score`.
            instruction: a text that goes before the query, as in `embed`; the query is text, then. Default: None.
            top_n: so many of the best. Default: None, which is all.
            truncation: as in `score`, of documents; for an embedding model as in `embed`, also of the query.
            priority, timeout, retry_busy, min_version, version: as in `score`.

        Raises:
            BadRequest: an argument cannot be served; `field` names it. `group`: its model has several scores for a pair.
            UnknownGroup, PoolDown: there is no such group; none of its workers was ever ready.
            EnginepoolError: as in `score`.
        """
        check_options("rerank", options, RerankOptions)
        documents = check_rows("documents", documents)
        top_n = options.pop("top_n", None)
        [query] = instructed("query", [query], options.pop("instruction", None))
        ids, texts = options.pop("label_token_ids", None), options.pop("labels", None)
        labels = check_labels(ids) or check_label_texts(texts, ids)
        most = None if top_n is None else check_int("top_n", top_n, 1, len(documents))
        left = self._connection.within(check_timeout(options.get("timeout")))
        limits = await self._limits(options.get("group", ""), left())
        if limits.kind == "causal" and len(labels) < 2:
            raise bad("label_token_ids", f"label_token_ids: {len(labels)} labels; a causal model needs two or more", "2")
        if limits.kind != "causal" and labels:
            raise bad("label_token_ids", f"label_token_ids: {len(labels)} labels; this model has none to choose from", "0")
        if limits.kind == "classifier" and limits.labels != 1:
            raise bad("group", f"group: its model has {limits.labels} scores for a pair; reranking needs one", "1")
        row: TruncatedOptions = {**options, "timeout": left()}  # type: ignore[typeddict-item]  # those of every call
        if limits.kind == "embedding":
            cosines, embedded = await self._cosines([query], documents, row)  # type: ignore[list-item]
            return _ranked(cosines[0], most, "embeddings", embedded)
        scoring: dict[str, Any] = {**row}
        if labels:
            scoring |= {"labels" if texts else "label_token_ids": labels, "apply_softmax": True}
        result = await self.score(query, documents, **scoring)
        return _ranked(result.scores[:, 0], most, "labels" if labels else "cross-encoder", result)

    async def _cosines(
        self, queries: Sequence[Any], documents: Sequence[Any], options: TruncatedOptions
    ) -> tuple[Floats, EmbedResult]:
        both = [*queries, *documents]
        result = await self.embed(both, normalize=True, **options)
        count = len(queries)
        return result.embeddings[:count] @ result.embeddings[count:].T, result

    async def _limits(self, name: str, within: float | None) -> GroupLimits:
        """What the model of a group is, said within so many seconds."""
        report, _ = await self._connection.ask(Status(), StatusReport, within)
        groups = [group for group in report.groups if group.name == name or not name]
        if len(groups) != 1:
            names = ", ".join(group.name for group in report.groups)
            raise UnknownGroup(f"group: {name!r} is none of: {names}", field="group", limit=names)
        [group] = groups
        if group.limits is None:
            raise PoolDown(f"group: no worker of {group.name!r} was ready yet; await pool.ready() first")
        return group.limits


def _ranked(scores: Floats, most: int | None, method: str, result: ScoreResult | EmbedResult) -> RerankResult:
    order = np.argsort(-scores, kind="stable")[:most]
    return RerankResult(order, np.ascontiguousarray(scores), method, result.version, result.workers)
