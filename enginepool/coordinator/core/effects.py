"""What the coordinator wants done: the outputs of `Machine.handle`, performed in order by the shell.

Messages are protocol structs with their payload frames; the shell encodes frame 0 and sends. A send may fail silently: its
sender repeats what matters, or a deadline notices the silence.
"""

from collections.abc import Sequence

import msgspec

from enginepool.coordinator.core.events import Buffer, Link
from enginepool.coordinator.core.group_holds import GroupHolds
from enginepool.coordinator.core.group_weights import AdapterVersion, GroupWeights
from enginepool.protocol.messages import Message
from enginepool.protocol.messages.weight_reports import UpdateRecord


class Effect(msgspec.Struct, gc=False):
    """Base of all effects."""


class ToClient(Effect):
    """Send to a client."""

    link: Link
    message: Message
    frames: Sequence[Buffer] = ()


class ToWorker(Effect):
    """Send to a worker."""

    link: Link
    message: Message
    frames: Sequence[Buffer] = ()


class StartWorker(Effect):
    """Start the process of slot `index` in `group`, under the name `incarnation`. `weights`: the checkpoint that it starts on;
    None: the configured model."""

    group: str
    index: int
    incarnation: str
    weights: GroupWeights | None = None


class KillWorker(Effect):
    """SIGKILL the process group of `incarnation`; `WorkerExited` follows once all of it has ended."""

    incarnation: str
    #: why, for the operator
    reason: str


class CheckJournal(Effect):
    """See whether the journal could take a commit now. `JournalChecked` follows. No group waits for it."""

    update: tuple[int, int]


class WriteJournal(Effect):
    """Journal the weights of `group`: the commit point of `update`. `JournalWritten` follows, in the order of these effects."""

    update: tuple[int, int]
    group: str
    weights: GroupWeights


class StoreAdapter(Effect):
    """Write an adapter that came as tensors into a folder of this coordinator. `AdapterStored` follows."""

    change: tuple[int, int]
    group: str
    adapter: AdapterVersion
    config: Buffer
    tensors: Buffer


class WriteAdapters(Effect):
    """Journal the adapters of `group`: the commit point of a change. `AdaptersWritten` follows. Once they are written, what
    the coordinator has stored of others of this group is removed."""

    change: tuple[int, int]
    group: str
    adapters: Sequence[AdapterVersion]


class DropStored(Effect):
    """Remove what the coordinator has stored of this adapter: it is not committed."""

    group: str
    adapter: AdapterVersion


class RaiseEpoch(Effect):
    """Journal `epoch`, and start again under a higher one: a peer has heard a higher epoch than this coordinator's."""

    epoch: int
    #: why, for the operator
    reason: str


class KeepHistory(Effect):
    """Write the latest updates of `group` where a successor finds them. No group waits for it."""

    group: str
    records: Sequence[UpdateRecord]


class KeepHolds(Effect):
    """Journal what publishers have stopped in `group`. `HoldsKept` follows, in the order of these effects."""

    number: int
    group: str
    holds: GroupHolds


#: what is written to the state directory, besides commits of weights
ToDisk = CheckJournal | StoreAdapter | WriteAdapters | DropStored | KeepHistory | KeepHolds


class LogLine(Effect):
    """One line for the operator's log. `kind`: its budget there; lines that peers can cause have budgets of their own."""

    text: str
    kind: str = ""


class Drained(Effect):
    """All work is answered and every worker of ours has ended: the process may end. With `keep_workers`, the workers run on."""

    keep_workers: bool = False
