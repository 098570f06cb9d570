"""A worker's work, batches, texts and generations: what is inside the engine, what is held back, which answers are kept. Pure.

`machine` decides whether work is taken, and when it is dropped; here is where each piece of it is. A generation has no answer
that could be kept: its tokens are sent as they come, and it ends with the link.
"""

from collections.abc import Iterable

from enginepool.protocol.messages import TaskId
from enginepool.workers.events import (
    CancelGenerations,
    FreeStopped,
    RunBatch,
    RunGeneration,
    RunTokenize,
    SendToCoordinator,
    WorkerEffect,
)

#: finished answers kept for a batch that is delivered again, and their payload bytes in all
KEPT_ANSWERS = 64
KEPT_BYTES = 16 << 20

Run = RunBatch | RunTokenize | RunGeneration


class TaskLedger:
    """The work of one epoch, and what earlier epochs left inside the engine."""

    def __init__(self) -> None:
        #: work of this epoch that is not answered
        self.running: set[TaskId] = set()
        #: the part of `running` that is not yet given to the engine; empty when `leaving` is, and no weights are taken
        self.held: dict[TaskId, Run] = {}
        #: dropped work that is still inside the engine
        self.leaving: set[TaskId] = set()
        #: the generations of `running`
        self.generating: set[TaskId] = set()
        #: generations that were stopped one by one, and are still inside the engine: only new weights wait for them
        self.stopped: set[TaskId] = set()
        #: the last generation that was taken; their counters grow, so a lower one is a copy
        self.latest: TaskId = (0, 0)
        #: answers of this epoch in the order they were finished; at most KEPT_ANSWERS and KEPT_BYTES
        self.answers: dict[TaskId, SendToCoordinator] = {}
        self.answer_bytes = 0
        #: answers that are not sent yet because the link was unusable; in `answers` too, unless those are full
        self.unsent: dict[TaskId, SendToCoordinator] = {}

    def __repr__(self) -> str:
        return f"running={len(self.running)} held={len(self.held)} leaving={len(self.leaving)} unsent={len(self.unsent)}"

    @property
    def owed(self) -> int:
        """Answers that the coordinator waits for."""
        return len(self.running) + len(self.unsent)

    def begin(self, task: TaskId, run: Run, *, hold: bool) -> list[WorkerEffect]:
        """Take work, which goes into the engine at once unless it is to be held, or something is still leaving the engine."""
        self.running.add(task)
        if isinstance(run, RunGeneration):
            self.generating.add(task)
            self.latest = task
        if self.leaving or hold:
            self.held[task] = run
            return []
        return [run]

    @property
    def generates(self) -> bool:
        """Generations that are wanted run inside the engine."""
        return not self.generating <= self.held.keys()

    @property
    def only_generates(self) -> bool:
        """All work that is not held back is generations."""
        return self.running - self.generating <= self.held.keys()

    def release(self) -> list[Run]:
        """What was held goes into the engine."""
        held = list(self.held.values())
        self.held.clear()
        return held

    def finish(self, task: TaskId, answer: SendToCoordinator, *, said: bool) -> bool:
        """`task` has left the engine, and its answer is kept. False: it was dropped."""
        if task not in self.running:
            return False
        self.running.remove(task)
        if not said:
            self.unsent[task] = answer
        answers = self.answers
        answers[task] = answer
        for frame in answer.frames:
            self.answer_bytes += len(frame)
        while len(answers) > KEPT_ANSWERS or self.answer_bytes > KEPT_BYTES:
            for frame in answers.pop(next(iter(answers))).frames:
                self.answer_bytes -= len(frame)
        return True

    def unsaid(self) -> Iterable[SendToCoordinator]:
        """The answers that are not sent yet; they are now."""
        unsent, self.unsent = self.unsent, {}
        return unsent.values()

    def stop(self, epoch: int, counters: Iterable[int], waiting: object = None) -> list[WorkerEffect]:
        """Drop these generations, and nothing else. `waiting`: what waits for an engine without them, if something does."""
        dropped = self._stop(self.generating.intersection((epoch, counter) for counter in counters))
        return [*dropped, *self.hurry(waiting is not None)]

    def stop_all(self) -> list[WorkerEffect]:
        """Drop all generations, and nothing else."""
        return self._stop(self.generating.copy())

    def is_copy(self, task: TaskId) -> bool:
        """Whether a generation was taken before, or is not wanted any more."""
        return task[0] == self.latest[0] and task <= self.latest

    def stop_up_to(self, task: TaskId) -> list[WorkerEffect]:
        """Drop the generations up to this one, and nothing else. None of them is taken any more."""
        self.latest = max(self.latest, task)
        return self._stop({one for one in self.generating if one <= task})

    def _stop(self, tasks: set[TaskId]) -> list[WorkerEffect]:
        self.generating -= tasks
        self.running -= tasks
        inside = tasks - self.held.keys()
        for task in tasks - inside:
            del self.held[task]
        self.stopped |= inside
        return _cancel(inside)

    def hurry(self, wanted: bool) -> list[WorkerEffect]:
        """What was stopped is to leave the engine now, if that is `wanted`."""
        return [FreeStopped()] if wanted and self.stopped else []

    def generation_left(self, task: TaskId) -> bool:
        """A generation has left the engine. False: it was dropped or stopped before."""
        if task in self.generating:
            self.generating.remove(task)
            self.running.remove(task)
            return True
        self.leaving.discard(task)
        self.stopped.discard(task)
        return False

    def drop(self, *, generations: bool = True) -> list[WorkerEffect]:
        """Drop all work and answers, or all but generations. The work inside the engine leaves it; generations are cancelled
        there."""
        kept = set[TaskId]() if generations else self.generating
        inside = self.running - self.held.keys() - kept
        cancelled = inside & self.generating
        self.leaving |= inside
        self.generating, self.running = kept, kept.copy()
        self.held = {task: run for task, run in self.held.items() if task in kept}
        self.answers.clear()
        self.answer_bytes = 0
        self.unsent.clear()
        return _cancel(cancelled)

    def check(self, epoch: int, *, registered: bool, loaded: bool) -> None:
        """Raise AssertionError when an invariant does not hold. `registered`: the link is usable. `loaded`: the engine is."""
        assert loaded or not self.running
        assert not registered or not self.unsent, "the link is usable and answers are not sent"
        assert self.held.keys() <= self.running
        assert not self.running & self.answers.keys(), "answered and running"
        assert not self.running & self.unsent.keys()
        assert {task[0] for task in (*self.running, *self.answers, *self.unsent)} <= {epoch}
        assert max([task[0] for task in (*self.leaving, *self.stopped, self.latest)]) <= epoch
        assert not self.leaving & self.running
        assert self.generating <= self.running
        assert not self.stopped & (self.running | self.leaving)
        assert not self.generating & (self.answers.keys() | self.unsent.keys()), "a generation has no answer"
        assert len(self.answers) <= KEPT_ANSWERS
        assert self.answer_bytes == sum([len(frame) for answer in self.answers.values() for frame in answer.frames])
        assert self.answer_bytes <= KEPT_BYTES


def _cancel(tasks: set[TaskId]) -> list[WorkerEffect]:
    return [CancelGenerations(sorted(tasks))] if tasks else []
