"""How a simulated engine generates: all its sequences get tokens in each step, as in a running batch.

A token is a pure function of those before it and of the weights that the engine really has (`workers/sim/tokens.py`).
"""

import math
from array import array
from collections.abc import Callable, Sequence
from itertools import chain
from typing import TYPE_CHECKING

import msgspec

from enginepool.protocol.generated import column_specs, prompt_specs
from enginepool.protocol.messages import FrameSpec, Step, TaskId
from enginepool.workers.events import GenerationLeft, RunGeneration, StepsDone
from enginepool.workers.sim.operation import Weights
from enginepool.workers.sim.prefix_cache import SimPrefixCache
from enginepool.workers.sim.tokens import SimSequence, prompt_logprobs, prompt_top_of
from tests.sim.generating import END_EVERY
from tests.sim.sim_stager import content_of
from tests.sim.traffic import POISON, REFUSED, uid_of

if TYPE_CHECKING:
    from tests.sim.sim_engine import SimEngine


class SimGeneration:
    """A task inside an engine."""

    __slots__ = (
        "adapter", "at", "began", "begun", "hidden", "id", "late_end", "logprobs", "new", "of_prompt", "output", "poisoned",
        "prompt", "refused", "routed", "sequences", "stopped", "top",
    )  # fmt: skip

    def __init__(self, run: RunGeneration, vocab: int) -> None:
        message = run.message
        self.id = message.task
        self.prompt = bytes(run.frames[0])
        self.logprobs, self.top, self.of_prompt = message.logprobs, message.top_logprobs, message.prompt_logprobs
        self.adapter = message.adapter
        self.hidden, self.routed = message.hidden_states, message.routed_experts
        #: its ends come in a message without their last tokens
        self.late_end = self.id[1] % 4 == 0 and not self.routed
        #: where it began, if what the engine counted before matters: what it generates then is not what it would have been
        self.began = message.at if message.sampling.frequency_penalty else 0
        sampling = message.sampling
        self.new = sampling.max_new_tokens
        self.sequences = {i: SimSequence(self.prompt, sampling, i, vocab, END_EVERY) for i in range(message.n)}
        # What it generated before is in its prompt, and is neither.
        given = array("i", self.prompt)[: len(self.prompt) // 4 - message.at]
        self.poisoned, self.refused = POISON in given, REFUSED in given
        #: where the next token of each sequence is
        self.at = dict.fromkeys(self.sequences, message.at)
        #: what each sequence generated here
        self.output = {i: array("i") for i in self.sequences}
        #: the coordinator was told what of its prompt was in the cache
        self.begun = False
        #: the worker has cancelled it
        self.stopped = False

    @property
    def rows(self) -> int:
        return 0 if self.stopped else len(self.sequences)

    @property
    def weight(self) -> int:
        return 0 if self.stopped else len(self.prompt) // 4 + len(self.sequences) * self.new


class SimGenerator:
    """The running batch of one engine."""

    def __init__(self, engine: "SimEngine") -> None:
        self._engine = engine
        self._running: dict[TaskId, SimGeneration] = {}
        #: every task that it was ever given
        self._seen: set[TaskId] = set()
        self._steps = False
        #: how it is paused, by who wants that, and what follows once it is
        self._paused: dict[str, str] = {}
        self._then: list[Callable[[], object]] = []
        self._cache = SimPrefixCache(1 << 12, 4)

    def run(self, run: RunGeneration) -> None:
        """Take a task. It must fit, together with all that is inside."""
        engine, message = self._engine, run.message
        if engine.dead:
            return
        who = f"{engine.host.name}: generation {message.task}"
        can = engine.profile.can
        assert not message.adapter or message.adapter in {*can.adapters, *engine.adapters}, f"{who}: no {message.adapter}"
        assert "generate" in can.operations and not run.unreadable, f"{who}: {run.unreadable}"
        assert message.task not in self._seen, f"{who} runs twice"
        engine.must_be_awake(who)
        self._seen.add(message.task)
        task = SimGeneration(run, can.vocab)
        assert task.sequences and task.new > 0, f"{who}: nothing to generate"
        assert len(task.prompt) // 4 + task.new <= can.longest_sequence, f"{who}: longer than that"
        if message.at:
            assert len(task.sequences) == 1, f"{who}: several sequences go on after the same tokens"
            engine.oracle.stream("resumed")
        engine.oracle.ran[uid_of(task.prompt)] = engine
        engine.oracle.works(uid_of(task.prompt), engine.host.stager.name)
        self._running[task.id] = engine.inside[task.id] = task
        engine.check_room(who)
        self._go_on()

    def pause(self, who: str, mode: str, then: Callable[[], object]) -> None:
        """Stop after the step that runs; do this then."""
        self._paused[who] = mode
        self._then.append(then)
        if mode == "retract":
            self._retract()
        if not self._steps:
            self._stop()
        self._engine.oracle.stream(mode)

    def paused(self, who: str) -> bool:
        return who in self._paused

    def free_stopped(self) -> None:
        """What was cancelled leaves it, if a command keeps it paused."""
        if "command" in self._paused:
            self._retract()
            self._engine.oracle.stream("freed")

    def _retract(self) -> None:
        self._paused = dict.fromkeys(self._paused, "retract")
        for task in self._running.values():
            self._leave_soon(task)

    def _leave_soon(self, task: SimGeneration) -> None:
        if task.stopped and not self._steps and "retract" in self._paused.values():
            self._engine.world.after(0.001, self._leave, task)

    def _stop(self) -> None:
        then, self._then = self._then, []
        for each in then:
            each()

    def resume(self, who: str) -> None:
        """Go on; nothing where it is not paused."""
        self._paused.pop(who, None)
        self._go_on()

    def _go_on(self) -> None:
        if self._running and not self._steps and not self._paused:
            self._steps = True
            self._after_a_step()

    @property
    def wanted(self) -> bool:
        """A task runs that was not cancelled."""
        return any(not task.stopped for task in self._running.values())

    @property
    def leaving(self) -> bool:
        """A task that was cancelled is still inside."""
        return any(task.stopped for task in self._running.values())

    def uses(self, adapter: str) -> bool:
        """Whether a task that is still wanted uses this adapter."""
        return any(task.adapter == adapter and not task.stopped for task in self._running.values())

    def cancel(self, tasks: Sequence[TaskId]) -> None:
        """The worker does not want these any more: each leaves with the step that runs."""
        for task in tasks:
            running = self._running.get(task)
            known = task in self._seen or self._engine.dead  # a dead engine takes none
            assert running is not None or known, f"{task} is cancelled, and never ran"
            if running is not None:  # else the worker, which was held up, will hear that it has left
                assert not running.stopped, f"{task} is cancelled twice"
                running.stopped = True
                self._engine.oracle.stream("stopped")
                self._leave_soon(running)
        if not self.wanted:
            self.resume("command")

    def _leave(self, task: SimGeneration) -> None:
        """It waited."""
        if not self._engine.dead and self._running.pop(task.id, None) is not None:
            del self._engine.inside[task.id]
            self._engine.host.post(GenerationLeft(self._engine.world.now, task.id))

    def _after_a_step(self) -> None:
        engine = self._engine
        engine.world.after(engine.slow * engine.profile.step_s * engine.world.between(0.5, 1.5), self._step)

    def _step(self) -> None:
        """A forward of all sequences is done."""
        engine = self._engine
        if engine.dead or engine.hangs:
            return
        fault = self._fault()
        if sum(inside.rows for inside in engine.inside.values()) > engine.profile.memory:
            engine.crash("MemoryError: too many sequences")
        elif fault == "crash":
            engine.crash(engine.by_chance("the engine crashed in a step"))
        elif fault == "abort":
            engine.host.kill()
        elif fault == "hang":
            engine.hangs = True
        if engine.dead or engine.hangs:
            return
        weights = Weights(content_of(engine.digest, engine.base))
        outs: dict[tuple[int, bool], _Out] = {}
        ends = _Out(0, engine.profile.can.vocab)
        running = [task for task in self._running.values() if not task.stopped]
        failed = self._failed(running, fault)
        for task in running:
            out = outs.setdefault((task.top, task.hidden), _Out(task.top, engine.profile.can.vocab))
            if task in failed:
                sequence = min(task.sequences)
                out.add(task, Step(task.id[1], sequence, task.at[sequence], 0, "error", "refused"), (), ())
                task.sequences.clear()
            if not task.begun and task not in failed:
                task.begun = True
                out.cached.append((task.id[1], self._cache.found(task.prompt, weights, task.adapter)))
                if task.of_prompt:
                    out.add_prompt(task, weights)
                self._cache.add(task.prompt, weights, task.adapter)
            for i in list(task.sequences):
                self._next(out, ends, task, i, weights)
        if fault == "wrong_rows":
            _misplace([out.steps for out in outs.values()], {task.id[1] for task in running if task.poisoned})
        left = [task for task in self._running.values() if task.stopped or not task.sequences]
        for task in left:
            del self._running[task.id], engine.inside[task.id]
        self._steps = False
        self._go_on()
        # Who pauses it when it hears of this step waits for the next one.
        waited, self._then = self._then, []
        now = engine.world.now
        for out in (*outs.values(), ends):
            if out.steps:
                assert len(out.epochs) == 1, f"work of an earlier epoch runs: {out.epochs}"
                engine.host.post(
                    StepsDone(now, out.epochs.pop(), out.steps, *out.frames(), out.cached, out.prompts, [], out.experts)
                )
        for task in left:
            engine.host.post(GenerationLeft(now, task.id))
        for each in waited:  # also where it does not pause any more
            each()

    def _fault(self) -> str:
        """What happens in this step."""
        engine = self._engine
        fault, engine.next_fault = engine.next_fault, ""
        poisoned = any(task.poisoned for task in self._running.values())
        return engine.profile.poison if poisoned else fault

    def _failed(self, running: Sequence[SimGeneration], fault: str) -> list[SimGeneration]:
        failed = [task for task in running if task.refused]
        if fault == "error" and running:
            wronged = self._engine.world.random.choice(running)
            self._engine.oracle.wronged.add(uid_of(wronged.prompt[:8]))
            failed.append(wronged)
        return failed

    def _next(self, out: "_Out", ends: "_Out", task: SimGeneration, i: int, weights: Weights) -> None:
        """The next tokens of a sequence: mostly one."""
        tokens: list[int] = []
        logprobs: list[float] = []
        at, reason, matched = task.at[i], "", None
        for _ in range(3 if self._engine.world.chance(0.05) else 1):
            drawn = task.sequences[i].next(weights._replace(version=task.began).with_adapter(task.adapter))
            tokens.append(drawn.token)
            task.output[i].append(drawn.token)
            logprobs.append(drawn.logprob)
            reason = drawn.reason
            if reason:
                del task.sequences[i]
                self._cache.add(task.prompt + task.output[i].tobytes(), weights, task.adapter)
                matched = drawn.token if reason == "stop" else None
                break
        task.at[i] = at + len(tokens)
        if reason == "length" and task.late_end:  # the coordinator knows it without its end, if that is lost
            ends.add(task, Step(task.id[1], i, task.at[i], 0, reason), (), ())
            reason = ""
        step = Step(task.id[1], i, at, len(tokens), reason, matched)  # pyright: ignore[reportArgumentType]
        out.add(task, step, tokens, logprobs)


def _misplace(messages: Sequence[list[Step]], poisoned: set[int]) -> None:
    """One step says a wrong position: of a poisoned task, if there is one. The coordinator ignores steps of tasks that it has
    stopped."""
    places = [(steps, at) for steps in messages for at in range(len(steps))]
    if places:
        steps, at = min(places, key=lambda place: place[0][place[1]].task not in poisoned)
        steps[at] = msgspec.structs.replace(steps[at], at=steps[at].at + 1)


class _Out:
    """What one step generated, of tasks with the same `top_logprobs` and `hidden_states`."""

    def __init__(self, top: int, vocab: int) -> None:
        self._top, self._vocab = top, vocab
        self.prompts: list[tuple[int, int]] = []
        self._prompt_logprobs, self._prompt_top_ids, self._prompt_top_logprobs = array("f"), array("i"), array("f")
        self.epochs: set[int] = set()
        self.steps: list[Step] = []
        self.cached: list[tuple[int, int]] = []
        self._tokens = array("i")
        self._logprobs = array("f")
        self._asked = False
        self._states = b""
        self.experts: list[tuple[int, int, int]] = []
        self._routes = b""

    def add(self, task: SimGeneration, step: Step, tokens: Sequence[int], logprobs: Sequence[float]) -> None:
        self.epochs.add(task.id[0])
        self.steps.append(step)
        self._tokens.extend(tokens)
        self._logprobs.extend(logprobs if task.logprobs else [math.nan] * len(tokens))
        self._asked = self._asked or task.logprobs
        if task.hidden:
            self._states += states_of(tokens)
        if task.routed and step.reason not in ("", "error"):
            whole = array("i", task.prompt) + task.output[step.sequence]
            self.experts.append((task.id[1], step.sequence, len(whole) - 1))
            self._routes += routes_of(whole)

    def add_prompt(self, task: SimGeneration, weights: Weights) -> None:
        self.prompts.append((task.id[1], task.of_prompt))
        known = prompt_logprobs(task.prompt, task.of_prompt, weights.with_adapter(task.adapter))
        self._prompt_logprobs.extend(known)
        ids, chances = prompt_top_of(task.prompt, known, self._top, self._vocab)
        self._prompt_top_ids.extend(chain.from_iterable(ids))
        self._prompt_top_logprobs.extend(chain.from_iterable(chances))

    def frames(self) -> tuple[list[FrameSpec], tuple[bytes, ...]]:
        shape = (len(self._tokens),)
        specs, frames = [FrameSpec("tokens", "int32", shape)], [self._tokens.tobytes()]
        if self._asked:
            specs.append(FrameSpec("logprobs", "float32", shape))
            frames.append(self._logprobs.tobytes())
        if self._top:
            specs += column_specs(shape[0], False, self._top)
            frames += top_of(self._tokens, self._logprobs, self._top, self._vocab)
        if self._states:
            specs += column_specs(shape[0], False, 0, 2)
            frames.append(self._states)
        if self.experts:
            specs.append(FrameSpec("routed_experts", "int16", (len(self._routes) // 2, 1)))
            frames.append(self._routes)
        if self.prompts:
            specs += prompt_specs(self.prompts, self._top)
            frames.append(self._prompt_logprobs.tobytes())
            if self._top:
                frames += [self._prompt_top_ids.tobytes(), self._prompt_top_logprobs.tobytes()]
        return specs, tuple(frames)


def top_of(tokens: Sequence[int], logprobs: Sequence[float], top: int, vocab: int) -> tuple[bytes, bytes]:
    """The frames `top_ids` and `top_logprobs` of these tokens."""
    ids = array("i", [(token + i) % vocab for token in tokens for i in range(top)])
    return ids.tobytes(), array("f", [logprob - i for logprob in logprobs for i in range(top)]).tobytes()


def states_of(tokens: Sequence[int]) -> bytes:
    """The hidden states from which these tokens are chosen: two numbers each."""
    return array("f", [value for token in tokens for value in (token, -token)]).tobytes()


def routes_of(whole: Sequence[int]) -> bytes:
    """The routed experts of a prompt and its output, in two layers: of each token but the last one its id, and its position."""
    return array("h", [value for at, token in enumerate(whole[:-1]) for value in (token % 128, at % 128)]).tobytes()
