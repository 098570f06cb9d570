"""Commands to all workers of a group: what a caller asks, what it may hear, and what the coordinator owes it.

- A caller hears exactly one final answer.
- The report has one outcome for each worker that the group had when the coordinator took the command.
- An outcome without a code means that the engine ran the command after the caller asked for it.
- An outcome with a code is justified: the worker was not ready, was lost, or did not answer in time.
"""

from collections.abc import Sequence

from enginepool.client.session.events import Answer, Fail
from enginepool.coordinator.core import events as ev
from enginepool.coordinator.core.effects import Effect, KeepHolds, ToClient
from enginepool.coordinator.core.events import Link
from enginepool.coordinator.core.machine import Machine
from enginepool.coordinator.core.states import SlotState
from enginepool.coordinator.fleet.fan_out import OPEN, OPEN_EACH
from enginepool.protocol.messages import ErrorReply
from enginepool.protocol.messages.control import ControlReport, WorkerOutcome
from tests.sim.sleeping import ENDS, HOLDS, SleepOracle, Wish


class SimCommand:
    """A command to one group by one caller. `bad`: the code that it must be refused with. `may`: codes with which it may be."""

    def __init__(
        self, client: int, group: str, at: float, timeout: float | None, bad: str = "", wish: Wish | None = None
    ) -> None:
        self.wish = wish or Wish()
        self.may = {"sleep": ("publishing",), "wake": ("bad_request",)}.get(self.wish.name, ())
        self.client = client
        self.group = group
        self.at = at
        self.timeout = timeout
        self.bad = bad
        #: when it was asked; negative before that
        self.asked = -1.0
        self.outcome = ""

    def __repr__(self) -> str:
        return f"<SimCommand {self.wish} {self.group!r} client={self.client} asked={self.asked:.3f} {self.outcome}>"


class CommandOracle:
    """What callers may hear of their commands."""

    def __init__(self) -> None:
        self.open: list[SimCommand] = []
        #: when the engine of a worker ran a command last, by the command and the name of the worker
        self.ran: dict[tuple[str, str], float] = {}
        self.sleep = SleepOracle()
        #: clients whose owner closed them
        self.closed: set[int] = set()
        #: by code; "" counts the outcomes of workers without a code
        self.counts: dict[str, int] = {}

    def forget(self, now: float, command: SimCommand) -> None:
        """The caller is gone and hears no answer."""
        if command in self.open:
            self.open.remove(command)
            self.sleep.ended(now, command.group, command.wish, reported=False)

    def finished(self, now: float, command: SimCommand, effect: Answer | Fail) -> None:
        """The caller hears its final answer."""
        assert not command.outcome, f"{command}: a second final answer: {effect}"
        assert command.asked >= 0, f"{command}: answered before it was asked"
        self.forget(now, command)
        if isinstance(effect, Fail):
            command.outcome = effect.failure.code
            self._justified(now, command, effect.failure)
            return
        command.outcome = "reported"
        report = effect.message
        assert isinstance(report, ControlReport)
        wish = command.wish
        assert report.command == wish.name and command.group in ("", report.group), f"{command}: {report}"
        assert not command.bad, f"{command}: reported, and should be refused"
        for row in report.workers:
            self._count(row.code)
            ran = self.ran.get((wish.name, row.name.partition("+")[0]), -1.0)
            idle = "no process runs" in row.message or (wish.name in ("pause", "resume") and "not ready" in row.message)
            assert row.code or idle or ran >= command.asked, f"{command}: {row.name} ran it at {ran:.3f}, before it was asked"
        if wish.name != "flush":
            self.sleep.ended(now, report.group, wish, reported=True)
            self.sleep.told(command.asked, report.group, wish, report)

    def _justified(self, now: float, command: SimCommand, failure: ErrorReply) -> None:
        told = f"{command}: {failure.code}: {failure.message}"
        self._count(failure.code)
        if failure.code == "deadline_exceeded":
            assert command.timeout is not None and now >= command.asked + command.timeout, told
        elif failure.code == "closed":
            assert command.client in self.closed, told
        else:
            # `CommandWatch` asserts when `busy` may be.
            assert failure.code in (command.bad, "busy", *command.may), told

    def _count(self, code: str) -> None:
        self.counts[code] = self.counts.get(code, 0) + 1


class CommandWatch:
    """What one coordinator owes the callers of commands, checked at each report. `seconds`: the time that workers have."""

    def __init__(self, machine: Machine, seconds: float) -> None:
        self.machine = machine
        self.seconds = seconds
        #: by link and id, each time that the coordinator took the command: when, the group, the names of its workers then, and
        #: the number of the `KeepHolds` that the answer waits for, or 0
        self._owed: dict[tuple[Link, int], list[tuple[float, str, list[str], int]]] = {}
        #: by group, the latest `KeepHolds`; those that the journal has
        self._holds: dict[str, int] = {}
        self._kept: set[int] = set()
        on = machine._on  # pyright: ignore[reportPrivateUsage] (events are seen one at a time, as the machine takes them)
        real = on[ev.ControlAsked]

        def asked(e: ev.ControlAsked) -> None:
            group, key = machine.core.group_of(e.message.group), (e.link, e.message.id)
            before = [(opened.link, opened.question.id) for opened in machine.questions.open]
            names: list[str] = []
            if group is not None:
                absent = [slot.name for slot in group.slots if slot.worker is None and slot.state is not SlotState.RETIRED]
                names = sorted([*(worker.name for worker in group.workers.values()), *absent])
                names = [name for name in names if e.message.worker in ("", name)]
            earlier = len(machine.core.effects)
            real(e)
            if group is not None and key not in before:
                self._note_holds(machine.core.effects)
                awaited = self._holds.get(group.name, 0) if e.message.command in (*HOLDS, *ENDS) else 0
                self._owed.setdefault(key, []).append((e.now, group.name, names, awaited))
            for said in machine.core.effects[earlier:]:
                if isinstance(said, ToClient) and isinstance(said.message, ErrorReply) and said.message.code == "busy":
                    of_link = sum(link == e.link for link, _ in before)
                    assert of_link >= OPEN_EACH or len(before) >= OPEN, f"{e}: refused while {before} are open"
                    assert (said.link, said.message.id) != key or key not in before, f"{e}: refused, although it is open"

        on[ev.ControlAsked] = asked
        journaled = on[ev.HoldsKept]

        def kept(e: ev.HoldsKept) -> None:
            self._kept.add(e.number)
            journaled(e)

        on[ev.HoldsKept] = kept

    def _note_holds(self, effects: Sequence[Effect]) -> None:
        self._holds.update((effect.group, effect.number) for effect in effects if isinstance(effect, KeepHolds))

    def after(self, effects: Sequence[Effect]) -> None:
        """Events were handled."""
        self._note_holds(effects)
        for opened in self.machine.questions.open:
            lost = [worker for worker in opened.pending.values() if worker.lost]
            assert not lost, f"{opened.question} waits for workers that are lost: {lost}"

    def sent(self, effect: ToClient) -> None:
        """The coordinator sends this."""
        message = effect.message
        if isinstance(message, ErrorReply) and message.id is not None:
            del self._owed.get((effect.link, message.id), [])[:1]  # it may have been asked again since
        if not isinstance(message, ControlReport):
            return
        owed = self._owed.get((effect.link, message.id))
        assert owed, f"a second report, or one without a command: {message}"
        taken, group, names, awaited = owed.pop(0)
        written = awaited in (0, *self._kept) or self.machine.core.now >= taken + self.seconds
        assert written, f"reported before the journal has what is held: {message}"
        assert [row.name for row in message.workers] == names, f"expected outcomes of {names}, got {message.workers}"
        # A pause that was undone with another one says so in all rows, and its group goes on.
        undone = "busy" in {row.code for row in message.workers} and not self.machine.core.groups[group].holds.paused
        for row in message.workers:
            if not undone or row.code != "busy":
                self._justified(taken, group, row)

    def _justified(self, taken: float, group: str, row: WorkerOutcome) -> None:
        workers = self.machine.core.groups[group].workers.values()
        kept = any(worker.name == row.name and worker.joined <= taken for worker in workers)
        if row.code == "engine_error":
            # A caller may let a group go on before all of its engines were paused.
            assert not kept or "generations run" in row.message, f"{row} is not lost"
        elif row.code == "deadline_exceeded":
            assert self.machine.core.now >= taken + self.seconds, f"{row} had less than {self.seconds:g} s"
        else:
            assert row.code in ("", "pool_down"), row

    def quiet(self) -> None:
        """No command is open."""
        assert not self.machine.questions.open, [opened.question for opened in self.machine.questions.open]
