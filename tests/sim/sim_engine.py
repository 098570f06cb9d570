"""A simulated engine: one forward at a time in virtual time, faults on demand, and a strict eye on its own budget."""

from array import array
from collections import deque
from collections.abc import Sequence
from heapq import heappop, heappush
from typing import Protocol

from enginepool.coordinator.core.text_lanes import MOST_TEXTS
from enginepool.protocol.frames import Buffer
from enginepool.protocol.messages import Capabilities, Done, FrameSpec, PartDone, TaskId, Tokenize
from enginepool.protocol.messages.adapters import AdapterChanged, ChangeAdapter
from enginepool.protocol.messages.control import Command, Commanded, MemoryTag
from enginepool.protocol.packing import Packable, cheap_to_repeat, sequences
from enginepool.workers.codec import encode_ids, encode_texts, failed
from enginepool.workers.engine_weights import LOST_WEIGHTS
from enginepool.workers.events import (
    CommandDone,
    EngineLost,
    EngineReady,
    EngineStage,
    RunBatch,
    RunCommand,
    RunTokenize,
    WorkDone,
    WorkerEvent,
)
from enginepool.workers.texts import TextIds
from tests.sim.adapting import digest_of
from tests.sim.oracle import Oracle
from tests.sim.scores import EMBEDDING, HIDDEN, LOGPROBS, prompts_of, rows_of, salt_of, score_rows
from tests.sim.sim_generator import SimGeneration, SimGenerator
from tests.sim.sim_stager import Stager, content_of
from tests.sim.sleeping import TAGS
from tests.sim.traffic import CHOKING, POISON, REFUSED, TEXT_OFFSET, UNREADABLE, text_of, uid_of
from tests.sim.world import World

_LETTERS = str.maketrans("0123456789", "ghijklmnop")


#: an engine that takes longer to release memory, or to take it back, hangs
MEMORY_S = 20.0


class Profile:
    """The engines of one group: what they can do, how fast they are, and what poison does to them."""

    def __init__(self, world: World, can: Capabilities, version: int) -> None:
        random = world.random
        self.can = can
        #: of the weights on disk: what an engine that starts loads
        self.version = version
        self.forward_s = random.choice((0.0005, 0.005, 0.03))
        self.token_s = random.choice((0.0, 0.0001, 0.001))
        self.load_s = random.choice((0.05, 0.5, 3.0))
        #: first come, first served inside the engine, or by priority
        self.fifo = random.random() < 0.3
        self.poison = random.choice(("crash", "abort", "hang", "wrong_rows"))
        self.load_fails = random.choice((0.0, 0.0, 0.0, 0.2))
        #: how many rows at a time it has memory for
        self.memory = can.inflight_rows + can.sequences
        #: it takes other weights only when it starts
        self.only_at_start = False
        #: what a step of all sequences takes
        self.step_s = 0.01
        #: weights that sleep are gone
        self.sleep_loses_weights = False
        #: what a change of adapters takes at most, and how often a load fails
        self.adapter_s, self.adapter_fails = 0.1, 0.0

    @property
    def seconds_in_flight(self) -> float:
        """The longest that everything in flight takes, one row a forward."""
        return 1.5 * (self.can.inflight_rows * self.forward_s + self.can.inflight_tokens * self.token_s)


class Host(Protocol):
    """The process that an engine lives in."""

    name: str
    group: str
    stager: Stager

    @property
    def governed(self) -> bool:
        """A coordinator has to see to it that this process does not work in a group that is held."""
        ...

    def post(self, event: WorkerEvent) -> None:
        """Give the worker's machine an event."""
        ...

    def kill(self) -> None:
        """The process dies without a word."""
        ...


class SimEngine:
    """One engine. `next_fault` is what happens at the next batch."""

    def __init__(self, world: World, oracle: Oracle, profile: Profile, host: Host) -> None:
        self.world, self.oracle, self.profile, self.host = world, oracle, profile, host
        self.version = profile.version
        #: the weights that it really has: "" for those of its checkpoint, which are number `base`
        self.digest = ""
        self.base = profile.version
        self.slow = 1.0
        self.next_fault = ""
        self.hangs = self.rows_hang = False
        self.dead = False
        #: why it never loads, or ""
        self.broken = ""
        #: such a failure is said to be the same at each start
        self.unusable = False
        #: every batch that runs or waits to, and every generation
        self.inside: dict[TaskId, Task | SimGeneration] = {}
        self.generator = SimGenerator(self)
        #: by the number of commands that came before, then by priority, then by arrival
        self._waiting: list[tuple[int, int, int, Task]] = []
        #: commands that have not run, and how many came
        self._commands: deque[Command] = deque()
        #: those that it has run: one that is delivered twice runs twice
        self._ran = set[TaskId]()
        self._commanded = 0
        self._order = 0
        #: the adapters that it has loaded, and changes of them that it has not made
        self.adapters = set[str]()
        self._changes: deque[ChangeAdapter] = deque()
        self._busy = False
        #: released parts of its memory
        self.asleep: set[MemoryTag] = set()
        #: the command that put it to sleep last
        self._slept: TaskId = (0, 0)
        #: with the tokenizer, which takes one after the other, and long ones at the same time
        self._texts: deque[RunTokenize] = deque()
        self._long_texts: deque[RunTokenize] = deque()

    @property
    def stuck(self) -> bool:
        """Work that is inside never ends."""
        return self.hangs or self.rows_hang

    @property
    def only_generates(self) -> bool:
        """No batch of rows is inside."""
        return all(isinstance(task, SimGeneration) for task in self.inside.values())

    def become(self, version: int) -> None:
        """Answer from other weights from now on, without being asked to."""
        self.version = self.base = version

    def load(self) -> None:
        """Stages, then ready; or it ends on the way."""
        world, profile = self.world, self.profile
        last = world.between(0.1, 2.0) * profile.load_s
        world.after(0.3 * last, self._tell, EngineStage(0, "loading", "weights"))
        if self.broken:
            world.after(0.5 * last, self.crash, self.broken, self.unusable)
            return
        if world.chance(profile.load_fails):
            world.after(0.5 * last, self.crash, self.by_chance("it did not load"))
            return
        world.after(0.7 * last, self._tell, EngineStage(0, "compiling"))
        world.after(last, self._ready)

    def _tell(self, event: EngineStage) -> None:
        if not self.dead:
            self.host.post(EngineStage(self.world.now, event.stage, event.detail))

    def _ready(self) -> None:
        if not self.dead:
            self.host.post(EngineReady(self.world.now, self.profile.can, self.version, self.digest))

    def by_chance(self, reason: str) -> str:
        """A reason that no other process will have: its name with letters for digits."""
        return f"{reason}: {self.host.name.translate(_LETTERS)}"

    def crash(self, reason: str, unusable: bool = False) -> None:
        """The engine is gone and says so."""
        if not self.dead:
            self.dead = True
            self.host.post(EngineLost(self.world.now, reason, unusable))

    # --- scoring -------------------------------------------------------------------------------------------------------

    def run(self, run: RunBatch) -> None:
        """Take a batch. It must fit: alone into a forward, and together with all that is inside."""
        if self.dead:
            return
        task = Task(run)
        can, who = self.profile.can, f"{self.host.name}: batch {run.batch.batch}"
        self.must_be_awake(who)
        lengths = [len(prompt) // 4 for prompts in task.prompts for prompt in prompts]
        task.rows = len(lengths)
        task.weight = _packed_weight(task, can) if run.batch.packed else sum(lengths) + task.rows * (can.page - 1)
        assert run.batch.batch not in self.inside, f"{who} runs twice"
        operations = {part.operation for part in run.batch.parts}
        assert len(operations) == 1 and operations <= {*can.operations}, f"{who}: of {operations}"
        assert task.rows <= can.batch_rows, f"{who}: {task.rows} rows"
        assert task.rows == 1 or task.weight <= _most(run, can), f"{who}: {task.weight} tokens"
        assert max(lengths) <= can.context, f"{who}: a row of {max(lengths)} tokens"
        self.inside[run.batch.batch] = task
        self.check_room(who)
        self._order += 1
        urgency = 0 if self.profile.fifo else -run.batch.priority
        heappush(self._waiting, (self._commanded, urgency, self._order, task))
        if not self._busy:
            self._next()

    def must_be_awake(self, who: str) -> None:
        """It is about to work."""
        assert not self.asleep, f"{who}: while it sleeps: {self.asleep}"
        if self.host.governed:
            self.oracle.commands.sleep.works(self.host.group, who)

    def check_room(self, who: str) -> None:
        """All that is inside fits."""
        can, inside = self.profile.can, self.inside.values()
        sequences = [task for task in inside if isinstance(task, SimGeneration)]
        rows = [task for task in inside if not isinstance(task, SimGeneration)]
        for tasks, most, most_tokens in (
            (rows, can.inflight_rows, can.inflight_tokens),
            (sequences, can.most_sequences, can.most_sequence_tokens),
        ):
            assert sum(task.weight for task in tasks) <= most_tokens, f"{who}: over {most_tokens} tokens"
            assert sum(task.rows for task in tasks) <= most, f"{who}: over {most} rows"

    def _next(self) -> None:
        if self.dead or self.hangs or not (self._waiting or self._commands):
            self._busy = False
            return
        self._busy = True
        # Batches that came before the first command run before the command; later ones wait until it is done.
        if self._commands and not (self._waiting and self._waiting[0][0] <= self._commanded - len(self._commands)):
            self.world.after(self.slow * self.world.between(0.0001, 0.01), self._run_command)
            return
        task = heappop(self._waiting)[3]
        fault, self.next_fault = self.next_fault, ""
        if any(_has(prompts, POISON) for prompts in task.prompts):
            fault = self.profile.poison
        seconds = self.slow * (self.profile.forward_s + self.profile.token_s * task.weight) * self.world.between(0.5, 1.5)
        self.world.after(seconds, self._finish, task, fault, seconds)

    def _finish(self, task: "Task", fault: str, seconds: float) -> None:
        if self.dead:
            return
        if sum(inside.rows for inside in self.inside.values()) > self.profile.memory:
            self.crash("MemoryError: too many rows")
        elif fault == "crash":
            self.crash("the engine crashed")
        elif fault == "abort":
            self.host.kill()
        elif fault == "hang" or self.hangs:
            self.hangs = True
        elif fault == "rows_hang":
            self.rows_hang = True  # the sequences go on
        else:
            now, id_ = self.world.now, task.run.batch.batch
            del self.inside[id_]
            if fault == "error":
                self.oracle.wronged.update(uid_of(prompts[0]) for prompts in task.prompts)
                answer = failed(task.run.batch, "the engine refused the batch", "engine_error", self.version)
                self.host.post(WorkDone(now, id_, answer))
            else:
                forwards = 2 if fault == "two_forwards" else 1
                parts, frames = self._answer(task, fault)
                done = Done(id_, parts, self.version, forwards, int(seconds * 1e6))
                self.host.post(WorkDone(now, id_, done, frames))
            self._next()

    def _answer(self, task: "Task", fault: str) -> tuple[list[PartDone], tuple[Buffer, ...]]:
        can = self.profile.can
        done: list[PartDone] = []
        out: list[Buffer] = []
        short = fault == "wrong_rows"
        for part, prompts in zip(task.run.batch.parts, task.prompts, strict=True):
            self.oracle.works(uid_of(prompts[0]), self.host.stager.name)
            if fault == "two_forwards":
                self.oracle.cut.add(uid_of(prompts[0]))
            if _has(prompts, REFUSED):
                done.append(PartDone(code="engine_error", message="refused"))
                continue
            rows = prompts[1:] if short else prompts
            short = False
            columns, name = part.labels or range(can.labels), "scores"
            if part.operation == "embed":
                columns, name = range(EMBEDDING, EMBEDDING + (part.dimensions or can.embedding)), "embeddings"
            elif part.operation == "logprobs":
                columns, name = range(LOGPROBS, LOGPROBS + part.columns), "logprobs"
            salt = salt_of(content_of(self.digest, self.base), part)
            specs = [FrameSpec(name, "float32", (len(rows), len(columns)))]
            out.append(score_rows(rows, columns, salt))
            if task.run.batch.parts[0].hidden:
                specs.append(FrameSpec("hidden", "float32", (len(rows), can.hidden)))
                out.append(score_rows(rows, range(HIDDEN, HIDDEN + can.hidden), salt))
            done.append(PartDone(specs))
        return done, tuple(out)

    # --- commands ------------------------------------------------------------------------------------------------------

    def command(self, run: RunCommand) -> None:
        """Run a command when the batches that came before it are done."""
        if self.dead:
            return
        if isinstance(run.command, ChangeAdapter):
            # A change from before may come after a link failed.
            wakes = run.command.task < self._slept or any(command.command == "wake" for command in self._commands)
            assert wakes or not self.asleep, f"{self.host.name}: {run.command} while it sleeps"
            self._changes.append(run.command)
            if len(self._changes) == 1:
                self._next_change()
            return
        self._commands.append(run.command)
        self._commanded += 1
        if run.command.command in ("sleep", "wake"):
            self.world.after(MEMORY_S, self._must_be_done, run.command)
        if not self._busy:
            self._next()

    def _must_be_done(self, command: Command) -> None:
        if self.hangs and command in self._commands:
            self.crash("the engine hangs: it did not release or take back memory in time")

    def _run_command(self) -> None:
        if self.dead or self.hangs:
            return
        command = self._commands[0]
        if command.command in ("sleep", "pause", "resume") and command.mode == "abort":
            self.generator.resume("command")
        elif command.command == "pause" and self.generator.wanted and not self.generator.paused("command"):
            self.generator.pause("command", command.mode, self._run_command)
            return
        if command.mode == "abort" and command.command in ("sleep", "pause") and self.generator.leaving:
            self.world.after(self.profile.step_s, self._run_command)
            return
        self._commands.popleft()
        if not self.generator.wanted:
            self.generator.resume("command")  # the last of them has ended
        copy = command.task in self._ran
        self._ran.add(command.task)
        stops = command.mode == "abort" and (command.command == "pause" or (copy and command.command == "sleep"))
        if stops and self.generator.wanted:
            # A caller let the group go on before the engine was empty, or it was told so again after it had gone on.
            later = copy or any(one.command == "resume" for one in self._commands)
            assert later, f"{self.host.name}: {command} while it generates"
            answer = Commanded(command.task, "engine_error", "generations run, and an engine stops only while nothing runs")
            self.host.post(CommandDone(self.world.now, answer))
            self._next()
            return
        name, tags = self.host.stager.name, set(command.tags or TAGS)
        self.oracle.commands.ran[command.command, name] = self.world.now
        before, lost = set(self.asleep), False
        if command.command == "sleep":
            self._slept = command.task
            lost = "weights" in tags - before and self.profile.sleep_loses_weights
            self.asleep |= tags
        elif command.command == "wake":
            self.asleep -= tags
        if self.asleep - before:
            assert not self.generator.wanted, f"{self.host.name}: {command} while it generates"
        if lost:
            self.version, self.digest = 0, LOST_WEIGHTS
        asleep = None if self.asleep == before else sorted(self.asleep)
        self.host.post(CommandDone(self.world.now, Commanded(command.task), asleep, lost))
        self._next()

    # --- adapters ------------------------------------------------------------------------------------------------------

    def _next_change(self) -> None:
        self.world.after(self.slow * self.world.between(0.001, self.profile.adapter_s), self._changed)

    def _changed(self) -> None:
        """The engine has loaded an adapter, or unloaded one, which no sequence uses, or refuses to load it."""
        if self.dead or self.hangs:
            return
        message, refused = self._changes.popleft(), False
        name = message.name
        if message.action == "load" and name not in self.adapters and self.world.chance(self.profile.adapter_fails):
            self.oracle.adapters.refused += 1
            if self.world.chance(0.3):
                self.crash(self.by_chance("the engine crashed while it loaded an adapter"))
                return
            refused = True
        elif message.action == "load":
            self.adapters.add(name)
        else:
            assert not self.generator.uses(name), f"{self.host.name}: {name} is unloaded while it is used"
            self.adapters.discard(name)
        answer = AdapterChanged(message.task, message.digest or digest_of(message.path))
        if refused:
            answer = AdapterChanged(message.task, code="engine_error", message="refused")
        self.host.post(CommandDone(self.world.now, answer, adapters=tuple(sorted(self.adapters))))
        if self._changes:
            self._next_change()

    # --- text ----------------------------------------------------------------------------------------------------------

    def tokenize(self, run: RunTokenize) -> None:
        """A tokenizer takes one text after the other, during forwards."""
        if self.dead:
            return
        long, epoch = run.task.long, run.task.task[0]
        texts = self._long_texts if long else self._texts
        texts.append(run)
        mine = sum(one.task.task[0] == epoch for one in texts)
        assert mine <= (1 if long else MOST_TEXTS), f"{self.host.name}: {mine} texts"
        if len(texts) == 1:
            self._next_text(texts)

    def _next_text(self, texts: deque[RunTokenize]) -> None:
        longer = 50 if texts is self._long_texts else 1
        self.world.after(self.slow * longer * self.world.between(0.0001, 0.005), self._tokenized, texts)

    def _tokenized(self, texts: deque[RunTokenize]) -> None:
        if self.dead or self.hangs:
            return
        run = texts.popleft()
        if texts:
            self._next_text(texts)
        if run.task.operation == "decode":
            ids = rows_of(run.frames[0], run.frames[1])
            self.oracle.works(uid_of(ids[0]), self.host.stager.name)
            event = WorkDone(self.world.now, run.task.task, *encode_texts(run.task.task, [text_of(row) for row in ids]))
            self.host.post(event)
            return
        rows = texts_of(run.task, run.frames, self.profile.can.separator)
        flat = [token for row in rows for token in row]
        now, task = self.world.now, run.task.task
        if CHOKING in flat:
            if self.profile.poison == "hang":
                self.hangs = True
            elif self.profile.poison == "abort":
                self.host.kill()
            else:
                self.crash("the tokenizer choked")
        elif UNREADABLE in flat:
            answer = failed(run.task, "the tokenizer refused the text", "engine_error", self.version)
            self.host.post(WorkDone(now, task, answer))
        else:
            share = run.task.share and self.profile.can.separator is None
            self.host.post(WorkDone(now, task, *encode_ids(task, TextIds(rows), share=share)))


def _most(run: RunBatch, can: Capabilities) -> int:
    """What a batch may weigh: more, where it is of one request whose query is computed once."""
    [part, *others] = run.batch.parts
    shared = len(part.frames) == 3 and not part.item_first and not others
    return can.cached_tokens if shared and 0 < can.cached_query <= len(run.frames[0]) // 4 else can.batch_tokens


def _packed_weight(task: "Task", can: Capabilities) -> int:
    """What the sequences of a packed batch weigh. An engine would die of anything else than what can be joined."""
    run = task.run
    assert can.packs, run.batch
    parts: list[Packable] = []
    at = 0
    for part, prompts in zip(run.batch.parts, task.prompts, strict=True):
        frames = run.frames[at : at + len(part.frames)]
        at += len(part.frames)
        assert part.frames[-1].name == "item_lengths", part.frames
        shares = len(frames) == 3 and len(frames[0]) > 0 and not part.item_first
        query = bytes(frames[0]) if shares else b""
        rows = [len(prompt) // 4 for prompt in prompts]
        items = array("I", bytes(frames[-1])).tolist() if shares else rows
        assert min(items) > 0, f"nothing to score: {len(query)} bytes, {items}"
        tokens = len(query) // 4
        assert max(rows if cheap_to_repeat(tokens, 1) else items) <= can.max_item, (tokens, items)
        parts.append(Packable(query, tokens, items, tuple(part.labels)))
    assert can.hidden or not run.batch.parts[0].hidden
    weight = 0
    for whole, runs in sequences(parts, can.context):
        first = parts[runs[0][0]]
        head = 0 if whole else first.tokens
        length = (
            head
            + 1
            + sum(n + 1 + (parts[p].tokens if whole else 0) for p, start, end in runs for n in parts[p].items[start:end])
        )
        assert length <= can.context, f"a sequence of {length} tokens"
        same = {parts[p].labels if whole else parts[p].query for p, _, _ in runs}
        assert len(same) == 1, f"a sequence of several queries, or whole rows of several labels: {same}"
        weight += length + can.page - 1
    return weight


def texts_of(task: Tokenize, frames: Sequence[Buffer], separator: int | None) -> list[list[int]]:
    """The rows of a text request as ids, joined; behind both texts of a pair is the separator, if there is one."""
    items = rows_of(frames[-2], frames[-1], 1)
    shared = b"" if len(frames) == 2 else bytes(frames[0])
    heads = rows_of(frames[0], frames[1], 1) if len(frames) == 4 else [shared] * len(items)
    behind = [separator] if separator is not None and not task.raw else []
    pairs = [(i, q) if task.item_first else (q, i) for q, i in zip(heads, items, strict=True)]
    return [
        [byte + TEXT_OFFSET for byte in first] + behind + [byte + TEXT_OFFSET for byte in second] + behind
        for first, second in pairs
    ]


class Task:
    """A batch inside an engine."""

    __slots__ = ("prompts", "rows", "run", "weight")

    def __init__(self, run: RunBatch) -> None:
        self.run = run
        self.rows = self.weight = 0
        #: the rows of each part
        self.prompts: list[list[bytes]] = []
        at = 0
        for part in run.batch.parts:
            end = at + len(part.frames)
            self.prompts.append(prompts_of(part, run.frames[at:end]))
            at = end
        assert at == len(run.frames), f"batch {run.batch.batch}: frames are left over"


def _has(prompts: list[bytes], token: int) -> bool:
    return token in array("i", b"".join(prompts))
