"""What is said to the publisher and to the members of a transaction; `weights` decides when."""

from enginepool.coordinator.core.context import Context
from enginepool.coordinator.core.effects import ToClient, ToWorker
from enginepool.coordinator.weights.update import JOIN, JOURNAL, LOAD, OPEN, TRANSFER, Member, Update
from enginepool.protocol.messages import Message
from enginepool.protocol.messages.weights import Join, LoadWeights, Phase, Prepare, VerifyWeights


def tell(core: Context, update: Update, message: Message) -> None:
    """To the publisher, where it is."""
    if update.client.link is not None:
        core.effects.append(ToClient(update.client.link, message))


def say_join(core: Context, update: Update) -> None:
    """The publisher is rank 0 of the process group."""
    ring = update.process_group
    if ring is not None:
        tell(core, update, Join(ring.name, ring.world, 0, ring.address, ring.backend, id=update.offer.id))


def say_phase(core: Context, update: Update) -> None:
    """Where the transaction stands, and how many members have finished the phase."""
    update.told_finished = done = len(update.members) - len(update.pending)
    if update.phase == JOURNAL:
        return
    # Of a direct transfer, engines take the bytes as the publisher sends them.
    sends = update.phase == LOAD and update.direct and update.sent_digest is None
    tell(core, update, Phase(update.offer.id, TRANSFER if sends else update.phase, len(update.members), done))


def ask(core: Context, update: Update, member: Member) -> None:
    """Send a member what this phase wants of it. It may have it already, and does it once."""
    offer, id_, link = update.offer, update.id, member.worker.link
    if update.phase == OPEN:
        prepare = Prepare(id_, offer.version, offer.transfer, offer.partial, offer.bucket_bytes, offer.path, offer.frames)
        prepare.host, prepare.gpu, prepare.generations = offer.host, offer.gpu, offer.generations
        core.effects.append(ToWorker(link, prepare, update.frames))
    elif update.phase == JOIN and update.process_group is not None:
        ring = update.process_group
        join = Join(ring.name, ring.world, member.rank, ring.address, ring.backend, update=id_)
        core.effects.append(ToWorker(link, join))
    elif update.phase == TRANSFER and update.ipc and update.sent_digest is not None:
        core.effects.append(ToWorker(link, VerifyWeights(id_, update.regions)))
    elif update.phase == LOAD:
        core.effects.append(ToWorker(link, LoadWeights(id_, offer.version)))
