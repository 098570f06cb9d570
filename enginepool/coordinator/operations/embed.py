"""The operation `embed`: the model pools each row to one vector. The answer has its first `dimensions` numbers."""

from collections.abc import Sequence

from enginepool.coordinator.operations.base import Operation, Work, refuse_ids, refuse_length, signature
from enginepool.protocol.errors import WireError
from enginepool.protocol.frames import Buffer
from enginepool.protocol.messages import MAX_DIMENSIONS, Capabilities, Embed, Part, TaskId, Tokenize
from enginepool.protocol.ragged import ITEMS, bad, read_rows

#: values of an embedding, until a worker says how many they are
UNKNOWN_EMBEDDING = 16_384

_SIGNATURE = signature(1)


class EmbedOperation(Operation[Work]):
    """Rows without a query, embedded. `dimensions` and `normalize` are those of its part: a batch may mix them."""

    name = "embed"

    def open(self, message: Embed, frames: Sequence[Buffer]) -> Work:
        dimensions, normalize = message.dimensions, message.normalize
        if not 0 <= dimensions <= MAX_DIMENSIONS:
            most = str(MAX_DIMENSIONS)
            raise bad("dimensions", f"dimensions: {dimensions} is outside 0..{most}", most)
        specs = message.frames
        rows, tokens, longest, max_id, _, text = read_rows(specs, frames, (ITEMS,), "a request to embed")
        part = Part(specs, operation="embed", dimensions=dimensions, normalize=normalize)
        digest = hash(
            (self.name, message.group, dimensions, normalize, message.min_version, message.version, message.truncation, *frames)
        )
        nbytes = sum(map(len, frames))
        return Work(
            self, _SIGNATURE, message.group, rows, tokens, longest, max_id, text, nbytes, digest, part, tuple(frames),
            truncation=message.truncation,
        )  # fmt: skip

    def refuse(self, work: Work, can: Capabilities) -> WireError | None:
        dimensions = work.part.dimensions
        if dimensions > can.embedding or (dimensions and can.dimensions and dimensions not in can.dimensions):
            sizes = ", ".join(map(str, can.dimensions)) or f"1..{can.embedding}"
            return bad("dimensions", f"dimensions: {dimensions}; this model was trained for {sizes}", sizes)
        return refuse_ids(work, can) or refuse_length(work, can)

    def impossible(self, can: Capabilities) -> bool:
        embeds = self.name in can.operations
        return embeds != (can.embedding > 0) or not all(0 < size <= can.embedding for size in can.dimensions)

    def outputs(self, work: Work, can: Capabilities | None) -> Sequence[tuple[str, int]]:
        size = 0 if can is None else can.embedding
        return (("embeddings", work.part.dimensions or size or UNKNOWN_EMBEDDING),)

    def knows_outputs(self, work: Work, can: Capabilities | None) -> bool:
        return work.part.dimensions > 0 or (can is not None and can.embedding > 0)

    def tokenize(self, work: Work, task: TaskId) -> Tokenize:
        return Tokenize(task, work.part.frames, operation=self.name)


EMBED = EmbedOperation()
