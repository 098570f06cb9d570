"""The operations that SGLang runs. A new operation is one file and one entry here."""

from enginepool.workers.sglang.operations.base import RowOperation
from enginepool.workers.sglang.operations.embed import Embeddings
from enginepool.workers.sglang.operations.logprobs import ResponseLogprobs
from enginepool.workers.sglang.operations.score import HeadScores, LabelScores

#: of several that serve a model, the first one says of which kind it is
OPERATIONS: tuple[RowOperation, ...] = (LabelScores(), ResponseLogprobs(), HeadScores(), Embeddings())
