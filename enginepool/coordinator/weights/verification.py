"""Verifying: is what all members staged what was sent, and is anything in it wrong? No engine has been touched yet."""

from enginepool.coordinator.core.context import Context
from enginepool.coordinator.core.effects import ToWorker
from enginepool.coordinator.core.worker import Worker
from enginepool.coordinator.weights.outcomes import UpdateOutcomes
from enginepool.coordinator.weights.update import TRANSFER, Update, zero_matrices
from enginepool.protocol.basis import MAX_FINDINGS
from enginepool.protocol.messages.weight_reports import Inspect, Inspected

_WRONG = {
    "nan": "are nan",
    "infinity": "are infinity",
    "overflow": "are finite, but infinity in the engine's dtype; send smaller numbers, or set another dtype of the group",
}


class Verifying:
    """Verifies what was staged."""

    def __init__(self, core: Context, ending: UpdateOutcomes) -> None:
        self.core = core
        self.ending = ending

    def passes(self, update: Update) -> bool:
        """Whether all members staged what was sent, and nothing in it is wrong. Otherwise the transaction is aborted, or waits
        until a member has said what is zero in the committed weights."""
        for member in update.members.values():
            if member.digest != update.sent_digest:
                text = f"{member.worker.name} staged other bytes than were sent"
                self.ending.abort(update, "update_aborted", text)
                return False
            if wrong := update.version_conflict(member.digest):
                self.ending.abort(update, "version_backwards", wrong, field="version", limit=str(update.group.version))
                return False
            for finding in member.findings:
                if finding.kind != "zero":
                    text = f"{finding.name}: {finding.count} elements {_WRONG[finding.kind]}"
                    self.ending.abort(update, "weights_refused", text, field=finding.name)
                    return False
        zeros = zero_matrices(update)
        if not zeros:
            return True
        known = update.group.zeros
        if known is None:
            self._ask_for_zeros(update)
            return False
        for name in sorted(zeros - known):
            text = f"{name}: all zero, and it was not in version {update.group.version}"
            self.ending.abort(update, "weights_refused", text, field=name)
            return False
        return True

    def _ask_for_zeros(self, update: Update) -> None:
        """What of the committed weights is zero, one member's engine knows."""
        if update.inspecting is None:
            worker = next(iter(update.members.values())).worker
            update.inspecting = self.core.task_id(), worker
            update.due = self.core.now + self.core.config.timing.update_inspect_s
            self.ask(update)

    def ask(self, update: Update) -> None:
        """Ask, or ask again, what is zero in the committed weights."""
        if update.inspecting is not None and update.phase == TRANSFER:
            task, worker = update.inspecting
            self.core.effects.append(ToWorker(worker.link, Inspect(task, "validate")))

    def inspected(self, worker: Worker, message: Inspected) -> bool:
        """An engine has said what is zero in it. If it cannot, or not all, zeros are reported, not refused."""
        update = self.core.update_of(worker.group)
        if update is None or update.inspecting != (message.task, worker):
            return False
        if message.code or len(message.findings) >= MAX_FINDINGS:
            update.group.zeros = frozenset(zero_matrices(update))
        else:
            update.group.zeros = frozenset(finding.name for finding in message.findings if finding.kind == "zero")
        return True
