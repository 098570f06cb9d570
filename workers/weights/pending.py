"""What a worker knows of the update that it prepares for, until that is committed or aborted."""

from enginepool.protocol.manifest import Tensor
from enginepool.protocol.updates import Prepare
from enginepool.workers.engine import MemoryRegion
from enginepool.workers.stager.messages import BytesReceived


class Pending:
    """The update that this worker prepares for."""

    def __init__(self, prepare: Prepare, tensors: tuple[Tensor, ...]) -> None:
        self.prepare = prepare
        self.tensors = tensors
        #: in staged transfer: `joined` is said, and nothing has failed since
        self.joined = False
        #: where its bytes will lie
        self.regions: tuple[MemoryRegion, ...] = ()
        self.sharded = False
        #: those of the next update lie there too
        self.stays = False
        #: the engine is ready to take them, or cannot be, and how long that kept it from its work
        self.readied = False
        self.ready_s = 0.0
        #: the stager's last word
        self.received: BytesReceived | None = None
        #: the engine has it, or tries to take it
        self.taken = False
        #: in direct transfer: the engine joins a process group; the one that it is in
        self.joining = False
        self.group = ""
