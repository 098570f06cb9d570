"""Places: the workers that this pool starts itself, their restarts, and what follows when none can come back.

The life of a place is told in `state`. A successor starts only after the end of the whole process group was seen, and after a
backoff that doubles. A place is retired by more losses within the window than the policy allows, by a failure that a restart
cannot mend, and by two failures in a row that are the same, as long as none of its processes was ever ready. A fault of the
host, which could not make a process, retires no place.
"""

from enginepool.coordinator.core import events as ev
from enginepool.coordinator.core.context import Context
from enginepool.coordinator.core.effects import KillWorker, StartWorker
from enginepool.coordinator.core.group import Group
from enginepool.coordinator.core.worker_slot import WorkerSlot
from enginepool.coordinator.fleet.failures import signature
from enginepool.coordinator.requests.lifecycle import RequestLifecycle
from enginepool.coordinator.scheduling.worker_kinds import PACKED, PLAIN

#: a place that stayed up this long has its backoff forgotten
STEADY_S = 60.0
#: so many failures in a row that are the same, before a place was ever ready: the next start would end like that, too
SAME_FAILURES = 2
#: a backoff is doubled so many times at most: any that is configured is then over its maximum, and the number still a float
MOST_DOUBLED = 128


class WorkerSlots:
    """All places of all groups."""

    def __init__(self, core: Context, requests: RequestLifecycle) -> None:
        self.core = core
        self.requests = requests

    def open(self, group: Group, alive: list[ev.LiveProcess]) -> None:
        """Make the group's places; those whose process survived an earlier coordinator wait for it to dial in."""
        core = self.core
        for index in range(group.config.workers):
            place = WorkerSlot(group, index)
            group.places.append(place)
            survivor = next((p for p in alive if p.group == group.name and p.index == index), None)
            if survivor is not None:
                place.state, place.incarnation = "up", survivor.incarnation
                place.begun = core.now
                place.until = core.now + core.config.timing.silence_s
            else:
                self._start(place)
        group.expect()

    def _start(self, place: WorkerSlot) -> None:
        core, name = self.core, place.group.name
        core.counter += 1
        place.incarnation = f"{name}-{place.index}.{core.epoch:x}.{core.counter}"
        place.state = "up"
        place.before, place.last_words, place.failure = place.last_words, "", ""
        place.begun = core.now
        place.until = core.now + core.config.timing.starting_s
        place.renewal = ""
        weights = place.group.weights if place.group.weights.restart else None
        if place.trial is not None:
            place.tried, weights = True, place.trial
        core.effects.append(StartWorker(name, place.index, place.incarnation, weights))

    def end(self, place: WorkerSlot, reason: str, *, own: bool = False) -> None:
        """Kill the process of a place; `vacate` follows when it has ended. `own`: the reason is the worker's own word."""
        if place.state == "up":
            place.state = "ending"
            place.last_words = reason if own else f"stopped by the pool, because {reason}"
            self.core.effects.append(KillWorker(place.incarnation, place.last_words))

    def postpone(self, place: WorkerSlot) -> None:
        """The host could not make the process of a place: disk space, memory or descriptors ran out. That is no failure of the
        worker, so that nothing is counted, and the place starts again after the longest backoff."""
        place.incarnation = ""
        place.blameless = False
        place.state, place.until = "backoff", self.core.now + self.core.config.restart.backoff_max_s

    def vacate(self, place: WorkerSlot, permanent: bool) -> None:
        """The process of a place has ended: wait and start again, or retire the place."""
        core, policy = self.core, self.core.config.restart
        renewal, place.renewal = place.renewal, ""
        place.incarnation = ""
        if place.trial is not None and not place.tried and not core.draining:
            # It was ended for this: the next one starts on other weights, at once.
            place.state, place.until, place.blameless = "backoff", core.now, False
            return
        if renewal and not core.draining:
            # An operator restarts it: its end counts for nothing.
            place.state, place.until, place.blameless, place.hopeless = "backoff", core.now, False, False
            return
        if place.trial is not None:
            # What it cannot start on is not committed.
            place.blameless, permanent = True, False
        if core.now - place.begun > STEADY_S:
            place.hasty = 0
        place.losses = [at for at in place.losses if core.now - at < policy.window_s]
        if not place.blameless:
            place.losses.append(core.now)
            place.hasty += 1
            self._count_failure(place)
        place.blameless = False
        if permanent:
            place.retired = f"cannot be started: {place.last_words}"
        elif place.repeats >= SAME_FAILURES:
            place.retired = f"failed {place.repeats} times in the same way before it was ready: {place.last_words}"
        elif place.failure and place.repeats and (other := self._given_up_alike(place)) is not None:
            place.retired = _alike(place, other)
        elif len(place.losses) > policy.max_restarts:
            most, span = policy.max_restarts, policy.window_s
            place.retired = f"ended more than {most} times within {span:g} s, the last time: {place.last_words}"
        if core.draining or place.retired:
            place.state = "retired"
            self._log_retired(place)
            self._retire_neighbors(place)
            self.maybe_down(place.group)
            return
        place.state = "backoff"
        place.restarts += 1
        doubled = min(max(0, min(place.hasty, len(place.losses)) - 1), MOST_DOUBLED)
        place.until = core.now + min(policy.backoff_max_s, policy.backoff_s * 2.0**doubled)

    def _count_failure(self, place: WorkerSlot) -> None:
        if place.failure and not place.proven:
            failure = signature(place.failure)
            place.repeats = place.repeats + 1 if failure == place.signature else 1
            place.signature = failure

    def _given_up_alike(self, place: WorkerSlot) -> WorkerSlot | None:
        """A place of the group that was retired for the failure that `place` has had now."""
        for other in place.group.places:
            if other is not place and other.repeats >= SAME_FAILURES and other.signature == place.signature:
                return other
        return None

    def _retire_neighbors(self, place: WorkerSlot) -> None:
        """Places that wait for another start after the failure that has retired this one are not started either."""
        if place.repeats < SAME_FAILURES:
            return
        for other in place.group.places:
            if other.state == "backoff" and other.repeats and other.signature == place.signature:
                other.retired = _alike(other, place)
                other.state = "retired"
                self._log_retired(other)

    def _log_retired(self, place: WorkerSlot) -> None:
        if place.retired:
            command = f"`enginepool restart {place.group.name}/{place.name}`"
            self.core.log(f"worker {place.name} is given up: {place.retired}; {command} starts it again")

    def maybe_down(self, group: Group) -> None:
        """When nothing will ever run in `group` again, or on one class of its workers, its requests are told so."""
        if self.core.draining or not group.places:
            return
        for packed in (False, True):
            self._maybe_gone(group, packed)
        if group.workers or any(place.state != "retired" for place in group.places):
            return
        group.down = f"group {group.name!r}: no worker is left and none will be restarted: {_why(group.places)}"
        self.requests.fail_all(group, "pool_down", group.down)

    def _maybe_gone(self, group: Group, packed: bool) -> None:
        bit = PACKED if packed else PLAIN
        places = [place for place in group.places if place.packed == packed]
        if not places or bit in group.gone or any(place.state != "retired" for place in places):
            return
        if not group.workers and len(places) == len(group.places):
            return  # the whole group is down
        if any(worker.class_ == bit for worker in group.workers.values()):
            return
        name = "packed" if packed else "plain"
        left = f"no {name} worker is left and none will be restarted"
        group.gone[bit] = f"group {group.name!r}: {left}: {_why(places)}"
        self.requests.shut(group)

    def watch(self) -> None:
        """Start what has waited long enough; give up processes that never registered."""
        now = self.core.now
        for group in self.core.groups.values():
            for place in group.places:
                if now < place.until:
                    continue
                if place.state == "backoff" and not self.core.draining:
                    self._start(place)
                elif place.state == "up" and place.incarnation not in group.workers:
                    why = f"its process did not register within {now - place.begun:.0f} s"
                    self.end(place, place.last_words or why, own=bool(place.last_words))

    def extend(self, gap: float) -> None:
        """The coordinator itself stood still for `gap` seconds."""
        for group in self.core.groups.values():
            for place in group.places:
                place.until += gap

    def drain(self) -> None:
        """Start nothing more; end processes that have not registered."""
        for group in self.core.groups.values():
            for place in group.places:
                if place.state == "backoff":
                    place.state = "retired"
                elif place.state == "up" and place.incarnation not in group.workers:
                    self.end(place, "the pool ends")

    def kill_all(self) -> None:
        """End every worker of ours now."""
        for group in self.core.groups.values():
            for place in group.places:
                self.end(place, "the pool ends")

    def ended(self) -> bool:
        """No process of ours is left."""
        return not any(place.incarnation for group in self.core.groups.values() for place in group.places)


def _alike(place: WorkerSlot, other: WorkerSlot) -> str:
    return f"failed in the same way as {other.name} before it was ready: {place.last_words}"


def _why(places: list[WorkerSlot]) -> str:
    return next((f"{place.name} {place.retired}" for place in places if place.retired), "unknown")
