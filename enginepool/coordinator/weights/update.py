"""The state of one transaction: its members, how far each of them is, and what must hold."""

from collections.abc import Sequence
from typing import Final, Literal, NamedTuple

from enginepool.coordinator.core.events import PublishAsked
from enginepool.coordinator.core.group import Group
from enginepool.coordinator.core.group_weights import GroupWeights
from enginepool.coordinator.core.request import Client, Request
from enginepool.coordinator.core.worker import Worker
from enginepool.coordinator.weights.process_group_info import ProcessGroupInfo
from enginepool.protocol.messages import TaskId
from enginepool.protocol.messages.weight_reports import Finding, publisher_of
from enginepool.protocol.messages.weights import MemoryRegion, PhaseName

OPEN: Final = "open"
JOIN: Final = "join"
TRANSFER: Final = "transfer"
STAGED: Final = "staged"
RESTART: Final = "restart"
HOLD: Final = "hold"
LOAD: Final = "load"
JOURNAL: Final = "journal"
Phase = PhaseName | Literal["journal"]
PHASES: Final = (OPEN, JOIN, TRANSFER, STAGED, RESTART, HOLD, LOAD, JOURNAL)


class Refusal(NamedTuple):
    """Why a transaction is aborted, as its publisher is told."""

    code: str
    reason: str
    field: str = ""
    limit: str = ""


class Member:
    """One worker in a transaction."""

    __slots__ = (
        "broken", "digest", "failure", "findings", "loaded", "on_host", "peer", "rank", "ranks", "recalled", "restart",
        "worker",
    )  # fmt: skip

    def __init__(self, worker: Worker) -> None:
        self.worker = worker
        #: its side of the process group: who, how many ranks, the first of them
        self.peer = ""
        self.ranks = 1
        self.rank = 0
        #: why it stages the bytes in memory of the host and not of its GPUs; "": it does not, or has none
        self.on_host = ""
        #: it says that the process group broke
        self.broken = False
        #: of the bytes that it staged, or of what its engine took
        self.digest = ""
        self.findings: list[Finding] = []
        #: requests that were taken back from it, and whether each was alone with it
        self.recalled: list[tuple[Request, bool]] = []
        #: its engine runs on the new weights
        self.loaded = False
        #: in an update by restart: "" (on the old weights), "leaving", "starting" or "ready"
        self.restart = ""
        #: why it did not, once the load has begun
        self.failure = ""

    def __repr__(self) -> str:
        return f"<Member {self.worker.incarnation} loaded={self.loaded} {self.failure}>"


class Update:
    """A transaction, from `publish` to its final answer."""

    def __init__(self, id: TaskId, client: Client, group: Group, e: PublishAsked) -> None:
        self.id = id
        self.client = client
        self.group = group
        self.offer = offer = e.message
        #: as the history and the journal call it
        self.publisher = publisher_of(client.id, offer.id)
        self.manifest = e.manifest
        self.frames = e.frames
        #: of the offer, which tells a resend from another content under the same id
        self.offer_digest = e.digest
        self.began = now = e.now
        self.phase: Phase = OPEN
        #: when the phase began; when it is overdue
        self.phase_began = now
        self.due = float("inf")
        #: µs that phases took, as `UpdateRecord.phases` has them
        self.times: dict[str, int] = {}
        #: the commit that workers had heard of; a later one that the journal does not have ends the transaction before the load
        self.heard_committed = group.heard_committed
        #: whether the journal could take a commit is not known yet
        self.journal_unchecked = True
        #: none joins after the start; in the order of their ranks
        self.members: dict[str, Member] = {}
        #: those that left, since they have no staging memory, by name; and why. They are restored after the commit.
        self.left_members: dict[str, str] = {}
        #: the members that have not finished the phase
        self.pending: dict[str, Member] = {}
        #: how many had finished it when the publisher was told last
        self.told_finished = 0
        self.process_group: ProcessGroupInfo | None = None
        #: how the process group broke, in the words of the first that reported it
        self.broken_reason = ""
        #: when the publisher is given up, unless it says something
        self.lease_until = now + offer.lease_ms / 1000
        self.sent_bytes = 0
        #: of all bytes that the publisher broadcast; None before it said so
        self.sent_digest: str | None = None
        #: where they lie, if they lie in memory of the publisher
        self.regions: list[MemoryRegion] = []
        #: the publisher wants it committed
        self.commit_asked = False
        #: the drain is over, or none was wanted: what members have in hand is put back
        self.recalls_now = False
        #: generations stay in the engines during the load, as the offer says
        self.keeps_generations = False
        #: batches that were taken back for it
        self.recalled_batches = 0
        #: members take the checkpoint by starting on it; how many there were; why one of them could not
        self.by_restart = False
        self.members_at_start = 0
        self.restart_failed = ""
        #: a member was asked what is zero in the committed weights; nothing else says whether zeros are new
        self.inspecting: tuple[TaskId, Worker] | None = None
        #: what is being journaled
        self.weights: GroupWeights | None = None

    @property
    def direct(self) -> bool:
        """The bytes go straight into the engines."""
        return self.offer.transfer == "direct"

    @property
    def at_once(self) -> bool:
        """All its members start together, and the group is held meanwhile."""
        return self.by_restart and self.group.config.restart_updates == "at_once"

    @property
    def ipc(self) -> bool:
        """The bytes lie in memory of the publisher, out of which engines take them."""
        return self.offer.transfer == "ipc"

    @property
    def recoverable(self) -> bool:
        """Not only the engines have all of the weights: a stager, a checkpoint or another worker has them too."""
        return not self.ipc and not self.direct and not self.offer.partial

    @property
    def sends_bytes(self) -> bool:
        """The publisher sends bytes."""
        return bool(self.manifest)

    @property
    def uses_process_group(self) -> bool:
        """Its bytes go through a process group."""
        return self.sends_bytes and bool(self.offer.address) and not self.ipc

    @property
    def holds_group(self) -> bool:
        """Its group is held."""
        return self.phase in (HOLD, LOAD, JOURNAL) or (self.phase == RESTART and self.at_once)

    @property
    def loading(self) -> bool:
        """Engines load the new weights: an abort is no longer possible."""
        return self.phase in (LOAD, JOURNAL)

    @property
    def needs_publisher(self) -> bool:
        """It cannot go on without its publisher."""
        return not self.commit_asked or (self.sends_bytes and (self.sent_digest is None or self.ipc))

    def time_phase(self, now: float) -> None:
        """The phase that it is in ends."""
        self.times["drain" if self.phase == HOLD else self.phase] = int((now - self.phase_began) * 1e6)

    def version_conflict(self, digest: str) -> Refusal | None:
        """Why weights of this digest cannot have this version. A version names one set of weights: the committed one may
        be published again when it is lost, and nothing else under its name. What is not known cannot be compared."""
        committed, offer = self.group.weights, self.offer
        if self.group.journal_behind:
            lost = [worker for worker in self.group.workers.values() if worker.holds_lost]
            present, same = self.group.heard_committed[1], not lost or digest in {worker.digest for worker in lost}
        else:
            present, same = committed.version, committed.digest in ("", digest)
        if offer.new_run or offer.version != present or same:
            return None
        # Without the digests: a publisher that names bytes of others must not learn what they are.
        text = f"version {present} is committed with other weights; publish these as {present + 1} or higher"
        return Refusal("version_backwards", text, "version", str(self.group.version))

    def __repr__(self) -> str:
        offer = self.offer
        return f"<Update {self.group.name} {offer.transfer} version={offer.version} {self.phase} pending={len(self.pending)}>"


def zero_matrices(update: Update) -> set[str]:
    """Matrices that are all zero in the bytes that were staged; vectors may well be."""
    matrices = {tensor.name for tensor in update.manifest if len(tensor.shape) > 1}
    found = {finding.name for member in update.members.values() for finding in member.findings if finding.kind == "zero"}
    return found & matrices


def failures(members: Sequence[Member]) -> str:
    """The first few of those that failed, and why."""
    failed = [f"{member.worker.name}: {member.failure}" for member in members if member.failure]
    more = f" and {len(failed) - 3} more" if len(failed) > 3 else ""
    return "; ".join(failed[:3]) + more
