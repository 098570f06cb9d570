"""All that a worker knows of the update that it prepares for. Pure: the machine writes it, the executor reads it."""

from enginepool.protocol.messages.weights import (
    Join,
    Joined,
    LoadWeights,
    Prepare,
    Prepared,
    Staged,
    VerifyWeights,
    WeightsLoaded,
)
from enginepool.workers.engine_weights import NewWeights

Request = Prepare | Join | VerifyWeights | LoadWeights
Answer = Prepared | Joined | Staged | WeightsLoaded


class WorkerUpdate:
    """One update, from its `prepare` until it is committed or aborted."""

    def __init__(self, prepare: Prepare, peer: str) -> None:
        self.prepare = prepare
        #: in direct transfer, the name of the engine's side of a process group; "": the executor chooses one
        self.peer = peer
        #: kinds of requests that the executor has, or has answered
        self.requested: set[type[Request]] = {Prepare}
        #: by kind, in the order in which they were given
        self.answers: dict[type[Answer], Answer] = {}
        #: what the engine will load, as far as it is known
        self.weights = NewWeights()
        #: for how many seconds preparing the load kept the engine from forwards; None: preparing is not over
        self.prepared_s: float | None = None
        #: all bytes are received, or their transfer failed; said once the engine has prepared its load
        self.received: Staged | None = None
        #: committed or aborted
        self.closed = False

    def succeeded(self, kind: type[Answer]) -> bool:
        """Whether there is an answer of this kind, without an error."""
        answer = self.answers.get(kind)
        return answer is not None and not answer.code

    @property
    def keeps_buffers(self) -> bool:
        """Whether the buffers that the engine opens for it stay open for the next update, or there are none."""
        prepared = self.answers.get(Prepared)
        return not isinstance(prepared, Prepared) or bool(prepared.code) or prepared.staging == "device"

    @property
    def joins_engine(self) -> bool:
        """Whether the engine joins a process group now."""
        return self.prepare.transfer == "direct" and Join in self.requested and Joined not in self.answers

    @property
    def digest(self) -> str:
        """Of the staged bytes; "": only the engine can say it."""
        staged = self.answers.get(Staged)
        return staged.digest if isinstance(staged, Staged) else ""

    def missing(self) -> str:
        """Why its weights cannot be loaded now, or ""."""
        if not self.succeeded(Prepared):
            return "this update is not prepared here"
        if self.prepare.transfer in ("staged", "ipc") and not self.succeeded(Staged):
            return "nothing is staged here"
        if self.prepare.transfer == "direct" and not self.succeeded(Joined):
            return "the engine is not in the process group"
        return ""
