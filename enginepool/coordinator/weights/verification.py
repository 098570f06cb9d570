"""Verifying: is what all members staged what was sent, and is anything in it wrong? No engine has been touched yet."""

from enginepool.coordinator.core.context import Context
from enginepool.coordinator.core.effects import ToWorker
from enginepool.coordinator.core.worker import Worker
from enginepool.coordinator.weights.update import TRANSFER, Refusal, Update, zero_matrices
from enginepool.protocol.basis import MAX_FINDINGS
from enginepool.protocol.messages.weight_reports import Inspect, Inspected

_WRONG = {
    "nan": "are nan",
    "infinity": "are infinity",
    "overflow": "are finite, but infinity in the engine's dtype; send smaller numbers, or set another dtype of the group",
}


def why_refused(update: Update) -> Refusal | None:
    """What is wrong with the weights that the members staged, as far as it is known."""
    for member in update.members.values():
        if member.digest != update.sent_digest:
            return Refusal("update_aborted", f"{member.worker.name} staged other bytes than were sent")
        if refusal := update.version_conflict(member.digest):
            return refusal
        for finding in member.findings:
            if finding.kind != "zero":
                text = f"{finding.name}: {finding.count} elements {_WRONG[finding.kind]}"
                return Refusal("weights_refused", text, finding.name)
    known = update.group.zeros
    for name in sorted(zero_matrices(update) - known) if known is not None else ():
        text = f"{name}: all zero, and it was not in version {update.group.version}"
        return Refusal("weights_refused", text, name)
    return None


def asks_for_zeros(core: Context, update: Update) -> bool:
    """Whether a member must say what is zero in the committed weights, which its engine has. It is asked once. If no member has
    them, zeros are reported, not refused."""
    if update.group.zeros is not None or not zero_matrices(update):
        return False
    if update.inspecting is None:
        worker = next((member.worker for member in update.members.values() if member.worker.holds), None)
        if worker is None:
            return False
        update.inspecting = core.task_id(), worker
        update.due = core.now + core.config.timing.update_inspect_s
        ask_for_zeros(core, update)
    return True


def ask_for_zeros(core: Context, update: Update) -> None:
    """Ask, or ask again, what is zero in the committed weights."""
    if update.inspecting is not None and update.phase == TRANSFER:
        task, worker = update.inspecting
        core.effects.append(ToWorker(worker.link, Inspect(task, "validate")))


def inspected(core: Context, worker: Worker, message: Inspected) -> bool:
    """An engine has said what is zero in it. If it cannot, or not all, zeros are reported, not refused."""
    update = core.update_of(worker.group)
    if update is None or update.inspecting != (message.task, worker):
        return False
    if message.code or len(message.findings) >= MAX_FINDINGS:
        update.group.zeros = frozenset(zero_matrices(update))
    else:
        update.group.zeros = frozenset(finding.name for finding in message.findings if finding.kind == "zero")
    return True
