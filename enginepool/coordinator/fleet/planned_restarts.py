"""Restarts that an operator asks for: of a worker that serves, of one that starts, and of a place that was retired.

A worker that serves gets nothing new, finishes what it has within `drain_s`, and ends; its place starts the next one at once.
None of it counts as a loss. An open transaction of the group comes first: the worker ends after it.
"""

from enginepool.coordinator.core.context import Context
from enginepool.coordinator.core.events import RestartAsked
from enginepool.coordinator.core.group import Group
from enginepool.coordinator.core.worker_slot import WorkerSlot
from enginepool.coordinator.fleet.slots import WorkerSlots
from enginepool.coordinator.fleet.workers import WorkerRegistry
from enginepool.coordinator.scheduling.worker_kinds import PACKED, PLAIN

#: names of workers that an error lists
_LISTED = 8
_WHY = "an operator restarts it"


class PlannedRestarts:
    """All restarts that an operator asked for and whose next worker has not been started."""

    def __init__(self, core: Context, fleet: WorkerRegistry, places: WorkerSlots) -> None:
        self.core = core
        self.fleet = fleet
        self.places = places

    def asked(self, e: RestartAsked) -> bool:
        """Begin one, if the worker still is the one that is meant; False: the message was refused."""
        core = self.core
        if core.draining:
            core.refuse(e.link, e.id, "shutting_down", "the coordinator is draining")
            return False
        group = core.group_of(e.group)
        if group is None:
            core.unknown_group(e.link, e.id, e.group)
            return False
        place = next((place for place in group.places if place.name == e.worker), None)
        if place is None:
            self._refuse(e, group)
            return False
        # A message that comes twice is about a worker that is gone the second time.
        if place.incarnation == e.incarnation and not place.renewal:
            self._begin(place)
        return True

    def _refuse(self, e: RestartAsked, group: Group) -> None:
        if e.worker in group.workers:
            text = f"worker: {e.worker!r} was not started by this pool; restart it on its own host"
            self.core.refuse(e.link, e.id, "unsupported", text, field="worker")
            return
        names = ", ".join(place.name for place in group.places[:_LISTED]) or "no worker"
        more = ", ..." if len(group.places) > _LISTED else ""
        text = f"worker: {e.worker!r} is not a worker of group {group.name!r}, which starts {names}{more}"
        self.core.refuse(e.link, e.id, "bad_request", text, field="worker")

    def _begin(self, place: WorkerSlot) -> None:
        worker = place.group.workers.get(place.incarnation)
        if place.state in ("backoff", "retired"):
            self._revive(place)
        elif place.state == "up" and worker is not None and worker.stage == "ready":
            place.renewal = "draining"
            place.until = self.core.now + self.core.config.timing.drain_s
            self._drain(place)
        else:
            self._end(place)

    def watch(self) -> None:
        """Look at all that finish what they have."""
        for group in self.core.groups.values():
            for place in group.places:
                if place.renewal == "draining":
                    self._drain(place)

    def _drain(self, place: WorkerSlot) -> None:
        """One step of a worker that is to end."""
        core, group = self.core, place.group
        worker = group.workers.get(place.incarnation)
        if worker is None or core.update_of(group) is not None:
            return  # its place is told of its end; or the transaction of which it may be a member has its turn
        if not worker.leaving:
            worker.leaving = True
            worker.routing.update(worker)
        if not (worker.batches or worker.texts) or core.now >= place.until:
            self._end(place)

    def _end(self, place: WorkerSlot) -> None:
        place.renewal = "ending"
        worker = place.group.workers.get(place.incarnation)
        if worker is None:
            self.places.end(place, _WHY)
        else:
            self.fleet.recall(worker)
            self.fleet.lose(worker, _WHY, kill=True)

    def _revive(self, place: WorkerSlot) -> None:
        """Forget why it waits or was given up: it starts with the next look at the places."""
        group = place.group
        place.state, place.until, place.retired = "backoff", self.core.now, ""
        place.losses, place.hasty, place.repeats, place.signature = [], 0, 0, ""
        place.failure, place.hopeless = "", False
        group.down = ""
        group.gone.pop(PACKED if place.packed else PLAIN, None)
