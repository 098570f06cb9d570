"""How SGLang runs an operation of rows: the interface. No SGLang here: its classes are arguments.

An operation is one file here and one entry in `table.py`. Its batches are checked, sent, counted and timed by code that does
not know which operation it is (`score/scoring.py`, `score/warmup.py`). The operation answers these questions:

    serves            which models is it for?
    refuse_settings   with which settings of the engine would its answers be wrong?
    change_scheduler  what does it change in SGLang's own code?
    trial             what does a batch of the warm-up ask for?
    measured          what do the outputs of that batch tell of the model?
    check             what does a part ask for that this model cannot answer?
    request           what is SGLang asked?
    entries           where in SGLang's answer to a prompt is what it says of each row?
    outputs           which numbers are answered for these entries?
"""

import uuid
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from enginepool.protocol.messages import Capabilities, Kind, Part
from enginepool.workers.engine import EngineError, Outputs, RowPart
from enginepool.workers.engine_settings import EngineSettings
from enginepool.workers.sglang.host.sentence_modules import Pooling
from enginepool.workers.sglang.patches.row_forwards import BATCH_ID
from enginepool.workers.sglang.score.prompts import Prompts

#: in the names of architectures without a next token whose head scores
SCORING_HEADS = ("Classification", "Reward")


class RowOperation(Protocol):
    """One operation, for one kind of models."""

    #: as in `operations` of `Capabilities`, and of the parts of a batch
    name: str
    kind: Kind
    #: whether a part may ask for the pooled hidden states of its rows
    has_hidden: bool = False
    #: whether its rows may be joined into sequences
    packs: bool = True

    def serves(self, generates: bool, architecture: str) -> bool:
        """Whether it is for a model of this architecture. `generates`: the model predicts a next token."""
        ...

    def refuse_settings(self, wanted: EngineSettings, resolved: Mapping[str, Any]) -> None:
        """Raise SettingsError where an engine that runs with the settings `resolved` would give wrong answers."""

    def change_scheduler(self, pooler: Any, pooling: Pooling) -> None:
        """Change SGLang in a scheduler's process, before it starts. `pooler`: a class of SGLang's module of poolers. `pooling`:
        of a model that embeds, how its rows are pooled."""

    def trial(self) -> Part:
        """What a part of the warm-up asks for; it has no frames."""
        return Part([], operation=self.name)

    def measured(self, can: Capabilities, outputs: Outputs, config: Any) -> Capabilities:
        """`can`, completed by what the outputs of `trial` tell. `config`: the model's own configuration."""
        return can

    def check(self, part: RowPart, can: Capabilities) -> None:
        """Raise EngineError for what only this operation can check: rows and ids are in order."""

    def request(self, types: Any, prompts: Prompts, priority: int, hidden: bool) -> Any:
        """One request object of SGLang's, from its module of request classes. `hidden`: also for the pooled hidden states."""
        ...

    def entries(self, answer: dict[str, Any], packed: bool) -> Sequence[Any]:
        """What SGLang says of a prompt: one entry for the row that it is; packed, one for each delimiter."""
        ...

    def outputs(self, entries: Sequence[Any], part: RowPart, can: Capabilities) -> Outputs:
        """The answer to a part, from the entries of its rows."""
        ...


def common_fields(prompts: Prompts, priority: int) -> dict[str, Any]:
    """What the requests of all operations say: one request object is one message to the scheduler."""
    # Ids of one length: SGLang finds a request to abort by the beginning of its id. The scheduler knows a batch by it.
    batch = uuid.uuid4().hex[:BATCH_ID]
    fields = {"input_ids": prompts.ids, "rid": [f"{batch}{row:08x}" for row in range(len(prompts.ids))], "priority": priority}
    if prompts.delimiters is not None:
        fields["multi_item_delimiter_indices"] = prompts.delimiters
    return fields


class HeadOperation(RowOperation, Protocol):
    """An operation that is answered by what a model has in the place of a next token: a head, or a pooler."""

    def check(self, part: RowPart, can: Capabilities) -> None:
        """There is no next token."""
        if part.asked.labels or part.labels is not None:
            raise EngineError("this model has no next token: labels must be empty")

    def request(self, types: Any, prompts: Prompts, priority: int, hidden: bool) -> Any:
        """Ask for the outputs at the last token of each row, and with `hidden` for what the head saw."""
        request = types.EmbeddingReqInput(**common_fields(prompts, priority), return_pooled_hidden_states=hidden)
        request.normalize_batch_and_arguments()
        for i in range(len(request.input_ids)):
            request[i].priority = priority  # SGLang 0.5.17 does not hand it on
        return request

    def entries(self, answer: dict[str, Any], packed: bool) -> Sequence[Any]:
        """Of a cross-encoder with one label SGLang says a bare number."""
        return answer["embedding"] if packed else [answer["embedding"]]
