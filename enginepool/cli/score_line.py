"""An input line of `enginepool score`."""

from typing import TYPE_CHECKING, Any, cast

from enginepool.cli.jsonl import BadLine, InputLine

if TYPE_CHECKING:
    from enginepool.client.pool import Pool


class ScoreLine(InputLine, forbid_unknown_fields=True):
    """Either `query` and `items`, or `prompts` and `responses`."""

    query: str | list[int] | None = None
    items: list[str | list[int]] | None = None
    prompts: list[str | list[int]] | None = None
    responses: list[str | list[int]] | None = None
    label_token_ids: list[int] | None = None
    apply_softmax: bool | None = None
    item_first: bool | None = None
    return_pooled_hidden_states: bool | None = None
    logprobs: bool | None = None
    raw: bool | None = None

    def check(self) -> None:
        """Raise BadLine unless there is one of the two pairs, and no key of the other."""
        given = [name for name in ("query", "items", "prompts", "responses") if getattr(self, name) is not None]
        if given not in (["query", "items"], ["prompts", "responses"]):
            raise BadLine("needs query and items, or prompts and responses")

    async def answer(self, pool: "Pool", settings: dict[str, Any]) -> dict[str, Any]:
        """Have it scored. The client checks that rows are all text or all ids."""
        if self.query is None:
            result = await pool.score_pairs(cast("Any", self.prompts), cast("Any", self.responses), **settings)
        else:
            result = await pool.score(self.query, cast("Any", self.items), **settings)
        columns = {"scores": result.scores.tolist(), "version": result.version, "tokens": result.usage.tokens}
        return columns if result.hidden is None else columns | {"hidden": result.hidden.tolist()}
