"""The operations of the sim engine. A new operation is one file and one entry here."""

from enginepool.workers.sim.embeddings import SimEmbeddings
from enginepool.workers.sim.logprobs import SimLogprobs
from enginepool.workers.sim.operation import SimOperation
from enginepool.workers.sim.scores import SimScores

OPERATIONS: tuple[SimOperation, ...] = (SimScores(), SimLogprobs(), SimEmbeddings())
